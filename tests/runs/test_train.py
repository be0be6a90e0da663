"""Every config traces a full cycle; levels drawn by a step."""

import dataclasses
import functools
import importlib
import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.machine import sharding
from agentrl_jax.measure import metrics
from agentrl_jax.run import build as build_module
from agentrl_jax.run import loading, parts
from agentrl_jax.run import params as run_params
from agentrl_jax.run import state as start
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.streams import draw_episodes, every_level
from agentrl_jax.text import task as text
from agentrl_jax.types import Demonstrations, Episodes, FrozenParams

ROOT = micro_runs.ROOT
CONFIGS = sorted(p.stem for p in (ROOT / 'configs').glob('*.py') if p.stem != '__init__')


def config_file(name):
    return importlib.import_module(f'configs.{name}').get_config()


def trace(cfg, *, with_rollout):
    """Trace one full cycle of a config; nothing is computed or compiled."""
    cfg = read_config(cfg, None)
    mesh, tokenizer = parts.build_mesh(cfg), loading.build_tokenizer(cfg)
    models = []

    def init():
        config, params = loading.build_model(cfg, tokenizer, mesh)
        models.append(config)
        return params

    params = jax.eval_shape(init)
    optimizers = parts.build_optimisers(cfg)
    run = types.SimpleNamespace(config=cfg, model=models[0], mesh=mesh, optimizers=optimizers)
    state = jax.eval_shape(functools.partial(start.start_state, run), params)
    base = params if cfg.lora.rank else {}
    reference = run_params.policy_of(state.params, {}) if cfg.algorithm.uses_reference else None
    rows = cfg.rollout.num_groups * cfg.rollout.group_size
    turns = cfg.env.max_turns
    out = toy.rollout_of([[(1, 1)] * turns], np.zeros((1, turns)), length=cfg.rollout.max_tokens)
    out = out.replace(actions=jnp.zeros((1, turns, cfg.env.max_actions_per_turn), jnp.int32))
    if cfg.algorithm.CREDITS_SEATS:
        out = out.replace(extra={'seats': np.zeros((1, turns), np.int32)})
    if count := cfg.algorithm.continuations(turns):
        out = toy.forked(out, [1] * count)
    out = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), out)
    tasks = (None,)
    if with_rollout or cfg.context.window or cfg.rollout.constrain:
        tasks = build_module.build_tasks(cfg, tokenizer, mesh)
    if with_rollout and cfg.on_hosts:
        if names := tasks[0].env.FIGURES:
            figures = jax.ShapeDtypeStruct((rows, len(names)), jnp.float32)
            out = out.replace(figures=figures)
    elif with_rollout:
        if words := text.words(tasks[0]):
            shape = (*out.tokens.shape, words)
            out = out.replace(allowed=jax.ShapeDtypeStruct(shape, jnp.uint32))
        each = (member.rollout.episodes for member in cfg.members)
        listed = tuple(Episodes(*[jax.ShapeDtypeStruct((n,), jnp.int32)] * 3) for n in each)
        model = dataclasses.replace(models[0], dtype='float32')  # no compiler options in eval_shape
        programs = build_module.build_rollout_programs(cfg, mesh, model, tasks, {})
        key = jax.eval_shape(lambda: jax.random.key(0))
        policy = run_params.policy_of(state.params, base)
        collected, _ = jax.eval_shape(programs['collect'], policy, tasks, listed, key)
        assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), collected) == out
    fns = parts.build_functions(cfg, models[0], mesh)
    update_settings = build_module.build_update_settings(cfg, mesh, tasks[0])
    learn = functools.partial(build_module.learn, fns=fns, settings=update_settings)
    shape = (cfg.base_rows, cfg.rollout.max_tokens)
    columns = [jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, bool, bool)]
    joined = dict(base=Demonstrations(*columns)) if shape[0] else {}
    frozen = FrozenParams(base, reference)
    after, measured, *_ = jax.eval_shape(learn, state, frozen, out, **joined)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return measured


TRACED = ('demo', 'demo_harness')  # the rest run in `make soak`


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_is_valid(name):
    read_config(config_file(name))


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=[] if n in TRACED else [pytest.mark.soak]) for n in CONFIGS]
)
def test_every_config_builds(name):
    """Traced with small pools and one layer, and the bundled model instead of a path."""
    cfg = config_file(name)
    cfg.env.train_levels = cfg.env.eval_levels = 8
    cfg.model.path = cfg.model.tokenizer = ''
    cfg.model.num_layers = 1
    cfg.rollout.max_response = max(cfg.rollout.max_response, 8)  # the bundled tokenizer needs 8
    units = cfg.batch.microbatch_rows // cfg.batch.prefix_rows
    cfg.mesh.tensor = max(8 // units, 1)  # so that rows fill the data shards
    measured = trace(cfg, with_rollout=not read_config(cfg, None).on_hosts)  # hosts use a loop
    assert set(measured) <= set(metrics.METRICS)


def test_levels_are_drawn_without_repetition_and_by_step():
    draw = functools.partial(draw_episodes, levels=6, groups=6, group_size=2)
    drawn = [draw(jax.random.key(0), step) for step in (0, 1)]
    assert sorted(drawn[0].level[::2].tolist()) == list(range(6))
    assert (drawn[0].level[::2] == drawn[0].level[1::2]).all()
    assert (drawn[0].level != drawn[1].level).any()
    np.testing.assert_array_equal(drawn[0].world_stream, drawn[0].token_stream)
    many = draw_episodes(jax.random.key(0), 0, levels=2, groups=5, group_size=1)
    assert many.level.shape == (5,) and set(many.level.tolist()) <= {0, 1}


def test_validation_plays_every_level_and_ignores_filler_rows():
    """12 episodes over a pool of 5 on 8 shards: 16 rows, each level two or three times in 12."""
    listed = every_level(12, 5, 8)
    assert listed.level.shape == (16,)
    assert np.bincount(listed.level[:12]).tolist() == [3, 3, 2, 2, 2]
    assert sharding.row_shards(parts.build_mesh(micro_runs.config('bandit'))) == 8
