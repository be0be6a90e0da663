"""Totals of a run so far, and the share of its machine that it uses."""

import math
import types

import jax
import jax.extend.core
import jax.numpy as jnp
import micro_runs
import pytest

from agentrl_jax.machine import profiling
from agentrl_jax.measure import metrics, totals
from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.planning import hardware, work
from agentrl_jax.run.config import read as read_config


def test_totals_by_hand():
    row = {'batch/trained_tokens': 30.0, 'filter/collects': 2}
    first = totals.so_far([], row, 0, sampled=100, episodes=16)
    assert first == {
        'progress/tokens': 100,
        'progress/trained_tokens': 30,
        'progress/episodes': 32,
    }
    history = [{'step': 0, **first}]
    row |= {'batch/trained_tokens': 7.0, 'filter/collects': 1}
    second = totals.so_far(history, row, 1, sampled=50, episodes=16)
    assert list(second.values()) == [150, 37, 48]
    # After the last step there is only a validation.
    assert totals.so_far([{'step': 1, **second}], {}, 2, sampled=0, episodes=16) == second
    assert set(first) <= set(metrics.METRICS) and all(type(x) is int for x in second.values())


def test_totals_are_omitted_if_rows_are_missing():
    row = {'batch/trained_tokens': 30.0, 'filter/collects': 1}
    for history in ([], [{'step': 2}], [{'step': 1, **dict.fromkeys(totals.TOTALS, 5)}]):
        assert totals.so_far(history, row, 3, sampled=1, episodes=1) == {}
    broken = totals.so_far([], row | {'batch/trained_tokens': math.nan}, 0, sampled=1, episodes=1)
    assert broken['progress/trained_tokens'] == 0


CONFIG = Qwen2(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def products(jaxpr):
    """FLOPs of the matrix products of a jaxpr without loops; only the first branch counts."""
    flops = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == 'dot_general':
            (axes, _), _ = eqn.params['dimension_numbers']
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
            flops += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        flops += sum(
            products(inner) for inner in list(jax.extend.core.jaxprs_in_params(eqn.params))[:1]
        )
    return flops


def test_the_flops_of_a_forward_pass_match_its_program():
    """Except attention: the program multiplies all pairs of tokens, a token needs earlier ones."""
    rows, length = 3, 16
    params = jax.eval_shape(CONFIG.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    mask = jax.ShapeDtypeStruct((rows, length), bool)

    def logits(params, tokens, mask):
        return CONFIG.logits(params, CONFIG.forward(params, tokens, tokens, mask))

    counted = products(jax.make_jaxpr(logits)(params, tokens, mask).jaxpr)
    # length -> (length + 1) / 2 in the middle of a row; twice the length minus one: all pairs
    ours = work.body(CONFIG, rows * length, 2 * length - 1) + work.head(CONFIG, rows * length)
    assert counted == pytest.approx(ours, rel=1e-6)


ROW = {
    'batch/trained_rows': 8.0,
    'batch/trained_tokens': 80.0,
    'batch/tokens': 400.0,
    'filter/collects': 1,
    'rollout/tokens': 50.0,
    'rollout/response_length': 10.0,
    'time/step_s': 2.0,
}


def test_the_work_of_a_step_by_hand():
    """16 episodes of 50 tokens are played; 8 of them trained in one pass of grpo: 3 forwards."""

    def grpo(**changes):
        return read_config(micro_runs.plain('frozen_lake', algorithm='grpo', **changes), None)

    cfg = grpo(**{'loss.kl_coef': 0.0})
    forward, logits = work.body(CONFIG, 1.0, 50.0), work.head(CONFIG, 1.0)
    expected = 800 * forward + 160 * logits + 3 * (400 * forward + 80 * logits)
    assert work.step_flops(cfg, CONFIG, ROW) == pytest.approx(expected)
    cfg = grpo(**{'loss.kl_coef': 0.1})  # a reference scores them too
    more = work.step_flops(cfg, CONFIG, ROW) - expected
    assert more == pytest.approx(400 * forward + 80 * logits)
    cfg = grpo(**{'context.window': 1})
    assert work.step_flops(cfg, CONFIG, ROW) is None
    assert work.rates(cfg, CONFIG, jax.devices(), ROW) == {}


def test_a_share_needs_a_known_peak():
    changes = {'algorithm': 'grpo', 'loss.kl_coef': 0.0}
    cfg = read_config(micro_runs.config('frozen_lake', **changes))
    per_s = work.step_flops(cfg, CONFIG, ROW) / 2.0
    assert work.rates(cfg, CONFIG, jax.devices(), ROW) == {'perf/flops_per_s': per_s}  # a CPU
    devices = [types.SimpleNamespace(device_kind='NVIDIA H100 80GB HBM3')] * 2
    rates = work.rates(cfg, CONFIG, devices, ROW)
    assert rates['perf/flops_share'] == pytest.approx(per_s / (2 * 989e12))
    for kind, peak in (('TPU v5 lite', 197e12), ('TPU v5p', 459e12), ('TPU v6 lite', 918e12)):
        assert hardware.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak
    for kind in ('GPU of tomorrow', 'NVIDIA H100 PCIe', 'NVIDIA GH200 480GB', 'NVIDIA H100 NVL'):
        assert hardware.peak_flops(types.SimpleNamespace(device_kind=kind)) is None
    assert hardware.peak_flops(types.SimpleNamespace(device_kind='NVIDIA A100-SXM4-80GB')) == 312e12


def test_peak_memory_is_the_device_s_if_it_reports_one(monkeypatch):
    here = profiling.peak_memory()
    assert list(here) == ['perf/host_peak_bytes'] and 1e7 < here['perf/host_peak_bytes'] < 1e12
    stats = [{'peak_bytes_in_use': 7, 'bytes_in_use': 3}, {'peak_bytes_in_use': 9}, None]
    devices = [types.SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    monkeypatch.setattr(jax, 'local_devices', lambda: devices)
    assert profiling.peak_memory()['perf/device_peak_bytes'] == 9
