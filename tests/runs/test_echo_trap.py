"""The echo trap in a bandit: StarPO falls into a habit, StarPO-S outlives it (arXiv:2504.20073).

Eight prompts, one per group; to every one of them a sure word pays 0.1. To two of them a risky word
pays 1 one time in five, so it is worth twice the sure one; to the others it pays nothing. Six more
words are malformed. The policy is a row of logits per prompt plus one that all prompts share, which
is how a habit spreads: the sure word is soon said to everything, returns within groups are all
equal, and nothing is left to learn from. Everything behind the table is the library's own path, and
a life ends when collapse.judge raises RAGEN's stop rule on the in-group std.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy
import updates

from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.measure import collapse, metrics
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses, update
from agentrl_jax.rl.algorithm import Clip, Filter
from agentrl_jax.rl.learning import Optim
from agentrl_jax.types import Scores

pytestmark = pytest.mark.soak
WORDS, GROUPS, GROUP_SIZE, STEPS = 8, 8, 8, 150
SURE, RISKY, RISKY_PROMPTS = 0, 1, 2
SHARED = 4.0  # weight of the row that all prompts share
ROWS = GROUPS * GROUP_SIZE
BLANK = toy.rollout_of([[(1, 1)]] * ROWS, np.zeros((ROWS, 1)), length=2)
STARPO = dict(keep=GROUPS, clip_high=0.2)
STARPO_S = dict(keep=GROUPS // 4, clip_high=0.28)
REPORTED = ('rollout/success', 'rollout/return', 'group/return_std', 'policy/entropy')


def hidden(params, tokens, positions, attention_mask):
    shared = jnp.full((*tokens.shape, 1), SHARED)
    return jnp.concatenate([jax.nn.one_hot(tokens, GROUPS), shared], axis=-1)


def values(params, critic_params, tokens, positions, attention_mask):
    return hidden(None, tokens, None, None) @ critic_params['value']


def play(head, key, luck):
    """A rollout of one word per episode; success: the risky word, where it can pay."""
    k_word, k_luck = jax.random.split(key)
    prompt = jnp.repeat(jnp.arange(GROUPS), GROUP_SIZE)
    logits = jax.nn.log_softmax(hidden(None, prompt[:, None], None, None)[:, 0] @ head)
    word = jax.random.categorical(k_word, logits)
    risky = prompt < RISKY_PROMPTS
    won = risky & (jax.random.uniform(k_luck, (ROWS,)) < luck)
    paid = jnp.where(word == SURE, 0.1, jnp.where(word == RISKY, won.astype(jnp.float32), -0.1))
    chosen = jnp.take_along_axis(logits, word[:, None], axis=1)[:, 0]
    return BLANK.replace(
        tokens=jnp.stack([prompt, word], axis=1),
        rewards=paid[:, None],
        logprobs=BLANK.logprobs.at[:, 1].set(chosen),
        actions=word[:, None, None],
        success=risky & (word == RISKY),
    )


def train_step(state, key, *, keep, clip_high, luck, tx):
    rollout = play(state.params['head'], key, luck)
    measured = metrics.rollout_metrics(rollout, GROUP_SIZE)
    top = Filter(keep=keep / GROUPS)
    rollout, *_ = top.select(rollout, groups=GROUPS, group_size=GROUP_SIZE)
    raw = values(None, state.critic_params, rollout.tokens, None, None)
    scores = Scores(
        old_logprobs=rollout.logprobs,
        ref_logprobs=jnp.zeros_like(rollout.logprobs),
        values=jnp.where(rollout.action_mask, losses.token_values(raw), 0.0),
    )
    algorithm = PPO(reward_on='episode', clip=Clip(high=clip_high), entropy_coef=0.0)
    batch = algorithm.make_batch(rollout, scores, group_size=GROUP_SIZE)
    fns = ModelFns(hidden, lambda params: params['head'], values)
    how = updates.settings(len(batch.tokens), tx=tx, algorithm=algorithm, epochs=4)
    state, more = update.update_step(state, batch, fns=fns, how=how)
    return state, {name: (measured | more)[name] for name in REPORTED}


@functools.cache
def lives(*, keep, clip_high, luck=0.2, seeds=3):
    """Rows of metrics of every seed, the oldest first."""
    tx = Optim(weight_decay=0.0).tx(0.01)
    start, critic = {'head': jnp.zeros((GROUPS + 1, WORDS))}, {'value': jnp.zeros(GROUPS + 1)}
    state = updates.state(tx, start, critic)
    step = functools.partial(train_step, keep=keep, clip_high=clip_high, luck=luck, tx=tx)

    def life(seed):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seed), STEPS)
        return jax.lax.scan(step, state, keys)[1]

    quick = {'xla_backend_optimization_level': 0}  # compiling is most of the time
    found = jax.device_get(jax.jit(jax.vmap(life), compiler_options=quick)(jnp.arange(seeds)))
    return [
        [{'step': t} | {name: float(x[seed, t]) for name, x in found.items()} for t in range(STEPS)]
        for seed in range(seeds)
    ]


def lifetime(rows):
    """Steps until the run would be stopped; all of them if it never is."""
    for steps in range(1, len(rows) + 1):
        if collapse.judge(rows[:steps], 'std_drop', limit=0.1, patience=10).level == 'alarm':
            return steps
    return len(rows)


def ends(runs, name):
    """Mean of a metric over the last ten steps, of each seed."""
    return np.array([np.mean([row[name] for row in rows[-10:]]) for rows in runs])


def found(runs):
    """How often the risky word is said where it can pay, at the end of each life."""
    return ends(runs, 'rollout/success') * GROUPS / RISKY_PROMPTS


def test_starpo_s_outlives_starpo():
    """32 seeds, 150 steps: StarPO dies in 31 (median life 42 steps), StarPO-S in none.

    The filter does it: alone it saves all 32, clip-higher alone none (31 die, median 43). Where the
    risky word can pay, StarPO-S says it 88 to 99 % of the time at the end.
    """
    plain, stable = lives(**STARPO), lives(**STARPO_S)
    plain_lives, stable_lives = (np.array([lifetime(rows) for rows in x]) for x in (plain, stable))
    assert (plain_lives < 100).all() and (stable_lives == STEPS).all(), (plain_lives, stable_lives)
    # the trap: nothing but the sure word, said to all prompts, those two included
    assert (ends(plain, 'policy/entropy') < 0.05).all()
    assert (ends(plain, 'group/return_std') < 0.01).all() and (found(plain) < 0.05).all()
    assert (ends(stable, 'group/return_std') > 0.05).all() and (found(stable) > 0.5).all()


def test_the_habit_is_kept_where_it_is_best():
    """The filter does not chase risk: at one in twenty the sure word is worth twice the risky."""
    stable = lives(**STARPO_S, luck=0.05)
    np.testing.assert_allclose(ends(stable, 'rollout/return'), 0.1, atol=0.005)
    assert (found(stable) < 0.05).all()
