"""Every algorithm makes an update from the episodes of two environments.

The episodes are played by rollout.collect itself, but each turn's tokens are given: half of the
members of a group follow the oracle, some say nothing valid, the rest act at random. So every group
has a spread, worlds end inside episodes, and all that an update reads is real.
"""

import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.extras.distillation.distilling import Distilling
from agentrl_jax.imitation import demonstrations
from agentrl_jax.measure import metrics
from agentrl_jax.rollout import device
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.sampling import Sampler
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run import build as build_module
from agentrl_jax.run import parts as assemble
from agentrl_jax.run import state as start
from agentrl_jax.run.build import build
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import EpisodeStop, Frozen

TURNS, ACTIONS, EPISODES, LENGTH, RESPONSE = 3, 6, 16, 320, 40
QUICK = {'xla_backend_optimization_level': 0}
KEY = jax.random.key(3)
OPTIONS = {
    'opd': {'opd.teachers': ('another',), 'opd.divergence': 'sampled'},
    'maxrl': {'env.format_penalty': 0.0},
}
QUICKLY = ('ppo', 'gigpo', 'agent_evol', 'gspo_turn')  # the others in `make soak`
WORLDS = ('frozen_lake', 'bandit', 'library')  # a grid, an end at the first answer, a tool
# No program of an update has an environment in it: more of its cells would find no more.
CELLS = [
    pytest.param(algorithm, world, marks=[] if algorithm in QUICKLY else [pytest.mark.soak])
    for index, algorithm in enumerate(ALGORITHMS)
    if algorithm != 'rae'  # is for games of two players: test_self_play.py
    for world in (WORLDS[index % 3], WORLDS[(index + 1) % 3])
]


def config(name, **changes):
    """The same shapes for every environment, so that an algorithm is compiled once."""
    sizes = {
        'env.max_turns': TURNS,
        'env.max_actions_per_turn': ACTIONS,
        'env.max_actions_per_episode': ACTIONS,
        'rollout.max_tokens': LENGTH,
        'rollout.max_response': RESPONSE,
        'loss.entropy_coef': 0.0,
        'batch.minibatch_rows': EPISODES,
        'batch.microbatch_rows': EPISODES,
        'frozen_lake.success_rate': 1.0,
        'library.max_hops': 2,
    }
    return micro_runs.config(name, **(sizes | changes))


@functools.cache
def world(name):
    """A run without its training: task, model and parameters."""
    return build(config(name, algorithm='grpo'))


def best_actions(run, levels):
    """Names the oracle would say in each world, one after another: lists of indices."""
    task = run.training.tasks[0]
    env, env_params = task.env, task.env_params
    step = jax.jit(
        jax.vmap(lambda s, part: env.step_env(KEY, s, env.env_action(s, part), env_params))
    )
    states = jax.vmap(env.reset_level, (0, None))(levels, env_params)
    said, done = [[] for _ in levels], np.zeros(len(levels), bool)
    for used in range(ACTIONS):
        spent = np.full(len(levels), used)
        best = env.plans(jax.device_get(states), spent, ACTIONS, env_params)
        parts = np.array([plan[0] if plan else 0 for plan in best], np.int32)
        for b in np.flatnonzero(~done):
            said[b].append(int(parts[b]))
        _, states, _, ended, _ = step(states, parts)
        done |= np.asarray(ended)
    return said


def plans(run, per_turn):
    """Indices into the action names for each episode and turn; [] = an answer without an action."""
    rng, levels = np.random.default_rng(0), np.repeat(np.arange(4), 4)
    chosen = []
    for b, best in enumerate(best_actions(run, levels)):
        if b % 4 in (0, 1):
            plan = [best[i : i + per_turn] for i in range(0, len(best), per_turn)]
        elif b % 4 == 2:
            plan = [[], []]
        else:
            names = len(run.training.tasks[0].env.ACTION_NAMES)
            plan = [rng.integers(names, size=min(per_turn, 4)).tolist() for _ in range(TURNS)]
        chosen.append((plan + [[0]] * TURNS)[:TURNS])
    return jnp.asarray(levels, jnp.int32), chosen


def scripted(run, chosen):
    """Token ids of the answers, int32 [E, K, L]."""
    end = int(run.training.tasks[0].eos_ids[0])
    ids = np.full((EPISODES, TURNS, RESPONSE), end, np.int32)
    for b, turns in enumerate(chosen):
        for k, plan in enumerate(turns):
            answer = (
                demonstrations.answer_tokens(run.training.tasks[0], run.tokenizer, plan)
                if plan
                else []
            )
            ids[b, k, : len(answer)] = answer
    return jnp.asarray(ids)


def play(params, task, listed, ids, *, model):
    """rollout.collect with the given answers; the log-probabilities are the policy's."""

    class Scripted(Sampler):
        def draw(self, slots, logits, uniform, *, vocab_shards=1):
            row = jnp.minimum(slots.episode, EPISODES - 1)
            turn = jnp.minimum(slots.world.turn, TURNS - 1)
            token = ids[row, turn, jnp.minimum(slots.response, RESPONSE - 1)]
            logprobs = jax.nn.log_softmax(logits)
            return token, jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]

    settings = RolloutSettings(
        Player(model),
        slots=8,
        serve_rows=4,
        max_tokens=LENGTH,
        max_response=RESPONSE,
        sampler=Scripted(),
    )
    state = device.start(params, task, listed, settings=settings)
    return device.play(state, params, task, listed, (KEY, KEY), settings=settings).out


@functools.cache
def episodes(name):
    """A rollout of 4 groups of 4."""
    run = world(name)
    levels, chosen = plans(run, 1 if name in ('bandit', 'library') else 2)
    stream = jnp.arange(EPISODES, dtype=jnp.int32)
    listed = Episodes(level=levels, token_stream=stream, world_stream=stream)
    program = jax.jit(functools.partial(play, model=run.model), compiler_options=QUICK)
    return jax.device_get(program(run.params, run.training.tasks[0], listed, scripted(run, chosen)))


@functools.cache
def learner(algorithm):
    """(jitted build.learn, the state before the update) of an algorithm; no environment in it."""
    cfg = read_config(config('frozen_lake', algorithm=algorithm, **OPTIONS.get(algorithm, {})))
    run = world('frozen_lake')
    txs = assemble.build_optimisers(cfg)
    fns = assemble.build_functions(cfg, run.model, run.mesh)
    extras, more = (), {}
    if cfg.algorithm.other_models:
        extras = (Distilling(full=False, teachers=(fns,)),)
        more = {'teachers': (jax.tree.map(lambda x: 1.5 * x, run.params),)}
    how = build_module.build_learning(cfg, run.mesh, None, extras)
    program = functools.partial(build_module.learn, fns=fns, how=how)
    parts = type('Parts', (), dict(config=cfg, model=run.model, mesh=run.mesh, txs=txs))
    state = start.start_state(parts, run.params)
    reference = run.params if cfg.needs_reference else None
    frozen = Frozen({}, reference, more)
    return functools.partial(jax.jit(program, compiler_options=QUICK), state, frozen), state


@pytest.mark.parametrize('name', WORLDS)
def test_the_episodes_hold_every_kind_of_end(name):
    out = episodes(name)
    assert out.success.any() and not out.success.all()
    assert (out.episode_stop == EpisodeStop.TERMINATED).any()
    spread = out.returns.reshape(4, 4)
    assert (spread.max(1) > spread.min(1)).all()
    if name != 'bandit':  # whose first valid answer ends the world
        solved = out.success & (out.num_turns > 1)
        assert solved.any() and (out.num_turns == TURNS).any()


@pytest.mark.parametrize(('algorithm', 'name'), CELLS)
def test_one_update(algorithm, name):
    """Something is learned, nothing is skipped, and a turn that ends the world has its share."""
    program, before = learner(algorithm)
    out = episodes(name)
    if algorithm == 'vine':
        out = jax.device_get(toy.forked(out, (2, 2, 1, 1)))
    state, measured, _, advantages = jax.tree.map(np.array, program(out))
    assert set(measured) <= set(metrics.METRICS)
    assert measured['update/skipped'] == 0 and np.isfinite(measured['policy/loss'])
    assert measured['policy/grad_norm'] > 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, before.params)
    assert max(jax.tree.leaves(moved)) > 0
    last = out.action_mask & (out.turn == out.num_turns[:, None] - 1)
    ended = (out.episode_stop == EpisodeStop.TERMINATED)[:, None]
    trained = np.isfinite(advantages).all(1)  # imitation leaves episodes out: they are nan
    assert trained.sum() == measured['batch/trained_rows']
    assert trained.all() or algorithm == 'agent_evol'
    advantages[~trained] = 0
    assert (advantages[~out.action_mask] == 0).all()
    assert (advantages[last & ended] != 0).any()
