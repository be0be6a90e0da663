"""A long corridor with pits, and a table policy that walks it: a probe of the turn limit.

In each of CELLS cells one symbol of SYMBOLS goes a cell on (reward 1), some are pits, the rest do
nothing. Who falls loses what was collected and lies in the pit until the episode is cut. Worlds
and cuts are the library's own (text.play_turn); so is the way from rollout to parameters.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny_agents as tiny
import toy_rollouts as toy
import updates
from flax import struct

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs.base import TextEnvironment, environment
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import update
from agentrl_jax.rl.learning import Optim
from agentrl_jax.text import task as text
from agentrl_jax.types import EpisodeStop, Scores, TrainState

CELLS, TURNS, GROUPS, GROUP_SIZE, SEEDS = 8, 12, 6, 8, 8
SYMBOLS = CELLS + 1  # what is seen: a cell or the pit; what is said: a name


@struct.dataclass
class EnvState(environment.EnvState):
    cell: jax.Array  # int32 []
    fallen: jax.Array  # bool []


@struct.dataclass
class EnvParams(environment.EnvParams):
    pits: jax.Array = None  # int32 []  how many of a cell's symbols are pits
    max_steps_in_episode: int = 1000


@dataclasses.dataclass(frozen=True)
class PitCorridor(TextEnvironment):
    name, instruction = 'pit corridor', 'Walk to the door.'
    ACTION_NAMES = tuple('ABCDEFGHI')
    REWARD_QUANTUM, REWARD_BOUNDS = 1.0, (-float(CELLS), 1.0)

    def num_levels(self, params):
        return 1

    def reset_level(self, level, params):
        return EnvState(time=jnp.int32(0), cell=jnp.int32(0), fallen=jnp.bool_(False))

    def advance(self, key, state, action, params):
        kind = (action - 4 * state.cell) % SYMBOLS  # 0: the way on, 1 to pits: a pit
        goes = (kind == 0) & ~state.fallen
        falls = (kind > 0) & (kind <= params.pits) & ~state.fallen
        reward = jnp.where(goes, 1, jnp.where(falls, -state.cell, 0)).astype(jnp.float32)
        after = state.replace(cell=state.cell + goes, fallen=state.fallen | falls)
        return after, reward, goes | falls

    def success(self, state, params):
        return state.cell == CELLS

    def is_terminated(self, state, params):
        return self.success(state, params)

    def lines(self, params):
        return [f'You are in cell {cell}.\n' for cell in range(CELLS)] + ['You are in a pit.\n']

    def line_slots(self, params):
        return [range(SYMBOLS)]

    def line_ids(self, state, params):
        return jnp.where(state.fallen, CELLS, jnp.minimum(state.cell, CELLS - 1))[None]


@functools.cache
def task(pits):
    return text.build_task(
        PitCorridor(),
        EnvParams(pits=jnp.int32(pits)),
        tiny.tokenizer(),
        style='brief',
        max_turns=TURNS,
        max_actions_per_turn=1,
        max_actions_per_episode=99,
        format_penalty=0.0,
    )


def play(params, key, task_, groups=GROUPS):
    """groups x GROUP_SIZE episodes as a Rollout whose turns are two tokens: seen, said."""
    rows = groups * GROUP_SIZE
    logits = jax.nn.log_softmax(params['table'])

    def turn(carry, k):
        worlds, playing = carry
        seen = jax.vmap(task_.env.line_ids, in_axes=(0, None))(worlds.state, None)[:, 0]
        said = jax.random.categorical(jax.random.fold_in(key, k), logits[seen])
        after, outcome = jax.vmap(text.play_turn, in_axes=(None, None, 0, 0, 0))(
            task_, key, worlds, said[:, None], playing
        )
        reward = jnp.where(playing, outcome.reward, 0.0)
        played = (jnp.stack([seen, said]), logits[seen, said], playing, reward)
        return (after, playing & (outcome.stop == EpisodeStop.NONE)), played

    begun = jax.vmap(text.begin, in_axes=(None, 0))(task_, jnp.zeros(rows, jnp.int32))
    (worlds, _), (tokens, logprobs, played, rewards) = jax.lax.scan(
        turn, (begun, jnp.ones(rows, bool)), jnp.arange(TURNS)
    )
    attention = jnp.repeat(played.T, 2, axis=1)
    blank = toy.rollout_of([[(1, 1)] * TURNS] * rows, np.zeros((rows, TURNS)), length=2 * TURNS)
    said = attention & blank.action_mask
    return blank.replace(
        tokens=tokens.transpose(2, 0, 1).reshape(rows, -1),
        attention_mask=attention,
        action_mask=said,
        logprobs=jnp.where(said, jnp.repeat(logprobs.T, 2, axis=1), 0.0),
        turn=jnp.where(attention, blank.turn, -1),
        rewards=rewards.T,
        num_turns=played.sum(0),
        success=jax.vmap(task_.env.success, in_axes=(0, None))(worlds.state, None),
    )


def hidden(params, tokens, positions, attention_mask):
    """The policy knows what it sees and nothing else: a row of the table per symbol."""
    return jax.nn.one_hot(tokens, SYMBOLS)


@functools.cache
def program(name):
    """Jitted (task, horizons int32 [steps], keys) -> (success, score, sampled tokens), per seed."""
    algorithm = ALGORITHMS[name]()
    tx = Optim(weight_decay=0.0, max_grad_norm=10.0).tx(0.1)
    fns = ModelFns(hidden, lambda p: p['table'])

    def step(state, task_, key, horizon):
        rollout = play(state.params, key, task_.replace(turn_limit=horizon))
        zeros = jnp.zeros_like(rollout.logprobs)
        scores = Scores(old_logprobs=rollout.logprobs, ref_logprobs=zeros, values=zeros)
        batch = algorithm.make_batch(rollout, scores, group_size=GROUP_SIZE)
        how = updates.settings(len(batch.tokens), tx=tx, algorithm=algorithm)
        state, _ = update.update_step(state, batch, fns=fns, how=how)
        return state, rollout.action_mask.sum()

    def run(task_, horizons, key):
        table = {'table': jnp.zeros((SYMBOLS, SYMBOLS))}
        state = TrainState(
            step=jnp.int32(0),
            params=table,
            opt_state=tx.init(table),
            critic_params=None,
            critic_opt_state=None,
            kl_coef=jnp.float32(0),
            skipped=jnp.int32(0),
        )
        keys = jax.random.split(key, len(horizons) + 1)
        state, sampled = jax.lax.scan(
            lambda state, x: step(state, task_, *x), state, (keys[1:], horizons)
        )
        whole = play(state.params, keys[0], task_, groups=64)  # the full horizon
        return whole.success.mean(), whole.returns.mean(), sampled.sum()

    quick = {'xla_backend_optimization_level': 0}  # compiling is most of the time
    return jax.jit(jax.vmap(run, in_axes=(None, None, 0)), compiler_options=quick)


def train(name, pits, horizons):
    """(success, score, sampled tokens) of SEEDS policies after a step at each of the horizons."""
    keys = jax.random.split(jax.random.key(0), SEEDS)
    return jax.device_get(program(name)(task(pits), jnp.asarray(horizons, jnp.int32), keys))
