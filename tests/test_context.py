"""Windows: the policy is trained on exactly what it saw, and credit still runs over episodes."""

import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax import train
from agentrl_jax.records import run_log
from agentrl_jax.rollout import windows
from agentrl_jax.run.config import read as read_config

KEY, NAME = tiny.KEY, 'frozen_lake'


def static(task):
    sizes = dict(width=task.width, max_response=tiny.MAX_RESPONSE, keeps=task.agent.writes)
    return dict(prefix=task.prefix.shape[0], **sizes)


@functools.cache
def played(window, style='brief'):
    """(rollout, its windows) of the cloned policy."""
    task = tiny.task(NAME, style=style)
    more = {} if style == 'brief' else {'max_tokens': 512}
    out, _ = tiny.play(NAME, tiny.cloned(NAME)[0], KEY, task_=task, window=window, **more)
    cut = functools.partial(windows.windows, window=window or task.max_turns, **static(task))
    return out, jax.device_get(jax.jit(cut)(out))


def samples(out, found):
    """{(episode, turn): ids the policy saw, answer included} of the turns that were played."""
    tokens, seen = (
        np.asarray(windows.split_turns(x, found)) for x in (out.tokens, out.attention_mask)
    )
    turns = found.index.shape[1]
    assert not seen[~seen.any(1)].any()
    for row in seen:
        assert (np.diff(row.astype(int)) <= 0).all()  # a prefix of the row
    return {
        divmod(i, turns): tokens[i][seen[i]].tolist() for i in range(len(tokens)) if seen[i].any()
    }


@pytest.mark.parametrize('window', [1, 2])
def test_the_sampler_is_the_trainer(window):
    out, found = played(window)
    assert (out.num_turns > window).any()
    rows = windows.split_turns((jnp.asarray(out.tokens), jnp.asarray(out.attention_mask)), found)
    scores, _ = tiny.score()(tiny.cloned(NAME)[0], *rows)
    trained = np.asarray(windows.put_back(scores, found, out.tokens.shape[1]))
    gap = np.where(out.action_mask, np.abs(trained - out.logprobs), 0.0)
    assert out.action_mask.sum() > 50 and gap.max() <= 1e-5


@pytest.mark.parametrize(('window', 'style'), [(1, 'ragen'), (2, 'brief')])
def test_a_sample_is_the_prefix_and_the_last_turns(window, style):
    """Written out as text: the first turn of a window shows no reward and no end of a turn."""
    out, found = played(window, style)
    task = tiny.task(NAME, style=style)
    got, late = samples(out, found), 0
    assert sorted(got) == [(b, k) for b in range(16) for k in range(out.num_turns[b])]
    for b in range(16):
        states, turns = tiny.replay(out, b, task, KEY, b)
        for k in range(int(out.num_turns[b])):
            first = max(k - window + 1, 0)
            late += first > 0
            ids = tiny.spelled(tiny.opening_text(task.env, style, task.max_actions_per_episode))
            for i in range(first, k + 1):
                before = turns[i - 1] if i else None
                ids += prompt(task, style, states[i], i, before, out.turn_stop[b], shown=i > first)
                ids += out.tokens[b][out.action_mask[b] & (out.turn[b] == i)].tolist()
            assert got[b, k] == ids, (b, k)
    assert late >= 5


def prompt(task, style, state, turn, before, stops, *, shown):
    """Ids of a turn's prompt; without `shown` as if no turn had been before it."""
    text = tiny.turn_text(
        task.env,
        style,
        state,
        turn=turn,
        reward=before['reward'] if before else 0.0,
        warn=bool(before and before['warn']),
        left=task.max_actions_per_episode - (before['used'] if before else 0),
        sampled_end=turn > 0 and stops[turn - 1] == tiny.TurnStop.EOS,
    )
    if turn and not shown:
        opening = tiny.turn_text(
            task.env,
            style,
            state,
            turn=turn,
            reward=before['reward'],
            warn=False,
            left=0,
            sampled_end=stops[turn - 1] == tiny.TurnStop.EOS,
        ).split(f'Turn {turn + 1}:' if style == 'ragen' else task.env.observation_text(state))[0]
        text = text.removeprefix(opening)
    return tiny.spelled(text)


def test_a_window_of_all_turns_samples_the_same_tokens_as_no_window():
    whole, _ = tiny.play(NAME, tiny.cloned(NAME)[0], KEY)
    out, _ = played(3)
    np.testing.assert_array_equal(whole.tokens, out.tokens)
    np.testing.assert_allclose(whole.logprobs, out.logprobs, atol=1e-5)


def test_a_shorter_window_changes_what_the_policy_sees_only_from_the_turn_on_that_it_cuts():
    whole, out = played(3)[0], played(1)[0]
    first = whole.action_mask & (whole.turn == 0)
    np.testing.assert_array_equal(whole.tokens[first], out.tokens[first])
    np.testing.assert_allclose(whole.logprobs[first], out.logprobs[first], atol=1e-5)
    second = whole.action_mask & out.action_mask & (whole.turn == 1) & (out.turn == 1)
    assert second.sum() > 10 and np.abs(whole.logprobs - out.logprobs)[second].max() > 0.01


def test_put_back_undoes_split_turns_on_every_answer():
    out, found = played(2)
    mask = jnp.asarray(out.action_mask)
    back = windows.put_back(
        windows.split_turns(jnp.asarray(out.logprobs), found), found, mask.shape[1]
    )
    np.testing.assert_array_equal(np.where(mask, back, 0.0), out.logprobs)
    own = windows.own_rows(mask, found)
    assert own.sum() == mask.sum()  # each sampled token is trained in one sample


HISTORY = (
    'Summary: {n} turns completed so far. Showing the last {shown}.\n',
    'Turn {turn}:\n{state}{actions}',
)


def told(task, states, turns, k, m):
    """The history of the last m turns before turn k, as text."""
    if k == 0:
        return ''
    text = HISTORY[0].format(n=k, shown=min(k, m))
    for i in range(max(k - m, 0), k):
        names = [task.env.ACTION_NAMES[part] for part in turns[i]['said']] or ['none']
        actions = ''.join(f'Action: {name}\n' for name in names)
        rewarded = f'Reward: {turns[i]["reward"]:.1f}\n' if task.style.rewards_shown() else ''
        state = task.env.observation_text(states[i])
        text += HISTORY[1].format(turn=i + 1, state=state, actions=actions + rewarded)
    return text


@pytest.mark.parametrize('style', ['brief', 'ragen'])
def test_a_summary_tells_the_turns_that_the_policy_does_not_see(style):
    task = tiny.task(NAME, style=style, past_turns=1)
    assert task.width > tiny.task(NAME, style=style).width
    sizes = dict(max_tokens=640 if style == 'ragen' else 256, window=1)
    out, counters = tiny.play(NAME, tiny.cloned(NAME)[0], KEY, task_=task, **sizes)
    assert counters['overflow'] == 0 and (out.num_turns == 3).any()
    find = jax.jit(functools.partial(windows.windows, window=1, **static(task)))
    got, several = samples(out, jax.device_get(find(out))), 0
    for b in range(16):
        states, turns = tiny.replay(out, b, task, KEY, b)
        for k in range(int(out.num_turns[b])):
            matched, parts = tiny.answered(out, b, k, task)
            turns[k]['said'] = [part for part in parts if matched and part >= 0]
            several += len(turns[k]['said']) > 1
        for k in range(int(out.num_turns[b])):
            before = turns[k - 1] if k else None
            opening = tiny.opening_text(task.env, style, task.max_actions_per_episode)
            block = tiny.turn_text(
                task.env,
                style,
                states[k],
                turn=0,
                reward=0.0,
                warn=bool(k and before['warn']),
                left=task.max_actions_per_episode - (before['used'] if k else 0),
                sampled_end=True,
            ).replace('Turn 1:\n', f'Turn {k + 1}:\n')
            ids = tiny.spelled(opening + told(task, states, turns, k, 1) + block)
            ids += out.tokens[b][out.action_mask[b] & (out.turn[b] == k)].tolist()
            assert got[b, k] == ids, (b, k)
    assert several > 3 or style == 'ragen'  # the policy was cloned with the brief wording


def test_a_summary_without_a_window_of_one_turn_is_refused():
    with pytest.raises(ValueError, match='set context.window=1'):
        read_config(micro(2, **{'context.summary': 1}))


def micro(window, **changes):
    sizes = {
        'context.window': window,
        'env.max_turns': 3,
        'rollout.max_tokens': 144,
        'clone.episodes': 32,
        'clone.steps': 12,
        'steps': 2,
        'eval.every': 0,
    }
    return micro_runs.config(NAME, **(sizes | changes))


def test_training_on_windows_of_all_turns_is_training_on_conversations(tmp_path):
    """Other shapes, the same samples and weights: losses and gradients agree."""
    rows = {}
    more = {'loss.aggregation': 'seq_mean_token_mean', 'batch.shuffle': True, 'clone.steps': 30}
    for window in (0, 3):
        folder = tmp_path / str(window)
        cfg = micro(window, algorithm='mt_grpo', **more)
        with micro_runs.one_device():
            assert train.train(cfg, str(folder)) == 0
        rows[window] = run_log.read_metrics(folder / run_log.METRICS_FILE)
    assert rows[0][0]['policy/grad_norm'] > 0
    names = ('policy/loss', 'policy/grad_norm', 'policy/entropy')
    for name in (*names, 'batch/trained_tokens', 'batch/trained_rows'):
        for step in (0, 1):
            assert rows[3][step][name] == pytest.approx(rows[0][step][name], rel=1e-3, abs=1e-6)


@pytest.mark.soak
def test_a_critic_trains_on_windows(tmp_path):
    assert train.train(micro(1), str(tmp_path)) == 0
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert all(np.isfinite(row['value/loss']) and row['value/loss'] > 0 for row in rows[:2])
    assert max(row['sampler/logprob_gap'] for row in rows[:2]) < 1e-4


@pytest.mark.parametrize('algorithm', ['gspo'])
def test_a_ratio_of_whole_episodes_is_refused(algorithm):
    with pytest.raises(ValueError, match='context.window=1'):
        read_config(micro(1, algorithm=algorithm))


def test_windows_are_not_read_in_chunks():
    with pytest.raises(ValueError, match='rollout.read_tokens=8 needs the whole conversation'):
        read_config(micro(1, **{'rollout.read_tokens': 8}))
    with pytest.raises(ValueError, match='rollout.read_tokens=8 does not go with fork.turns'):
        changes = {'algorithm': 'vine', 'fork.turns': 'every', 'rollout.read_tokens': 8}
        read_config(micro(0, **changes))
