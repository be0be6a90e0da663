"""Agents that plan and reflect: order of turns, observations and training."""

import functools
import itertools

import host_worlds as hosts
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import optax
import pytest
import tiny_agents as tiny
import toy_rollouts as toy
from test_context import samples

from agentrl_jax import train
from agentrl_jax.algorithms.mt_grpo import MTGRPO
from agentrl_jax.imitation import clone
from agentrl_jax.imitation.demonstrations import demonstrate
from agentrl_jax.measure import metrics
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.records import pages, run_log
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import Comparison
from agentrl_jax.rollout import replies, windows
from agentrl_jax.run.config import read as read_config
from agentrl_jax.text import agents, answer
from agentrl_jax.text import task as text
from agentrl_jax.text.agents import ACT, PLAN, REFLECT, Agent
from agentrl_jax.types import Episodes, EpisodeStop

NAME = 'frozen_lake'
BOTH = Agent(plans=True, reflects=True, trials=2)
TURNS, RESPONSE, TOKENS = 9, 16, 384


@functools.cache
def task(style='brief', agent=BOTH, **changes):
    return tiny.task(NAME, style=style, agent=agent, **(dict(max_turns=TURNS) | changes))


# ---- order of turns ------------------------------------------------------------------------------


def kinds(agent, ends):
    """Return (kind, trial, whether a level starts) per turn; ends: turns that end a trial."""
    progress, turns = agents.begin(agent), []
    for turn in range(10):
        turns.append((progress.part, progress.trial))
        progress, fresh = agents.follow(agent, progress, turn in ends)
        turns[-1] += (bool(fresh),)
    return turns


A, P, R = ACT, PLAN, REFLECT
SCHEDULES = [  # agent, turns that end a trial; kinds, turns that start a level
    (Agent(), (), [A] * 10, []),
    (Agent(plans=True), (), [P] + [A] * 9, []),
    (Agent(reflects=True, trials=3), {1, 4}, [A, A, R, A, A, R] + [A] * 4, [2, 5]),
    (Agent(trials=2), {3}, [A] * 10, [3]),
    (Agent(plans=True, trials=2), {3}, [P, A, A, A, P] + [A] * 5, [3]),
    (Agent(plans=True, reflects=True, trials=2), {1}, [P, A, R, P] + [A] * 6, [2]),
]


@pytest.mark.parametrize(('agent', 'ends', 'expected', 'starts'), SCHEDULES)
def test_the_order_of_turns_by_hand(agent, ends, expected, starts):
    got = kinds(agent, ends)[: len(expected)]
    assert [kind for kind, _, _ in got] == expected
    assert [turn for turn, (_, _, fresh) in enumerate(got) if fresh] == starts
    started = [sum(end < turn for end in ends) for turn in range(len(got))]
    assert [
        trial for _, trial, _ in got
    ] == started  # a reflection belongs to the trial that it prepares


def test_trials_share_the_turns_evenly():
    assert Agent().trial_turns(7) == 7
    assert Agent(reflects=True, trials=3).trial_turns(11) == 3  # 3 + 1 + 3 + 1 + 3
    assert Agent(trials=2).trial_turns(11) == 5


@pytest.mark.parametrize('agent', [Agent(), Agent(plans=True), Agent(plans=True, trials=2), BOTH])
@pytest.mark.parametrize('limit', [5, 6, 9])
def test_acting_turns_counts_the_acting_turns_of_one_trial(agent, limit):
    """Random play in a report used the turns of plans and of all trials in one trial."""
    number = agent.trial_turns(limit)
    first = kinds(agent, {number - 1})[:number]
    assert {trial for _, trial, _ in first} == {0}
    assert agent.acting_turns(limit) == sum(kind == ACT for kind, _, _ in first)


# ---- a turn --------------------------------------------------------------------------------------


def moment(task_, part, **changes):
    """Return an episode at a turn of this kind."""
    world = text.begin(task_, jnp.int32(3))
    progress = world.agent.replace(part=jnp.int32(part), **changes)
    return world.replace(agent=progress)


def answer_parts(task_, *names):
    """Return the parsed parts of an answer, int32 [A]."""
    index = [task_.env.ACTION_NAMES.index(name) for name in names]
    return jnp.asarray((index + [-2] * task_.max_actions_per_turn)[: task_.max_actions_per_turn])


@functools.cache
def play_turn():
    return jax.jit(text.play_turn)


@pytest.mark.parametrize('part', [PLAN, REFLECT])
def test_a_written_turn_does_not_step_the_world(part):
    world = moment(task(), part)
    for matched in (True, False):
        after, outcome = play_turn()(
            task(), jax.random.key(0), world, answer_parts(task(), 'Left', 'Up'), jnp.bool_(matched)
        )
        jax.tree.map(np.testing.assert_array_equal, after.state, world.state)
        assert outcome.num_actions == 0 and outcome.reward == 0
        named = answer_parts(task(), *(('Left', 'Up') if matched else ()))
        np.testing.assert_array_equal(outcome.actions, jnp.maximum(named, -1))
        assert bool(outcome.valid) == matched and after.used == 0 and not after.warn
        assert float(outcome.penalty) == (0 if matched else np.float32(task().format_penalty))
        assert after.agent.part == (ACT if part == PLAN else PLAN) and not after.agent.stepped


def test_a_failed_trial_restarts_bit_for_bit():
    one = task(agent=Agent(reflects=True, trials=2), max_turns=7)  # 3 turns per trial
    start = world = text.begin(one, jnp.int32(3))
    key, stops = jax.random.key(0), []
    for _ in range(3):
        world, outcome = play_turn()(one, key, world, answer_parts(one), jnp.bool_(False))
        stops.append(int(outcome.stop))
    assert stops == [EpisodeStop.NONE] * 3 and world.agent.part == REFLECT
    world = world.replace(used=jnp.int32(2), state=world.state.replace(time=jnp.int32(9)))
    world, outcome = play_turn()(one, key, world, answer_parts(one), jnp.bool_(True))
    jax.tree.map(np.testing.assert_array_equal, world.state, start.state)
    assert (world.used, world.agent.trial, world.turn) == (0, 1, 4)
    assert not outcome.success and outcome.stop == EpisodeStop.NONE
    for stop in (EpisodeStop.NONE, EpisodeStop.NONE, EpisodeStop.TURN_BUDGET):
        world, outcome = play_turn()(one, key, world, answer_parts(one), jnp.bool_(False))
        assert int(outcome.stop) == stop  # the last trial ends the episode


def prompt_text(task_, world):
    tokens, count = text.turn_tokens(task_, world, jnp.bool_(True))
    return tiny.tokenizer().decode(np.asarray(tokens[:count]).tolist(), show_special=True)


def test_prompts_of_each_kind_of_turn_word_for_word():
    board = tiny.environment(NAME)[0].observation_text(text.begin(task(), jnp.int32(3)).state)
    user, ends = '\n<|im_start|>user\n', '<|im_end|>\n<|im_start|>assistant\n'
    assert prompt_text(task(), moment(task(), PLAN)) == f'{board}Plan.\n{ends}<plan>'
    later = moment(task(), REFLECT, trial=jnp.int32(1), stepped=jnp.bool_(True))
    later = later.replace(turn=jnp.int32(4))
    assert prompt_text(task(), later) == f'{user}{board}Failed.\n{ends}<reflect>'
    again = later.replace(agent=later.agent.replace(part=jnp.int32(ACT), stepped=jnp.bool_(False)))
    assert prompt_text(task(), again) == f'{user}Again.\n{board}5 left\n{ends}<think>'


def every_four(pieces, part=None, **settings):
    """Return (texts, whether each matched, its parts) for all answers of four pieces."""
    ends = settings.pop('ends', [])
    spelled = answer.with_ends([piece.encode() for piece in pieces], ends)
    table = answer.build_answer_table(spelled, ['Up', 'Left'], max_actions=2, **settings)
    rows = np.asarray(list(itertools.product(range(len(pieces)), repeat=4)), np.int32)
    state = answer.init_answer(table, len(rows), part and jnp.full(len(rows), part))
    for column in rows.T:
        state = answer.advance(table, state, column, jnp.ones(len(rows), bool))
    texts = [b''.join(spelled[i] for i in row) for row in rows]
    return texts, np.asarray(answer.matched(table, state)), np.asarray(state.parts).tolist()


@pytest.mark.parametrize(('part', 'closing'), [(PLAN, '</plan>'), (REFLECT, '</reflect>')])
def test_a_written_answer_matches_if_it_contains_its_closing_tag(part, closing):
    pieces = ['a', '<', '</', 'pl', 'an>', '||', '>', 'reflect', '</plan>', '</reflect', ' Up']
    texts, matched, parsed = every_four(
        pieces, part, opening='<think>', closings=('</plan>', '</reflect>')
    )
    expected = [closing.encode() in reply for reply in texts]
    assert 0 < sum(expected) < len(texts)
    np.testing.assert_array_equal(matched, expected)
    for reply, match, parts in zip(texts, expected, parsed, strict=True):
        if match:  # the names in it
            named = [name.strip() for name in reply.split(closing.encode())[0].split(b'||')]
            names = [0 if name == b'Up' else answer.UNKNOWN for name in named if name]
            assert parts == (names + [answer.ABSENT] * 2)[:2], reply


def test_a_react_answer_is_the_text_from_action_to_the_end_of_the_turn():
    pieces = ['a', 'xAc', 'Act', 'ion', ':', ' Up', '||', 'Left\n', '<', 'Action: Up', '.']
    texts, matched, parsed = every_four(pieces, opening='Thought:', ends=[10])
    for reply, match, parts in zip(texts, matched, parsed, strict=True):
        expected = answer.parse_answer(reply, ['Up', 'Left'], max_actions=2, opening='Thought:')
        assert match == expected[0] and (not match or parts == expected[1]), reply
    assert sum(max(parts) >= 0 for parts, match in zip(parsed, matched, strict=True) if match) > 100
    assert not matched.all()


# ---- rollouts ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def policy():
    """A policy that mostly follows the format of all turns, but plays badly."""
    env, env_params = tiny.environment(NAME)

    def expert(states, used):
        return env.plans(states, used, 5, env_params)

    data = demonstrate(
        task(), tiny.tokenizer(), expert, seed=0, episodes=48, oracle=0.3, max_tokens=TOKENS
    )
    return clone.clone(
        tiny.untrained(),
        data,
        jax.random.key(1),
        fns=ModelFns(tiny.hidden, tiny.head),
        tx=optax.adam(1e-2),
        steps=60,
        batch_size=16,
        chunk_size=4096,
        report=lambda step, loss: None,
    )


@pytest.fixture(scope='module', params=[0, 1], ids=['whole', 'window'])
def policy_rollout(request, policy):
    sizes = dict(max_tokens=TOKENS, max_response=RESPONSE, window=request.param)
    out, counters = tiny.play(NAME, policy, tiny.KEY, task_=task(), **sizes)
    assert counters['overflow'] == 0
    return out, request.param


def cut(out, window, task_=None):
    context = windows.Context.of(task_ or task(), window or TURNS, RESPONSE)
    return jax.device_get(jax.jit(context.windows)(out))


@pytest.mark.soak
def test_the_sampler_is_the_trainer(policy_rollout, policy):
    out, window = policy_rollout
    turn_windows = cut(out, window) if window else None
    assert tiny.gap(policy, out, found=turn_windows) <= 3e-5  # logits are sharp


def assert_turns_in_order(out, b):
    """Kinds and trials of an episode's turns follow from the set of turns that ended a trial."""
    number = int(out.num_turns[b])
    ends = set(np.flatnonzero(np.diff(out.trial[b, :number])).tolist())
    expected = kinds(BOTH, ends)[:number]
    assert out.part[b, :number].tolist() == [kind for kind, _, _ in expected]
    assert out.trial[b, :number].tolist() == [trial for _, trial, _ in expected]
    return ends


@pytest.mark.soak
def test_kinds_of_turns_follow_from_the_ends_of_trials(policy_rollout):
    out, _ = policy_rollout
    assert {ACT, PLAN, REFLECT} <= set(out.part[out.turn_stop > 0].tolist())
    for b in range(16):
        ends = assert_turns_in_order(out, b)
        assert len(ends) <= 1 and (ends or out.success[b] or out.num_turns[b] < TURNS)
    written = (out.part != ACT) & (out.turn_stop > 0)
    assert written.any() and not out.num_actions[written].any() and not out.rewards[written].any()
    assert out.valid[written].mean() > 0.3


@pytest.mark.soak
def test_a_window_keeps_the_last_plan_or_reflection_in_view(policy_rollout):
    out, window = policy_rollout
    if not window:
        pytest.skip('there is none')
    got, notes = samples(out, cut(out, window)), 0
    prefix = np.asarray(task().prefix).tolist()
    for (b, k), ids in got.items():
        row, begin = out.tokens[b], out.begin[b]
        written = np.flatnonzero(out.part[b, :k])
        note = row[begin[written[-1]] : begin[written[-1] + 1]].tolist() if len(written) else []
        last = np.flatnonzero(out.turn[b] == k)[-1]
        assert ids == [*prefix, *note, *row[begin[k] : last + 1].tolist()], (b, k)
        notes += bool(note) and written[-1] < k - 1
    assert notes > 3


@pytest.mark.soak
def test_pages_replay_the_states_of_all_trials(policy_rollout):
    """The anchor of each turn is a hash of its observation, kind and trial."""
    out, _ = policy_rollout
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task(), out.level)
    states = pages.replay_states(out, np.arange(16), task(), tiny.KEY)
    for k, state in zip(range(TURNS), states, strict=False):
        agent = worlds.agent.replace(part=out.part[:, k], trial=out.trial[:, k])
        turns = worlds.replace(state=state, agent=agent)
        anchors = jax.vmap(text.anchor, in_axes=(None, 0))(task(), turns)
        started = out.num_turns > k
        np.testing.assert_array_equal(anchors[started], out.anchor[started, k])


def test_trials_have_different_anchors():
    """A shared anchor compared returns with two trials left to returns with one trial left."""
    first = moment(task(), ACT)
    again = first.replace(agent=first.agent.replace(trial=jnp.int32(1)))
    reflects = first.replace(agent=first.agent.replace(part=jnp.int32(REFLECT)))
    assert len({int(text.anchor(task(), x)) for x in (first, again, reflects)}) == 3


# ---- credit and metrics --------------------------------------------------------------------------


def two_trials():
    """Three episodes of 2 + 1 + 2 turns: failed twice, solved in trial two, solved in trial one."""
    rewards = [[-1, 0, 0, 2, -3], [-1, -2, 0, 4, 5], [7, 8, 0, 0, 0]]
    layouts = [[(1, 1)] * 5, [(1, 1)] * 5, [(1, 1)] * 2]
    part, trial = [[0, 0, REFLECT, 0, 0]] * 2 + [[0] * 5], [[0, 0, 1, 1, 1]] * 2 + [[0] * 5]
    return toy.rollout_of(layouts, rewards, length=12).replace(
        part=jnp.asarray(part), trial=jnp.asarray(trial), success=jnp.asarray([False, True, True])
    )


def test_a_trial_without_actions_is_not_counted():
    layouts = [[(1, 1)] * 3, [(1, 1)] * 4]
    cut = toy.rollout_of(layouts, [[-1, -1, 0, 0], [-1, -1, 0, -2]], length=9)
    part = jnp.asarray([[0, 0, REFLECT, 0]] * 2)
    cut = cut.replace(part=part, trial=jnp.asarray([[0, 0, 1, 0], [0, 0, 1, 1]]))
    got = metrics.agent_metrics(cut, Agent(reflects=True, trials=2))
    assert float(got['agent/trials']) == 1.5 and float(got['agent/gain']) == 0
    acted = jnp.zeros((2, 4, 1), jnp.int32).at[0, 3].set(-1)
    last = metrics.last_actions(cut.replace(actions=acted))[:, :, 0]
    np.testing.assert_array_equal(last, [[0, 0, -1, -1], [-1, -1, -1, 0]])


def by_mode():
    """Turns of two_trials(), outcome success, norm mean, gamma 1."""
    outcome = np.array([[-2], [1], [1]]) / 3
    first = np.array([[-8], [-8], [16]]) / 3
    # norm_k of -1 -1 7, 0 -2 8 and, for the two remaining episodes, 1 3, 2 4, -3 5
    local = np.array([[-8 / 3, -2, -1, -1, -4], [-8 / 3, -4, 1, 1, 4], [16 / 3, 6, 0, 0, 0]])
    suffix = np.array([[-32 / 3, -8, -6, -5, -4], [-2 / 3, 2, 6, 5, 4], [34 / 3, 6, 0, 0, 0]])
    # reward to go plus outcome: -1 0 0 -1 -3; 10 11 13 10 6; 16 9
    to_go = [[-28 / 3, -20 / 3, -6.5, -5.5, -4.5], [5 / 3, 13 / 3, 6.5, 5.5, 4.5]]
    to_go = np.array([*to_go, [23 / 3, 7 / 3, 0, 0, 0]])
    return {
        'or': outcome,
        'mr': to_go[:, :1],
        'mt_v1': outcome + first * (np.arange(5) == 0),
        'mt_cumulative': outcome + suffix,
        'mt_local': outcome + local,
        'gtpo': to_go,
        'hybrid': to_go + outcome,
        'flattened': outcome + suffix[:, :1],
    }


def credit(rollout, mode):
    """Advantages of turns [B, K], taken from their sampled tokens."""
    settings = dict(outcome='success', turn_gamma=1.0, comparison=Comparison('mean'))
    batch = toy.batch_of(MTGRPO(mode=mode, **settings), rollout, 3)
    of_turns = np.zeros(rollout.rewards.shape)
    for b, t in np.argwhere(np.asarray(batch.mask)):
        of_turns[b, rollout.turn[b, t]] = batch.advantages[b, t]
    return of_turns


@pytest.mark.parametrize('mode', turn_credit.MODES)
def test_every_mode_credits_the_turns_of_trials_by_hand(mode):
    rollout = two_trials()
    # Rewards of 1 and 3 for the first turn of the second trial
    rollout = rollout.replace(rewards=rollout.rewards.at[:2, 2].set(jnp.array([1.0, 3.0])))
    reached = np.arange(5)[None] < np.asarray(rollout.num_turns)[:, None]
    np.testing.assert_allclose(
        credit(rollout, mode), np.where(reached, by_mode()[mode], 0), rtol=1e-5, atol=1e-6
    )


def test_a_plan_is_part_of_the_first_turn_that_mt_v1_credits():
    rollout = toy.rollout_of([[(1, 1)] * 3] * 3, [[0, 3, 9], [0, 6, 9], [0, 0, 0]], length=8)
    out = credit(rollout.replace(part=jnp.asarray([[PLAN, 0, 0]] * 3)), 'mt_v1')
    np.testing.assert_allclose(out, [[0, 0, 0], [3, 3, 0], [-3, -3, 0]], atol=1e-6)
    assert not credit(rollout, 'mt_v1').any()  # without plans only the first turn counts


def test_a_plan_is_followed_if_its_first_action_is_executed_first():
    rollout = toy.rollout_of([[(1, 1)] * 5, [(1, 1)] * 3, [(1, 1)] * 3], [[0] * 5] * 3, length=12)
    part = jnp.asarray([[PLAN, 0, PLAN, 0, PLAN], [PLAN, 0, PLAN, 0, 0], [PLAN, PLAN, 0, 0, 0]])
    actions = [
        [[-1, 2], [2, 3], [1, 2], [3, 1], [1, 1]],
        [[-1, -1], [-1, 0], [3, -1]] + [[3, 3]] * 2,
        [[0, -1], [0, -1], [1, -1]] + [[-1, -1]] * 2,
    ]
    rollout = rollout.replace(part=part, actions=jnp.asarray(actions))
    # Plans with names before an acting turn: 2 then 2, 1 then 3, 0 then 1; a plan that ended the
    # third episode's trial used to count as followed by the next plan
    followed = metrics.agent_metrics(rollout, BOTH)['agent/plan_followed']
    assert float(followed) == pytest.approx(1 / 3)
    assert set(metrics.agent_metrics(rollout, BOTH)) <= set(metrics.METRICS)
    acted = [[[-1, -1], [2, 3], [-1, -1], [3, 1], [-1, -1]]]
    np.testing.assert_array_equal(metrics.executed(rollout)[:1], acted)
    again = rollout.replace(trial=jnp.asarray([[0, 0, 1, 1, 1], [0] * 5, [0] * 5]))
    np.testing.assert_array_equal(metrics.last_actions(again)[0, :, 0], [-1, -1, -1, 3, -1])


def test_metrics_of_trials_by_hand():
    rollout = two_trials()
    got = metrics.agent_metrics(rollout, Agent(reflects=True, trials=2))
    assert set(got) <= set(metrics.METRICS)
    expected = {
        'trials': 5 / 3,
        'success_first': 1 / 3,
        'success_second': 2 / 3,
        'gain': (0 + 12 + 0) / 3,
        'reflection_tokens': 2 / 3,
        'plan_tokens': 0,
        'act_tokens': (4 + 4 + 2) / 3,
        'written': 1,
    }
    assert {name: pytest.approx(x) for name, x in expected.items()} == {
        name.removeprefix('agent/'): float(x) for name, x in got.items()
    }
    assert metrics.agent_metrics(rollout, Agent()) == {}
    many = metrics.agent_metrics(rollout, Agent(trials=9))
    assert float(many['agent/success_third']) == pytest.approx(2 / 3)
    assert set(many) <= set(metrics.METRICS)
    of_texts = metrics.agent_metrics(rollout, BOTH, names_actions=False)
    assert set(metrics.agent_metrics(rollout, BOTH)) - set(of_texts) == {'agent/plan_followed'}


# ---- runs ----------------------------------------------------------------------------------------


TRIALS = ('trials', 'success_first', 'success_second', 'gain')
AGENT = {'agent.name': 'reflect', 'agent.trials': 2, 'env.max_turns': 5, 'rollout.max_tokens': 256}


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_a_run_trains_written_turns_without_recompiling(tmp_path, monkeypatch):
    changes = {'algorithm': 'turn_grpo', 'context.window': 1, 'clone.episodes': 32}
    changes |= {'clone.steps': 10, 'curriculum.rounds': (3, 5), 'curriculum.stage_steps': 2}
    cfg, write, limits = micro_runs.config(NAME, **AGENT | changes), pages.write, []

    def record_limit(*args, task, **rest):
        limits.append(int(task.turn_limit))
        return write(*args, task=task, **rest)

    monkeypatch.setattr(pages, 'write', record_limit)
    assert train.train(cfg, str(tmp_path)) == 0
    # Later trials were replayed as if the curriculum allowed all turns
    assert limits == [read_config(cfg, None).turn_limit(step) for step in (0, 2)]
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert all(row['perf/recompiles'] == 0 for row in rows if 'perf/recompiles' in row)
    assert max(row['sampler/logprob_gap'] for row in rows if 'sampler/logprob_gap' in row) <= 1e-4
    name = 'agent/reflection_tokens'
    assert max(row[name] for row in rows if name in row) > 0
    of_trials = {f'{of}/{name}' for of in ('agent', 'eval') for name in TRIALS}
    assert of_trials <= set().union(*rows)
    assert list((tmp_path / 'rollouts').glob('*.html'))


# ---- hosts ---------------------------------------------------------------------------------------


def host_play(policy, tmp_path, lines=None):
    """Play one episode on each of eight items of hosts.Echo, or replay them from a log."""
    env, chat = hosts.Tests(), hosts.build_chat(tiny.tokenizer())
    conversation = hosts.Conversation(chat, '<think>', 160, agent=BOTH)
    levels = env.make_params(num_levels=16)
    task_ = hosts.build_host_task(env, levels, conversation, max_turns=TURNS)
    pool = None if lines is None else replies.LoggedPool(lines, conversation.prompt)
    sizes = dict(temperature=1.0, max_tokens=1600, max_response=RESPONSE, window=1)
    strings = ('</answer>', *agents.closings(BOTH))
    collect = hosts.collector(conversation, hosts.Echo, strings=strings, pool=pool, **sizes)
    log = replies.ReplyLog(tmp_path / 'replies.jsonl' if lines is None else None)
    collect.worlds.log, log.about = log, {'step': 0}
    try:
        stream = jnp.arange(8, dtype=jnp.int32)
        listed = Episodes(level=stream, token_stream=stream, world_stream=stream)
        return jax.device_get(collect(policy, task_, listed, tiny.KEY))[0], task_
    finally:
        log.close()
        collect.worlds.pool.close()


@pytest.mark.soak
def test_agents_work_on_hosts_and_their_logs_replay_the_same_rollout(policy, tmp_path):
    out, task_ = host_play(policy, tmp_path)
    assert out.healthy.all()
    for b in range(8):
        assert_turns_in_order(out, b)
    written = (out.part != ACT) & (out.turn_stop > 0)
    assert written.any() and not out.rewards[written].any() and (out.actions[written] == -1).all()
    lines = replies.read_log(tmp_path / 'replies.jsonl')
    first = {(line['stream'], line['trial']): line for line in lines if line['action'] == 0}
    again = [stream for stream, trial in first if trial == 1]
    assert again
    for stream in again:  # the same item from its start, after the reflection
        same = [first[stream, trial] | dict(trial=0, turn=0, seconds=0) for trial in (0, 1)]
        assert same[0] == same[1] and out.part[stream, first[stream, 1]['turn'] - 1] == REFLECT
    replayed, _ = host_play(policy, tmp_path, lines)
    jax.tree.map(np.testing.assert_array_equal, out, replayed)
    assert tiny.gap(policy, out, found=cut(out, 1, task_)) <= 1e-5
