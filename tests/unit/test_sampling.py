"""Sampling: exact thresholds, unbiased draws, log-probabilities of the sampling distribution."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import sharding
from agentrl_jax.rollout import programs, sampling


def sorted_nucleus(p, top_p):
    order = np.argsort(-p, kind='stable')
    keep = order[: int(np.searchsorted(np.cumsum(p[order]), top_p * p.sum() * (1 - 1e-7)) + 1)]
    mask = np.zeros(p.size, bool)
    mask[keep] = True
    return mask


@pytest.mark.parametrize('top_p', [0.1, 0.5, 0.9, 0.999])
def test_top_p_by_bisection_equals_sorting(top_p):
    rng = np.random.default_rng(0)
    weights = np.exp(rng.normal(size=(20, 1000)) * 3).astype(np.float32)
    masks = np.asarray(sampling.truncate(jnp.asarray(weights), top_k=0, top_p=top_p)) > 0
    for row, mask in zip(weights.astype(np.float64), masks, strict=True):
        np.testing.assert_array_equal(mask, sorted_nucleus(row, top_p))


def test_top_k_keeps_the_k_largest():
    weights = jnp.asarray(np.random.default_rng(1).permutation(300)[None].astype(np.float32) + 1)
    truncated = np.asarray(sampling.truncate(weights, top_k=7, top_p=1.0))[0]
    assert sorted(truncated[truncated > 0]) == [294.0, 295.0, 296.0, 297.0, 298.0, 299.0, 300.0]


@pytest.mark.slow('draws often enough for a statistical test')
@pytest.mark.parametrize('vocab', [5, 128, 300])
def test_draws_follow_the_distribution(vocab):
    logits = jnp.asarray(np.random.default_rng(2).normal(size=vocab) * 1.5, jnp.float32)
    n = 40_000
    uniform = (jnp.arange(n) + 0.5) / n  # stratified: the histogram must match to about 1/n
    rows = jnp.broadcast_to(logits, (n, vocab))
    token, logprob = jax.jit(functools.partial(sampling.sample, temperature=0.7))(rows, uniform)
    p = np.asarray(jax.nn.softmax(logits / 0.7))
    counts = np.bincount(np.asarray(token), minlength=vocab) / n
    assert np.abs(counts - p).max() < 3 / n + 1e-6 * vocab
    np.testing.assert_allclose(logprob, np.log(p)[np.asarray(token)], atol=1e-5)


def test_tokens_of_probability_zero_are_never_drawn():
    logits = jnp.full((3, 200), -jnp.inf).at[:, jnp.array([3, 150])].set(0.0)
    edge = jnp.array([0.0, 0.5, 1 - 2**-24])
    token, logprob = sampling.sample(logits, edge)
    assert token.tolist() == [3, 150, 150]
    np.testing.assert_allclose(logprob, np.log(0.5), atol=1e-6)


def test_truncated_logprobs_are_renormalised():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    token, logprob = sampling.sample(logits, jnp.array([0.0]), top_p=0.7)
    # kept set {0.5, 0.3}: 0.5 / 0.8
    assert token[0] == 0
    np.testing.assert_allclose(logprob[0], np.log(0.5 / 0.8), atol=1e-6)


def test_greedy_takes_the_first_of_equal_logits_in_any_block():
    logits = jnp.zeros((2, 300)).at[0, jnp.array([140, 270])].set(3.0).at[1, 255:257].set(1.0)
    token, logprob = sampling.sample(logits, jnp.zeros(2), temperature=0.0)
    assert token.tolist() == [140, 255]
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[jnp.arange(2), token], atol=1e-6)


def test_rows_with_separate_settings_draw_as_if_alone():
    """Each row has a temperature and a top_p; it is greedy if either is 0."""
    rng = np.random.default_rng(4)
    logits = jnp.asarray(rng.normal(size=(6, 300)) * 2, jnp.float32)
    uniform = jnp.asarray(rng.uniform(size=6), jnp.float32)
    settings = [(1.0, 1.0), (0.5, 1.0), (0.7, 0.9), (0.0, 1.0), (0.0, 0.5), (2.0, 0.1)]
    temperature, top_p = jnp.asarray(settings, jnp.float32).T
    token, logprob = jax.jit(programs.sample_rows)(logits, uniform, temperature, top_p)
    for row, (t, p) in enumerate(settings):
        one = slice(row, row + 1)
        expected = sampling.sample(logits[one], uniform[one], temperature=t, top_p=p)
        assert token[row] == expected[0][0]
        np.testing.assert_allclose(logprob[row], expected[1][0], atol=1e-6)
    zero = jnp.zeros(6)
    token, logprob = programs.sample_rows(logits, uniform, zero + 1, zero)
    assert (token == logits.argmax(1)).all()
    np.testing.assert_allclose(logprob, 0.0, atol=1e-6)
    token, _ = programs.sample_rows(logits, uniform, zero + 1e-38, zero + 1)
    assert (token == logits.argmax(1)).all()


def test_top_k_draws_reach_exactly_the_k_largest():
    logits = jnp.asarray(np.random.default_rng(3).permutation(300), jnp.float32) / 100
    uniform = (jnp.arange(64) + 0.5) / 64
    rows = jnp.broadcast_to(logits, (64, 300))
    token, logprob = sampling.sample(rows, uniform, temperature=2.0, top_k=4)
    best = np.argsort(-np.asarray(logits))[:4]
    assert set(token.tolist()) == set(best.tolist())
    shares = dict(zip(best.tolist(), jax.nn.log_softmax(logits[best] / 2.0), strict=True))
    np.testing.assert_allclose(logprob, [shares[i] for i in token.tolist()], atol=1e-6)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_sampling_allocates_nothing_of_the_size_of_its_logits(temperature):
    """Weights were written and read three times; greedy searched for the maximum sequentially."""
    logits, uniform = jnp.zeros((8, 10_240)), jnp.zeros(8)
    sample = functools.partial(sampling.sample, temperature=temperature)
    program = jax.jit(sample).lower(logits, uniform).compile()
    assert program.memory_analysis().temp_size_in_bytes < logits.nbytes / 8
    searches = [
        e for e in jax.make_jaxpr(sample)(logits, uniform).eqns if e.primitive.name == 'argmax'
    ]
    assert all(e.invars[0].aval.shape[1] <= sampling.BLOCK for e in searches)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('how', [{}, {'temperature': 0.0}, {'top_k': 5}, {'top_p': 0.9}], ids=str)
def test_a_non_finite_logit_gives_a_non_finite_log_probability(how, bad):
    """The token is still in the vocabulary."""
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(3, 300)), jnp.float32)
    wrong = logits.at[1, 200].set(bad)
    token, logprob = sampling.sample(wrong, jnp.array([0.1, 0.5, 0.9]), **how)
    assert np.isfinite(logprob).tolist() == [True, False, True]
    assert ((token >= 0) & (token < 300)).all()


def draw_on(sizes, logits, uniform, **how):
    """Return (tokens, log-probabilities, program text) with a split vocabulary on a mesh."""
    mesh = sharding.make_mesh(*sizes)
    rows = P(('data', 'fsdp'))
    draw = jax.shard_map(
        functools.partial(sampling.sample, vocab_shards=mesh.shape['tensor'], **how),
        mesh=mesh,
        in_specs=(rows, rows),
        out_specs=rows,
        axis_names={'data', 'fsdp'},
        check_vma=False,
    )
    parts = NamedSharding(mesh, P(('data', 'fsdp'), 'tensor' if sizes[2] > 1 else None))
    inputs = jax.device_put(logits, parts), jax.device_put(uniform, NamedSharding(mesh, rows))
    program = jax.jit(draw).lower(*inputs).compile()
    return *jax.device_get(program(*inputs)), program.as_text()


HOW = [{}, {'temperature': 0.0}, {'temperature': 0.7, 'top_k': 40}, {'top_p': 0.9}]


@pytest.mark.parametrize('sizes', [(4, 1, 2), (1, 1, 8)], ids=str)
@pytest.mark.parametrize('how', HOW, ids=str)
def test_a_split_vocabulary_draws_like_the_full_one_without_gathering(how, sizes):
    """Every step gathered the logits of all rows, because 75 blocks are not divisible by 2."""
    rows, vocab = 16, 9_600
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, vocab)) * 3, jnp.float32)
    uniform = (jnp.arange(rows) + 0.5) / rows
    token, logprob = jax.jit(functools.partial(sampling.sample, **how))(logits, uniform)
    assert np.unique(token).size > 1
    drawn, its_logprob, text = draw_on(sizes, logits, uniform, **how)
    np.testing.assert_array_equal(drawn, token)
    np.testing.assert_allclose(its_logprob, logprob, atol=2e-6)
    limit, exchanges = (
        rows // sizes[0] * vocab / 16,
        'all-gather|all-reduce|all-to-all|collective-permute',
    )
    exchanged = re.findall(rf'= (.*?) (?:{exchanges})(?:-start)?\(', text)
    shapes = [shape for each in exchanged for shape in re.findall(r'\[([\d,]+)\]', each)]
    assert max(math.prod(map(int, shape.split(','))) for shape in shapes) <= limit, exchanged


def test_one_part_compiles_to_the_program_without_parts():
    """Runs on one device are bit-identical to runs before vocabularies could be split."""
    logits, uniform = jnp.zeros((3, 300)), jnp.zeros(3)
    text = [
        jax.jit(functools.partial(sampling.sample, **how)).lower(logits, uniform).as_text()
        for how in ({}, {'vocab_shards': 1}, {'vocab_shards': 7})
    ]
    assert text[0] == text[1] == text[2]
    assert 'sharding' not in text[0]
