"""Hints with plans: prompts with hints, and a teacher that reads hints the policy does not.

Rows with hints are built by hand, as lists, and read by a model without masks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smollm_vocabulary
import test_opd
import tiny_agents as tiny
import toy_rollouts as toy

from agentrl_jax.envs import FrozenLake
from agentrl_jax.envs.simulation import solutions
from agentrl_jax.extras.distillation import hints
from agentrl_jax.extras.distillation.distilling import Distilling
from agentrl_jax.extras.distillation.opd import OPD
from agentrl_jax.rl import update
from agentrl_jax.rl.algorithm import Clip
from agentrl_jax.rl.learning import BatchSettings, Learner, UpdateSettings
from agentrl_jax.rollout.windows import Context
from agentrl_jax.text import task as text
from agentrl_jax.types import FrozenParams

pytestmark = pytest.mark.soak

HOW = OPD(privileged='plan')
OPEN = OPD(privileged='plan', divergence='sampled', clip=Clip(1.0, 9.0))
PREFIX = 1
HINTS = np.array([[5, 6, 1], [4, -1, -1], [-1, -1, -1]], np.int32)  # three levels


# ---- prompts -------------------------------------------------------------------------------------


def lake(**changes):
    env = FrozenLake(success_rate=1.0)
    params = env.make_params('train', num_levels=8)
    plans = solutions(env, params, 5)
    settings = dict(style='brief', plans=plans) | tiny.BUDGETS | changes
    return text.build_task(env, params, tiny.tokenizer(), **settings)


def test_solutions_lead_to_the_goal():
    env = FrozenLake(success_rate=1.0)
    params = env.make_params('train', num_levels=32)
    plans, moves = solutions(env, params, 6), np.asarray(params.optimal_length)
    step = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}  # left, down, right, up
    for board, plan, fewest in zip(np.asarray(params.boards), plans, moves, strict=True):
        plan = [int(a) for a in plan if a >= 0]
        assert len(plan) == min(fewest, 6)
        at = np.argwhere(board == 3)[0]
        for action in plan:
            at = at + step[action]
            assert board[tuple(at)] != 1  # a hole
        assert (board[tuple(at)] == 2) == (fewest <= 6)


@pytest.mark.parametrize(
    'style, spelling',
    [('brief', 'demo'), ('ragen', 'smollm')],
)
def test_a_teacher_reads_the_prompt_with_the_hint(style, spelling, monkeypatch):
    """A row without hints, with the hint inserted, equals the row of the text with the hint."""
    if spelling == 'smollm':
        monkeypatch.setattr(tiny, 'tokenizer', smollm_vocabulary.smollm_tokenizer)
    hinted, unhinted = lake(style=style), lake(style=style, shows_hint=False)
    plain = lake(style=style, plans=None)
    table = text.hint_tokens(unhinted)
    np.testing.assert_array_equal(unhinted.prefix, plain.prefix)
    assert unhinted.width == plain.width < hinted.width
    tokenizer = tiny.tokenizer()
    for level in range(4):
        rows = [
            text.turn_tokens(task, text.begin(task, level), True)
            for task in (hinted, unhinted, plain)
        ]
        hinted_ids, unhinted_ids, plain_ids = (
            [int(x) for x in row[:count]] for row, count in jax.device_get(rows)
        )
        assert unhinted_ids == plain_ids
        row = jnp.asarray([*map(int, unhinted.prefix), *unhinted_ids])[None]
        joined, attended, _ = hints.insert(
            row, jnp.ones_like(row, bool), table[level][None], prefix=len(unhinted.prefix)
        )
        read = [int(x) for x in joined[0][attended[0]]]
        assert read == [*map(int, hinted.prefix), *hinted_ids]
        names = [unhinted.env.ACTION_NAMES[a] for a in unhinted.plans[level] if a >= 0]
        hint = ''.join(f'{line}\n' for line in [unhinted.style.hint.strip(), *names])
        first = tokenizer.decode([*map(int, unhinted.prefix), *unhinted_ids], show_special=True)
        cut = len(tokenizer.decode(list(map(int, unhinted.prefix)), show_special=True))
        assert tokenizer.decode(read, show_special=True) == first[:cut] + hint + first[cut:]
        if spelling == 'demo':
            assert read == tiny.spelled(first[:cut] + hint + first[cut:])


# ---- rows ----------------------------------------------------------------------------------------


def test_insertion_by_hand():
    # prefix 1 2, then 3 4; the hint 7 8 goes between; padding stays last
    tokens, attention = jnp.array([[1, 2, 3, 4, 0]]), jnp.array([[True] * 4 + [False]])
    result = hints.insert(tokens, attention, jnp.array([[7, 8, -1]]), prefix=2)
    expected = [1, 2, 7, 8, 3, 4, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0], [0, 3, 4, 5, 6]
    for got, want in zip(result, expected, strict=True):
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize('seed', range(5))
def test_insertion_keeps_the_order_of_the_tokens_around_the_hint(seed):
    rng = np.random.default_rng(seed)
    rows, length, width, prefix = 6, 11, 4, int(rng.integers(1, 5))
    tokens = rng.integers(1, 50, (rows, length))
    used = rng.integers(prefix + 1, length + 1, rows)
    attention = np.arange(length)[None] < used[:, None]
    count = rng.integers(0, width + 1, rows)
    hint = np.where(
        np.arange(width)[None] < count[:, None], rng.integers(50, 99, (rows, width)), -1
    )
    result = hints.insert(*map(jnp.asarray, (tokens, attention, hint)), prefix=prefix)
    joined, attended, places = map(np.asarray, result)
    for b in range(rows):
        ids = [int(x) for x in tokens[b, : used[b]]]
        hint_ids = [int(x) for x in hint[b, : count[b]]]
        expected = ids[:prefix] + hint_ids + ids[prefix:]
        assert joined[b][attended[b]].tolist() == expected and attended[b].sum() == len(expected)
        assert attended[b, : len(expected)].all()
        for t in range(used[b]):
            read = expected[: places[b, t] + 1]
            assert [x for x in read if x < 50] == ids[: t + 1]
            assert [x for x in read if x >= 50] == (hint_ids if t >= prefix - 1 else [])


# ---- probabilities -------------------------------------------------------------------------------


def hinted_rollout(seed=1):
    """Return eight toy episodes of three levels; the first token is the common prefix."""
    rollout = toy.random_rollout(seed)
    tokens = rollout.tokens.at[:, :PREFIX].set(2)
    begin = jnp.full_like(rollout.begin, PREFIX)
    return rollout.replace(tokens=tokens, level=jnp.arange(8) % 3, begin=begin)


def read_by_hand(params, rollout, b, t):
    """Return the probabilities of a toy model at position t of row b with its hint; [V]."""
    row = [int(x) for x in rollout.tokens[b, :t]]
    row[PREFIX:PREFIX] = [int(x) for x in HINTS[int(rollout.level[b])] if x >= 0]
    embed, mix, head = (np.asarray(params[name], np.float64) for name in ('embed', 'mix', 'head'))
    odds = np.exp(np.tanh(embed[row].mean(0) @ mix) @ head)
    return odds / odds.sum()


def frozen(teachers=(), reference=None, hints=HINTS):
    return FrozenParams({}, reference, {'teachers': tuple(teachers), 'hints': jnp.asarray(hints)})


def test_sampled_tokens_are_scored_by_the_mixture_of_teachers_that_read_the_hint():
    rollout, how = hinted_rollout(), UpdateSettings(OPEN, batch=BatchSettings(microbatch_rows=4))
    learner = Learner(test_opd.TOY, frozen(test_opd.TEACHERS), how)
    extra = Distilling(full=False, teachers=(test_opd.TOY,) * 2, prefix=PREFIX)
    before = toy.scores_of(rollout)
    scores = extra.score(rollout, before, learner, None)
    np.testing.assert_array_equal(scores.old_logprobs, before.old_logprobs)
    for b, t in np.argwhere(rollout.action_mask):
        token = int(rollout.tokens[b, t])
        q = np.mean([read_by_hand(teacher, rollout, b, t)[token] for teacher in test_opd.TEACHERS])
        assert scores.ref_logprobs[b, t] == pytest.approx(np.log(q), abs=1e-5)


@pytest.mark.parametrize(
    'count',
    [0, 2],
    ids=['itself', 'two teachers'],
)
def test_the_kl_of_all_tokens_is_to_teachers_that_read_the_hint(count):
    """Check the gradient with finite differences: the teacher contributes nothing to it."""
    rollout, params = hinted_rollout(), toy.toy_params(0)
    extra = Distilling(full=True, teachers=(test_opd.TOY,) * count, prefix=PREFIX)
    models, how = list(test_opd.TEACHERS[:count]) or [params], UpdateSettings(HOW, extras=(extra,))
    learner = Learner(test_opd.TOY, frozen(test_opd.TEACHERS[:count], params), how)
    batch = HOW.make_batch(rollout, toy.scores_of(rollout), group_size=4)
    batch = batch.replace(extra=extra.arrays(rollout, batch.mask, learner))
    weights = jnp.where(batch.mask, 1.0, 0.0)
    total = batch.mask.sum()
    extra_loss = functools.partial(extra.loss, total=total, learner=learner)

    def loss(params):
        inputs = batch, weights, None, test_opd.TOY, how, [extra_loss]
        return update.policy_loss(params, *inputs)[0]

    def by_hand(policy):
        total = 0.0
        unhinted = rollout.replace(level=jnp.full(8, 2))
        for b, t in np.argwhere(batch.mask):
            p = read_by_hand(policy, unhinted, b, t)
            q = np.mean([read_by_hand(model, rollout, b, t) for model in models], axis=0)
            total += (p * np.log(p / q)).sum()
        return total

    value, gradient = jax.value_and_grad(loss)(params)
    assert float(value) == pytest.approx(by_hand(params), rel=1e-4) and value > 0.1
    for at in ((0, 0), (2, 3), (3, 6)):
        unit = np.zeros((toy.WIDTH, toy.VOCAB))
        unit[at] = 1e-4
        head = np.asarray(params['head'], np.float64)
        high, low = (by_hand(params | {'head': head + side * unit}) for side in (1, -1))
        assert float(gradient['head'][at]) == pytest.approx((high - low) / 2e-4, 1e-2, 1e-3)


def step(how, teachers=(), reference=None, hints=HINTS, **changes):
    """Run the step of test_opd with teachers that read hints."""
    how = dataclasses.replace(how, teachers=('named',) * len(teachers))
    inputs = dict(frozen=frozen(teachers, reference, hints), rollout=hinted_rollout())
    return test_opd.step(
        how, teachers=(test_opd.TOY,) * len(teachers), prefix=PREFIX, **inputs, **changes
    )


WINDOW = Context(window=2, prefix=PREFIX, width=3, max_response=3, keeps=False)  # all turns


@pytest.mark.parametrize(
    'how, changes',
    [
        (HOW, {'devices': 4, 'widths': 3}),
        (HOW, {'context': WINDOW, 'rows': 2}),
        (OPEN, {'context': WINDOW, 'rows': 2}),
    ],
    ids=['mesh and widths', 'full windows', 'sampled windows'],
)
def test_splitting_a_batch_changes_nothing(how, changes):
    plain, split = step(how, test_opd.TEACHERS), step(how, test_opd.TEACHERS, **changes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), plain, split)


def test_a_policy_without_hints_has_nothing_to_learn_from_itself():
    """Without hints in any level the teacher is the policy of step 0, bit for bit."""
    params, kl, loss = step(HOW, reference=toy.toy_params(0), hints=np.full_like(HINTS, -1))
    assert kl == 0 and loss == 0
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(toy.toy_params(0)))
