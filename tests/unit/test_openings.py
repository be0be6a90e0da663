"""The first observation of a group: one member reads it, and nobody's tokens change."""

import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.extras.vine.draw import draw_forks
from agentrl_jax.extras.vine.forks import Forked
from agentrl_jax.machine import sharding
from agentrl_jax.rollout import device, openings
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.slots import Schedule
from agentrl_jax.run import parts
from agentrl_jax.run.config import read as read_config
from agentrl_jax.text import agents
from agentrl_jax.types import Rollout

KEY = tiny.KEY
GROUPS = 4  # of tiny.episodes, four members each


def play(name='frozen_lake', **settings):
    return tiny.play(name, tiny.untrained(), KEY, **settings)


def read_alone(**settings):
    """The same rollout in which every slot reads its own."""
    return play(**settings, share=False)


def assert_same(one, other):
    """Every field of a rollout and of its continuations, to the last bit."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def lengths(out, task):
    """Tokens of the first observation of each episode."""
    first = (out.turn == 0) & ~out.action_mask
    return first.sum(1) - task.prefix.shape[0]


# ---- by hand -------------------------------------------------------------------------------------


def test_of_as_many_episodes_as_slots_the_first_of_each_group_comes_first():
    # Groups 7 and 5 of three in 4 slots: 0 and 3 first, then 1 and 2; 4 begins the next four
    order = openings.readers_first(jnp.array([7, 7, 7, 5, 5, 5]), 4)
    assert order.tolist() == [0, 3, 1, 2, 4, 5]
    # One slot: the list as it is
    assert openings.readers_first(jnp.array([7, 7, 5, 5]), 1).tolist() == [0, 1, 2, 3]
    # A level that is drawn twice in a row is one group
    assert openings.readers_first(jnp.array([7, 7, 7, 7]), 4).tolist() == [0, 1, 2, 3]


PREFIX, WIDTH = 1, 3


def begun(rows, level, prompts, *, length, donor, episode, tokens):
    """openings.begin for slots that all begin the episodes they have, after others have."""
    slots, rows = len(episode), jnp.array(rows)
    out = Rollout.empty(
        jnp.array(level, jnp.int32),
        jnp.zeros(PREFIX, jnp.int32),
        pad_id=0,
        max_tokens=6,
        max_turns=1,
        max_actions=1,
    )
    out = out.replace(tokens=out.tokens.at[:, PREFIX : PREFIX + WIDTH].set(jnp.array(tokens)))
    now = openings.empty(out.level, jnp.zeros((slots, 2)))
    now = now.replace(length=jnp.array(length), donor=jnp.array(donor))
    given = jnp.array(prompts)
    yes = jnp.ones(len(rows), bool)
    found, follows = openings.begin(
        now,
        out,
        jnp.array(episode),
        rows,
        changed=yes,
        begins=yes & (rows < slots),
        prompt=(given, (given > 0).sum(1)),
        prefix=PREFIX,
    )
    return found, follows.tolist()


def test_of_slots_that_begin_together_the_first_of_a_group_reads():
    prompts = [[8, 9, 0], [8, 9, 0], [6, 0, 0], [8, 9, 0]]
    found, follows = begun(
        [0, 1, 2, 3],
        [7, 7, 5, 7],
        prompts,
        length=[0] * 4,
        donor=[4] * 4,
        episode=[0, 1, 2, 3],
        tokens=prompts,
    )
    assert follows == [False, True, False, True]
    assert found.donor.tolist() == [4, 0, 4, 0] and found.length.tolist() == [2, 2, 1, 2]


def test_a_slot_that_has_read_it_is_the_donor_and_one_that_follows_is_not():
    # Slots 0 and 1 play group 7, 0 follows 1; 2 and 3 begin, and the last line is no slot
    prompts = [[8, 9, 0], [8, 9, 0], [8, 9, 0]]
    found, follows = begun(
        [2, 3, 4],
        [7] * 4,
        prompts,
        length=[2, 2, 0, 0],
        donor=[1, 4, 4, 4],
        episode=[0, 1, 2, 3],
        tokens=[[8, 9, 0]] * 4,
    )
    assert follows == [True, True, False]
    assert found.donor.tolist() == [1, 4, 1, 1] and found.length.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize('told', [[8, 4, 0], [8, 0, 0], [8, 9, 9]], ids=['word', 'less', 'more'])
def test_a_slot_reads_what_its_own_world_says(told):
    """A world that is drawn for each member: the same level, other tokens."""
    found, follows = begun(
        [1],
        [7, 7],
        [told],
        length=[2, 0],
        donor=[2, 2],
        episode=[0, 1],
        tokens=[[8, 9, 0], told],
    )
    assert follows == [False] and found.donor.tolist() == [2, 2]


def test_a_copy_of_a_row_takes_the_cache_of_the_opponent_too():
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


def test_what_was_read_is_copied_once_it_has_been():
    """Slot 1 and then 2 follow 0, whose prompt has two tokens after a prefix of one."""
    cache = tiny.config().init_cache(3, 6)
    number = jnp.arange(1.0, 4.0).reshape(3, 1, 1)
    cache = jax.tree.map(lambda x: jnp.zeros_like(x) + number.astype(x.dtype), cache)
    none = jnp.zeros(3, jnp.int32)
    rows = token_rows.Rows(
        cache=cache,
        hidden=jnp.array([[1.0], [2.0], [3.0]]),
        length=none + 3,
        context=jnp.array([2, 1, 1]),
        stream=none,
    )
    now = openings.empty(none, jnp.zeros((3, 1))).replace(
        length=jnp.array([2, 2, 2]), donor=jnp.array([3, 0, 0])
    )
    hand_on = functools.partial(openings.hand_on, prefix=1, width=3)
    one, same, ready = hand_on(now, rows, jnp.array([0, 3]))  # half of it
    assert not ready.any() and one.donor.tolist() == [3, 0, 0]
    jax.tree.map(np.testing.assert_array_equal, same, rows)
    whole = rows.replace(context=jnp.array([3, 1, 1]))
    two, copied, ready = hand_on(one, whole, jnp.array([0, 3]))
    assert ready.tolist() == [False, True, True] and two.donor.tolist() == [3, 3, 3]
    assert copied.context.tolist() == [3, 3, 3]
    assert copied.hidden.ravel().tolist() == two.hidden.ravel().tolist() == [1.0, 1.0, 1.0]
    assert copied.cache.k[0][2, :, 0].tolist() == [3.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    # Much later the donor has sampled: who begins then gets the state that it kept
    on = copied.replace(hidden=rows.hidden + 8.0, context=jnp.array([5, 1, 4]))
    three = two.replace(donor=jnp.array([3, 0, 3]))
    three, late, ready = hand_on(three, on, jnp.array([3]))
    assert ready.tolist() == [False, True, False] and late.context.tolist() == [5, 3, 4]
    assert late.hidden.ravel().tolist() == [9.0, 1.0, 11.0]


# ---- rollouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'name, settings',
    [
        ('frozen_lake', dict(slots=16)),
        ('bandit', dict(slots=8, serve_rows=2)),
    ],
    ids=str,
)
def test_members_of_a_group_play_as_if_each_had_read_all_of_its_own(name, settings):
    """To the last bit, and all but one of a group read nothing of the first observation."""
    out, counters = play(name, share=True, **settings)
    alone, before = read_alone(name=name, **settings)
    assert_same(out, alone)
    assert counters['overflow'] == counters['nonfinite'] == 0
    first = lengths(out, tiny.task(name))
    _, one = np.unique(out.level, return_index=True)  # groups of the bandit share two levels
    assert len(one) == (2 if name == 'bandit' else GROUPS)
    assert before['read'] - counters['read'] == first.sum() - first[one].sum()
    assert counters['reads'] < before['reads']
    assert counters['generated'] == before['generated']


def test_groups_that_do_not_fit_into_the_slots_copy_what_is_still_there():
    settings = dict(slots=3, serve_rows=2)
    out, counters = play(share=True, **settings)
    alone, before = read_alone(**settings)
    assert_same(out, alone)
    first = lengths(out, tiny.task('frozen_lake'))
    assert first.sum() / 4 < before['read'] - counters['read'] <= first.sum() * 3 / 4


def test_shards_of_a_mesh_copy_among_their_own_slots():
    """Two of a group on each of eight shards."""
    collected, shards = [], 8
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
    np.testing.assert_array_equal(before['read'] - counters['read'], first[:, 1:].sum(1))


def test_continuations_of_members_are_those_without():
    listed = tiny.episodes('frozen_lake')
    turns = dict(turns='every', max_turns=tiny.BUDGETS['max_turns'])
    forks = draw_forks(jax.random.key(3), listed, continuations=2, common=False, **turns)
    settings = dict(listed=listed.replace(extra={'forks': forks}))
    out, counters = play(schedule=Forked(openings.SharedPrompts(), copies=True), **settings)
    alone, before = read_alone(schedule=Forked(Schedule(), copies=True), **settings)
    assert_same(out, alone)
    assert (out.extra['continuations'].turn > 0).sum() > 20
    first = lengths(out, tiny.task('frozen_lake'))
    assert first.sum() / 2 < before['read'] - counters['read'] <= first.sum() * 3 / 4


def test_agents_that_write_and_try_again_read_further_trials_themselves():
    agent = agents.Agent(plans=True, reflects=True, trials=2)
    task = tiny.task('frozen_lake', agent=agent, max_turns=7)
    settings = dict(task_=task, max_tokens=400)
    out, counters = play(share=True, **settings)
    alone, before = read_alone(**settings)
    assert_same(out, alone)
    assert (out.trial > 0).any() and (out.part > 0).any()
    assert before['read'] - counters['read'] == lengths(out, task).sum() * 3 / 4


def test_levels_that_do_not_come_twice_share_nothing():
    listed = tiny.episodes('frozen_lake', groups=16, group_size=1)
    out, counters = play(share=True, listed=listed)
    alone, before = read_alone(listed=listed)
    assert_same(out, alone)
    assert counters == before


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
def test_runs_share_where_a_level_is_played_more_than_once(training, fields, share):
    cfg = read_config(micro_runs.config('frozen_lake', algorithm='ppo', **fields))
    mesh = parts.build_mesh(cfg)
    settings = parts.rollout_settings(cfg, tiny.config(), mesh, training=training)
    assert isinstance(settings.schedule, openings.SharedPrompts) is share


def test_copies_leave_the_cache_in_place():
    settings = tiny.settings(slots=7, max_tokens=160, max_response=12, share=True)
    program = jax.jit(functools.partial(device.collect, settings=settings))
    arguments = (tiny.untrained(), tiny.task('frozen_lake'), tiny.episodes('frozen_lake'), KEY)
    lines = program.lower(*arguments).compile().as_text().splitlines()
    shape = f'f32[7,160,{tiny.config().num_kv_heads * tiny.config().head_dim}]'
    assert any(shape in line for line in lines)
    moved = [line for line in lines if ' copy(' in line or ' transpose(' in line]
    assert not [line for line in moved if shape in line]
