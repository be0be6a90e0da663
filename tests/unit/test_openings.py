"""The first observation of a group: one member reads it, and no member's tokens change."""

import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.extras.vine.forks import Forked, with_forks
from agentrl_jax.machine import sharding
from agentrl_jax.rollout import device, openings
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.slots import Schedule
from agentrl_jax.run import parts
from agentrl_jax.run.config import read as read_config
from agentrl_jax.text import agents
from agentrl_jax.types import Rollout

KEY = tiny.KEY


def play(**settings):
    return tiny.play('frozen_lake', tiny.untrained(), KEY, **settings)


def read_alone(**settings):
    """Collect the same rollout with every slot reading its own prompts."""
    return play(**settings, share=False)


def assert_same(one, other):
    """Assert that all fields of two rollouts and their continuations are bit-identical."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def lengths(out, task):
    """Return the tokens of each episode's first observation."""
    first = (out.turn == 0) & ~out.action_mask
    return first.sum(1) - task.prefix.shape[0]


# ---- by hand -------------------------------------------------------------------------------------


def test_each_block_of_episodes_starts_with_the_first_of_each_group():
    # Groups 7 and 5 of three in 4 slots: 0 and 3 first, then 1 and 2; 4 starts the next four
    order = openings.readers_first(jnp.array([7, 7, 7, 5, 5, 5]), 4)
    assert order.tolist() == [0, 3, 1, 2, 4, 5]
    # One slot: the list is unchanged
    assert openings.readers_first(jnp.array([7, 7, 5, 5]), 1).tolist() == [0, 1, 2, 3]
    # A level that is drawn twice in a row counts as one group
    assert openings.readers_first(jnp.array([7, 7, 7, 7]), 4).tolist() == [0, 1, 2, 3]


def donors(level, prompts, length, written):
    """Call openings.donors for the last slots with these prompts; written: of all slots."""
    out = Rollout.empty(
        jnp.array(level, jnp.int32),
        jnp.zeros(1, jnp.int32),
        pad_id=0,
        max_tokens=6,
        max_turns=1,
        max_actions=1,
    )
    out = out.replace(tokens=out.tokens.at[:, 1:4].set(jnp.array(written)))
    slots, prompts = len(level), jnp.array(prompts)
    which = jnp.arange(slots - len(prompts), slots)
    prompt = prompts, (prompts > 0).sum(1)
    donor, follows = openings.donors(
        jnp.array(length), out, jnp.arange(slots), which, prompt, prefix=1
    )
    return jnp.where(follows, donor, -1).tolist()


def test_a_slot_copies_a_slot_of_its_level_with_the_same_prompt():
    # Slot 1 has read for group 7; slot 2 starts in group 7, slots 3 and 4 in group 5
    prompts = [[8, 9, 0], [6, 0, 0], [6, 0, 0]]
    written = [[6, 0, 0], [8, 9, 0], *prompts]
    assert donors([3, 7, 7, 5, 5], prompts, [1, 2, 0, 0, 0], written) == [1, -1, -1]


@pytest.mark.parametrize('prompt', [[8, 4, 0], [8, 0, 0], [8, 9, 9]], ids=['word', 'less', 'more'])
def test_a_slot_with_another_prompt_reads_it_itself(prompt):
    """The environment is random for each member: the same level, but other tokens."""
    assert donors([7, 7], [prompt], [2, 0], [[8, 9, 0], prompt]) == [-1]


def test_copying_a_row_also_copies_the_cache_of_the_opponent():
    cache = tiny.config().init_cache(3, 4)
    number = jnp.arange(1.0, 4.0).reshape(3, 1, 1)
    cache = jax.tree.map(lambda x: jnp.zeros_like(x) + number.astype(x.dtype), cache)
    none = jnp.zeros(3, jnp.int32)
    rows = token_rows.Rows(
        cache=(cache, jax.tree.map(lambda x: 10 * x, cache)),
        hidden=jnp.zeros((3, 1)),
        length=none,
        context=none,
        stream=none,
    )
    copied = token_rows.copy(rows, jnp.array([2, 0]), jnp.array([0, 1]), jnp.int32(1))
    for x in jax.tree.leaves(copied.cache[0]):
        assert x[:, 0, 0].tolist() == [3, 2, 3]
    for x in jax.tree.leaves(copied.cache[1]):
        assert x[:, 0, 0].tolist() == [30, 20, 30]


# ---- rollouts ------------------------------------------------------------------------------------


def test_group_members_play_as_if_each_had_read_its_full_prompt():
    """Rollouts are bit-identical, and only one member of a group reads the first observation."""
    out, counters = play(share=True, slots=16)
    alone, before = read_alone(slots=16)
    assert_same(out, alone)
    assert counters['overflow'] == counters['nonfinite'] == 0
    first = lengths(out, tiny.task('frozen_lake'))
    assert before['read'] - counters['read'] == first.sum() - first[::4].sum()
    assert counters['reads'] < before['reads']
    assert counters['generated'] == before['generated']


@pytest.mark.soak
def test_groups_that_do_not_fit_into_the_slots_copy_from_remaining_slots():
    settings = dict(slots=3, serve_rows=2)
    out, counters = play(share=True, **settings)
    alone, before = read_alone(**settings)
    assert_same(out, alone)
    first = lengths(out, tiny.task('frozen_lake'))
    assert first.sum() / 4 < before['read'] - counters['read'] <= first.sum() * 3 / 4


@pytest.mark.soak
def test_mesh_shards_copy_only_within_their_slots():
    """Each of four shards has a group with two members in the first block."""
    collected, shards = [], 4
    for share in (True, False):
        collect = device.collect_on_mesh(
            sharding.make_mesh(shards, 1, 1, jax.devices()[:shards]),
            tiny.settings(
                slots=16, serve_rows=2, max_tokens=tiny.MAX_TOKENS['frozen_lake'], share=share
            ),
        )
        arguments = tiny.untrained(), tiny.task('frozen_lake'), tiny.episodes('frozen_lake'), KEY
        collected.append(jax.device_get(jax.jit(collect, compiler_options=tiny.QUICK)(*arguments)))
    (out, counters), (alone, before) = collected
    assert_same(out, alone)
    first = lengths(out, tiny.task('frozen_lake')).reshape(shards, -1)
    np.testing.assert_array_equal(before['read'] - counters['read'], first[:, 2:].sum(1))


@pytest.mark.soak
def test_sharing_does_not_change_continuations():
    listed = tiny.episodes('frozen_lake')
    settings = dict(listed=with_forks(listed, continuations=2, max_turns=tiny.BUDGETS['max_turns']))
    out, counters = play(schedule=Forked(openings.SharedPrompts(), copies=True), **settings)
    alone, before = read_alone(schedule=Forked(Schedule(), copies=True), **settings)
    assert_same(out, alone)
    assert (out.extra['continuations'].turn > 0).sum() > 20
    first = lengths(out, tiny.task('frozen_lake'))
    assert first.sum() / 2 < before['read'] - counters['read'] <= first.sum() * 3 / 4


@pytest.mark.soak
def test_agents_with_plans_and_retries_read_later_trials_themselves():
    agent = agents.Agent(plans=True, reflects=True, trials=2)
    task = tiny.task('frozen_lake', agent=agent, max_turns=7)
    settings = dict(task_=task, max_tokens=400)
    out, counters = play(share=True, **settings)
    alone, before = read_alone(**settings)
    assert_same(out, alone)
    assert (out.trial > 0).any() and (out.part > 0).any()
    first = lengths(out, task)
    assert first.sum() / 2 < before['read'] - counters['read'] <= first.sum() * 3 / 4


@pytest.mark.parametrize(
    ('training', 'fields', 'share'),
    [
        (True, {}, True),
        (True, {'rollout.num_groups': 16, 'rollout.group_size': 1}, False),
        (True, {'context.window': 1}, False),
        (False, {}, False),
        (False, {'eval.samples': 2}, True),
    ],
    ids=['groups', 'no groups', 'a window', 'validation', 'several samples'],
)
def test_runs_share_prompts_if_a_level_occurs_more_than_once(training, fields, share):
    cfg = read_config(micro_runs.config('frozen_lake', algorithm='ppo', **fields))
    mesh = parts.build_mesh(cfg)
    settings = parts.rollout_settings(cfg, tiny.config(), mesh, training=training)
    assert isinstance(settings.schedule, openings.SharedPrompts) is share


@pytest.mark.soak
def test_copies_leave_the_cache_in_place():
    settings = tiny.settings(slots=7, max_tokens=160, max_response=12, share=True)
    program = jax.jit(functools.partial(device.collect, settings=settings))
    arguments = (tiny.untrained(), tiny.task('frozen_lake'), tiny.episodes('frozen_lake'), KEY)
    lines = program.lower(*arguments).compile().as_text().splitlines()
    shape = f'f32[7,160,{tiny.config().num_kv_heads * tiny.config().head_dim}]'
    assert any(shape in line for line in lines)
    moved = [line for line in lines if ' copy(' in line or ' transpose(' in line]
    assert not [line for line in moved if shape in line]
