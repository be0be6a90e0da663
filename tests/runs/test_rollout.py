"""collect: the sampler agrees with the trainer for any schedule and mesh."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny
from jax.sharding import AxisType

from agentrl_jax.rollout import device
from agentrl_jax.run.parts import check_budget
from agentrl_jax.types import Episodes, EpisodeStop, TurnStop

KEY, rollout_of = tiny.KEY, tiny.played
END = tiny.tokenizer().special('<|im_end|>')
each_world = pytest.mark.parametrize(
    'name',
    ['frozen_lake', *(pytest.param(x, marks=pytest.mark.soak) for x in ('sokoban', 'bandit'))],
)


def assert_same_rollout(one, other):
    """Every field bit for bit, log-probabilities to 1e-5."""
    for name in one.__dataclass_fields__:
        a, b = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        if name == 'logprobs':
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


@each_world
def test_the_sampler_is_the_trainer(name):
    assert tiny.gap(tiny.cloned(name)[0], rollout_of(name)[0], tiny.TEMPERATURES[name]) <= 1e-5


@each_world
def test_masks_agree_on_every_token_and_counters_count_each_once(name):
    """Sampled tokens that are written twice or dropped make the mask smaller than the counter."""
    out, counters = rollout_of(name)
    rows, length = out.tokens.shape
    used = out.attention_mask.sum(1)
    for b in range(rows):
        real = np.arange(length) < used[b]
        np.testing.assert_array_equal(out.attention_mask[b], real)
        np.testing.assert_array_equal(out.turn[b] == -1, ~real)
        assert (np.diff(out.turn[b][real]) >= 0).all() and (np.diff(out.turn[b][real]) <= 1).all()
        assert out.turn[b][used[b] - 1] == out.num_turns[b] - 1
        assert out.action_mask[b, used[b] - 1]  # nothing follows the last answer
    assert not (out.action_mask & ~out.attention_mask).any()
    assert (out.logprobs[~out.action_mask] == 0).all() and (out.logprobs <= 0).all()
    assert (out.tokens[~out.attention_mask] == tiny.tokenizer().pad_id).all()
    assert counters['overflow'] == counters['nonfinite'] == 0
    assert counters['generated'] == out.action_mask.sum() > counters['decodes']
    # 3 slots are served at a time: at every episode's start and at the end of each turn.
    assert counters['serves'] >= out.num_turns.sum() / 3


@each_world
def test_every_turn_and_episode_has_a_stop_reason_and_nothing_follows_it(name):
    out, _ = rollout_of(name)
    in_episode = np.arange(3)[None] < out.num_turns[:, None]
    assert (out.num_turns >= 1).all() and (out.episode_stop != EpisodeStop.NONE).all()
    np.testing.assert_array_equal(out.turn_stop != TurnStop.NONE, in_episode)
    for b, k in np.argwhere(in_episode):
        sampled = out.tokens[b][out.action_mask[b] & (out.turn[b] == k)]
        ended = np.isin(sampled, tiny.tokenizer().eos_ids)
        assert 1 <= len(sampled) <= tiny.MAX_RESPONSE and not ended[:-1].any()
        cut = len(sampled) == tiny.MAX_RESPONSE and not ended[-1]
        assert (out.turn_stop[b, k] == TurnStop.EOS) == ended[-1]
        assert (out.turn_stop[b, k] == TurnStop.LENGTH) == cut
    for field in (out.rewards, out.penalties, out.num_actions, out.valid, out.anchor):
        assert not field[~in_episode].any()
    assert (out.actions[~in_episode] == -1).all()
    np.testing.assert_array_equal((out.actions >= 0).sum(2), out.num_actions)
    # The policy of these tests plays validly, so that not all answers are invalid
    assert 0.15 < out.valid[in_episode].mean() < 1.0 and out.num_actions.sum() > 10


def test_sampled_tokens_without_a_finite_log_probability_are_counted():
    """Finite weights with non-finite logits played to a success of 0 %."""
    params = jax.tree.map(lambda x: x * 1e19, tiny.cloned('frozen_lake')[0])
    _, counters = tiny.play(
        'frozen_lake', params, KEY, temperature=tiny.TEMPERATURES['frozen_lake']
    )
    assert counters['nonfinite'] == counters['generated'] > 0


@each_world
def test_a_replay_of_the_sampled_bytes_agrees(name):
    """Answers parsed with Python's re, one environment step at a time, give the same results.

    These environments also write the text between answers, tokenised message by message. Turns
    with the same board share an anchor, regardless of their number, and other turns do not.
    """
    out, _ = rollout_of(name)
    task, observations = tiny.task(name), []
    for b in range(16):
        states, turns = tiny.replay(out, b, task, KEY, b)
        before = dict(reward=0, warn=False, used=0)
        for k, turn in enumerate(turns):
            assert out.rewards[b, k] == turn['reward'] and out.valid[b, k] == turn['valid']
            assert out.penalties[b, k] == np.float32(turn['penalty'])
            acted = out.actions[b, k]
            np.testing.assert_array_equal(acted[acted >= 0], turn['actions'])
            assert (turn['stop'] != EpisodeStop.NONE) == (k == len(turns) - 1)
            expected = tiny.turn_text(
                task.env,
                'brief',
                states[k],
                turn=k,
                reward=before['reward'],
                warn=before['warn'],
                left=5 - before['used'],
                sampled_end=out.turn_stop[b, k - 1] == TurnStop.EOS,
            )
            expected = (tiny.opening_text(task.env, 'brief', 5) if k == 0 else '') + expected
            prompt = out.tokens[b][(out.turn[b] == k) & ~out.action_mask[b]]
            np.testing.assert_array_equal(prompt, tiny.spelled(expected))
            observations.append((task.env.observation_text(states[k]), k, int(out.anchor[b, k])))
            before = turn
        assert out.episode_stop[b] == turns[-1]['stop'] and out.success[b] == turns[-1]['success']
    np.testing.assert_allclose(out.returns, (out.rewards + out.penalties).sum(1), rtol=1e-6)
    texts, numbers, anchors = (np.array(x) for x in zip(*observations, strict=True))
    same = texts[:, None] == texts[None]
    np.testing.assert_array_equal(same, anchors[:, None] == anchors[None])
    if name in ('frozen_lake', 'sokoban'):  # boards repeat
        assert (same & (numbers[:, None] != numbers[None])).any()


@pytest.mark.parametrize(
    'slots, serve_rows', [pytest.param(16, 1, marks=pytest.mark.soak), (3, 2)], ids=str
)
def test_the_schedule_does_not_change_the_samples(slots, serve_rows):
    expected, counted = rollout_of('frozen_lake')
    blocks = dict(slots=slots, serve_rows=serve_rows)
    out, counters = tiny.play('frozen_lake', tiny.cloned('frozen_lake')[0], KEY, **blocks)
    assert counters['overflow'] == 0
    assert_same_rollout(out, expected)
    prefix = tiny.task('frozen_lake').prefix.shape[0]
    prompts = expected.attention_mask.sum() - expected.action_mask.sum() - 16 * prefix
    assert counters['read'] == counted['read'] == prompts
    assert counted['reads'] <= counted['serves']


@pytest.mark.soak
def test_the_kernel_layout_for_few_rows_does_not_change_the_samples():
    model = dataclasses.replace(tiny.config(), transposed=True)
    settings = tiny.settings(model=model, max_tokens=tiny.MAX_TOKENS['frozen_lake'])
    collect = functools.partial(device.collect, settings=settings)
    world = tiny.task('frozen_lake'), tiny.episodes('frozen_lake')
    play = jax.jit(collect, compiler_options=tiny.QUICK)
    out, _ = jax.device_get(play(tiny.cloned('frozen_lake')[0], *world, KEY))
    assert_same_rollout(out, rollout_of('frozen_lake')[0])


@pytest.mark.soak
@pytest.mark.mesh
def test_the_mesh_does_not_change_the_samples():
    mesh = jax.make_mesh((4, 1, 2), ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
    collect = device.collect_on_mesh(mesh, tiny.settings(max_tokens=160))
    assert tiny.settings(max_tokens=160).of_shard(mesh).slots == 8 // 4
    collect = jax.jit(collect, compiler_options=tiny.QUICK)
    world = tiny.task('frozen_lake'), tiny.episodes('frozen_lake')
    out, counters = jax.device_get(collect(tiny.cloned('frozen_lake')[0], *world, KEY))
    assert counters['overflow'].shape == (4,) and not counters['overflow'].any()
    assert counters['generated'].sum() == out.action_mask.sum()
    assert_same_rollout(out, rollout_of('frozen_lake')[0])


@pytest.mark.soak
def test_an_answer_cut_at_its_limit_gets_an_end_that_is_not_trained():
    """The next turn's prompt is the missing <|im_end|>, then the user message."""
    params = tiny.untrained()
    out, _ = tiny.play('sokoban', params, KEY, max_response=4, temperature=0.7)
    cut = [(b, k) for b, k in np.argwhere(out.turn_stop == TurnStop.LENGTH) if k < 2]
    assert len(cut) > 10
    opening = [END, *tiny.spelled('\n<|im_start|>user\n')]
    for b, k in cut:
        (sampled,) = np.nonzero(out.action_mask[b] & (out.turn[b] == k))
        assert len(sampled) == 4 and out.tokens[b, sampled[-1]] != END
        after = slice(sampled[-1] + 1, sampled[-1] + 1 + len(opening))
        np.testing.assert_array_equal(out.tokens[b, after], opening)
        assert not out.action_mask[b, after].any() and (out.turn[b, after] == k + 1).all()
    assert tiny.gap(params, out, 0.7) <= 1e-5


@pytest.mark.soak
def test_turns_may_end_at_the_closing_tag_of_the_answer():
    """stop_at_answer: the token that completes </answer> ends the turn; no end token is sampled."""
    params = tiny.cloned('sokoban')[0]
    out, _ = tiny.play('sokoban', params, KEY, stop_at_answer=True)
    stopped = np.argwhere(out.turn_stop == TurnStop.ANSWER)
    assert len(stopped) > 10
    for b, k in stopped:
        ids = out.tokens[b][out.action_mask[b] & (out.turn[b] == k)]
        text, before = (tiny.tokenizer().decode(ids[:n]) for n in (len(ids), len(ids) - 1))
        assert '</answer>' in text and '</answer>' not in before
        assert tiny.answered(out, b, k, tiny.task('sokoban'))[0]
    for b, k in np.argwhere(out.turn_stop == TurnStop.EOS):
        assert not tiny.answered(out, b, k, tiny.task('sokoban'))[0]
    assert tiny.gap(params, out, 1.0) <= 1e-5


def test_an_episode_ends_before_the_turn_that_would_not_fit():
    """Half of the episodes without this budget are longer."""
    free = rollout_of('frozen_lake')[0]
    used = free.attention_mask.sum(1)
    budget = int(np.median(used))
    out, counters = tiny.play('frozen_lake', tiny.cloned('frozen_lake')[0], KEY, max_tokens=budget)
    assert counters['overflow'] == 0
    over = out.episode_stop == EpisodeStop.TOKEN_BUDGET
    assert 3 < over.sum() < 16
    np.testing.assert_array_equal(out.episode_stop[~over], free.episode_stop[~over])
    for b in range(16):
        n = out.attention_mask[b].sum()
        assert n <= budget
        np.testing.assert_array_equal(out.tokens[b, :n], free.tokens[b, :n])
        if over[b]:  # there was a next turn, and its prompt and longest answer did not fit
            k = out.num_turns[b]
            prompt = ((free.turn[b] == k) & ~free.action_mask[b]).sum()
            assert used[b] > n and n + prompt + tiny.MAX_RESPONSE > budget
    np.testing.assert_array_equal(out.rewards, np.where(out.turn_stop > 0, free.rewards, 0))


def test_token_budgets_too_small_for_one_turn_are_rejected():
    task = tiny.task('frozen_lake')
    least = len(task.prefix) + task.width + 12
    check_budget(task, max_tokens=least, max_response=12)
    with pytest.raises(ValueError, match=f'set it to at least {least}'):
        check_budget(task, max_tokens=least - 1, max_response=12)


def test_the_streams_of_an_episode_determine_its_randomness():
    """Equal streams give equal episodes; other world streams keep the first answer."""
    params = tiny.cloned('frozen_lake')[0]
    stream = jnp.arange(16, dtype=jnp.int32)
    listed = Episodes(level=stream * 0, token_stream=stream // 4, world_stream=stream // 4)
    out, _ = tiny.play('frozen_lake', params, KEY, listed=listed)
    assert (out.tokens == out.tokens[::4].repeat(4, 0)).all()
    assert (out.tokens != out.tokens[:1]).any()
    out, _ = tiny.play('frozen_lake', params, KEY, listed=listed.replace(world_stream=stream))
    for b in range(16):
        leader = b // 4 * 4
        first = np.flatnonzero((out.turn[leader] == 0) & out.attention_mask[leader])
        np.testing.assert_array_equal(out.tokens[b, first], out.tokens[leader, first])
    assert (out.tokens != out.tokens[::4].repeat(4, 0)).any()  # slippery ice


def test_a_shorter_horizon_cuts_the_same_episodes_without_recompiling():
    """Tokens, rewards and stops before the cut are the same as in the full episode; one program."""
    params, task = tiny.cloned('frozen_lake')[0], tiny.task('frozen_lake')
    full, _ = tiny.play('frozen_lake', params, KEY, temperature=1.0)
    program = tiny.compiled(tiny.settings(max_tokens=160, max_response=12))
    before = program._cache_size()
    for limit in (1, 2):
        cut = task.replace(turn_limit=jnp.int32(limit))
        out, _ = tiny.play('frozen_lake', params, KEY, task_=cut, temperature=1.0)
        assert program._cache_size() == before > 0
        np.testing.assert_array_equal(out.num_turns, np.minimum(full.num_turns, limit))
        mask = (full.turn < limit) & (full.turn >= 0)
        np.testing.assert_array_equal(out.attention_mask, mask)
        for field in ('tokens', 'logprobs', 'action_mask', 'turn'):
            np.testing.assert_array_equal(getattr(out, field)[mask], getattr(full, field)[mask])
        for field in ('rewards', 'penalties', 'actions', 'turn_stop'):
            mine, theirs = (getattr(x, field)[:, :limit] for x in (out, full))
            np.testing.assert_array_equal(mine, theirs)
        was_cut = full.num_turns > limit
        assert was_cut.any() and (out.episode_stop[was_cut] == EpisodeStop.TURN_BUDGET).all()
        np.testing.assert_array_equal(out.episode_stop[~was_cut], full.episode_stop[~was_cut])


@pytest.mark.soak
def test_sampled_tokens_follow_the_policy():
    """The mean of -log p of sampled tokens is the entropy: 512 first tokens of one prompt."""
    params = tiny.untrained()
    stream = jnp.arange(512, dtype=jnp.int32)
    listed = Episodes(level=stream * 0, token_stream=stream, world_stream=stream)
    out, _ = tiny.play(
        'frozen_lake',
        params,
        KEY,
        listed=listed,
        task_=tiny.task('frozen_lake', max_turns=1),
        slots=64,
        serve_rows=64,
        max_tokens=64,
        max_response=1,
    )
    first = int(np.argmax(out.action_mask[0]))
    rows = jnp.asarray(out.tokens[:2, : first + 1])
    ones = jnp.ones(rows.shape, bool)
    _, entropy = tiny.score()(params, rows, ones)
    surprise = -out.logprobs[:, first]
    error = surprise.std() / math.sqrt(512)
    assert abs(surprise.mean() - float(entropy[0, first])) < 4 * error
    assert len(set(out.tokens[:, first].tolist())) > 100
