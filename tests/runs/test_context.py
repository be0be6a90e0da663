"""Windows: the policy trains on exactly what it read, and credit still covers full episodes."""

import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax import train
from agentrl_jax.imitation.demonstrations import Turn, demonstrate, rows_of
from agentrl_jax.records import run_log
from agentrl_jax.rollout import windows
from agentrl_jax.text import agents

KEY, NAME = tiny.KEY, 'frozen_lake'


@functools.cache
def played(window, style='brief', past_turns=0):
    """Return (rollout, its windows) of the cloned policy."""
    task = tiny.task(NAME, style=style, past_turns=past_turns)
    more = dict(max_tokens=640) if style == 'ragen' else dict(max_tokens=256) if past_turns else {}
    policy = tiny.cloned(NAME)[0]
    out, counters = tiny.play(NAME, policy, KEY, task_=task, window=window, **more)
    assert counters['overflow'] == 0
    context = windows.Context.of(task, window or task.max_turns, tiny.MAX_RESPONSE)
    return out, jax.device_get(jax.jit(context.windows)(out))


def samples(out, turn_windows):
    """Return {(episode, turn): token ids that the policy read, including its answer}."""
    tokens, mask = (
        np.asarray(windows.split_turns(x, turn_windows)) for x in (out.tokens, out.attention_mask)
    )
    turns = turn_windows.index.shape[1]
    assert not mask[~mask.any(1)].any()
    for row in mask:
        assert (np.diff(row.astype(int)) <= 0).all()  # a prefix of the row
    return {
        divmod(i, turns): tokens[i][mask[i]].tolist() for i in range(len(tokens)) if mask[i].any()
    }


@pytest.mark.parametrize('window', [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_sampler_is_the_trainer(window):
    out, turn_windows = played(window)
    assert (out.num_turns > window).any()
    assert tiny.gap(tiny.cloned(NAME)[0], out, found=turn_windows) <= 1e-5


@pytest.mark.parametrize(('window', 'style', 'past_turns'), [(2, 'brief', 0), (1, 'ragen', 1)])
def test_a_sample_is_the_prefix_the_history_and_the_last_turns(window, style, past_turns):
    """Checked as text: the first turn of a window has no reward and no end of a turn before it."""
    out, turn_windows = played(window, style, past_turns)
    task = tiny.task(NAME, style=style, past_turns=past_turns)
    assert task.width > tiny.task(NAME, style=style).width or not past_turns
    got, late, several = samples(out, turn_windows), 0, 0
    assert sorted(got) == [(b, k) for b in range(16) for k in range(out.num_turns[b])]
    for b in range(16):
        states, turns = tiny.replay(out, b, task, KEY, b)
        for k in range(int(out.num_turns[b])):
            matched, parts = tiny.answered(out, b, k, task)
            turns[k]['said'] = [part for part in parts if matched and part >= 0]
            several += len(turns[k]['said']) > 1
            first = max(k - window + 1, 0)
            late += first > 0
            text = tiny.opening_text(task.env, style, task.max_actions_per_episode)
            ids = tiny.spelled(text + history_text(task, states, turns, k, past_turns))
            for i in range(first, k + 1):
                before = turns[i - 1] if i else dict(reward=0.0, warn=False, used=0)
                text = tiny.turn_text(
                    task.env,
                    style,
                    states[i],
                    turn=i if i > first else 0,  # 0: as for a first turn
                    reward=before['reward'],
                    warn=before['warn'],
                    left=task.max_actions_per_episode - before['used'],
                    sampled_end=i > 0 and out.turn_stop[b, i - 1] == tiny.TurnStop.EOS,
                )
                ids += tiny.spelled(text.replace('Turn 1:\n', f'Turn {i + 1}:\n'))
                ids += out.tokens[b][out.action_mask[b] & (out.turn[b] == i)].tolist()
            assert got[b, k] == ids, (b, k)
    assert late >= 5
    assert several > 3 or style == 'ragen'  # the policy was cloned with the brief wording


@pytest.mark.soak
def test_a_window_changes_prompts_only_from_the_first_turn_that_it_cuts():
    """A window of all turns changes nothing."""
    free, _ = tiny.play(NAME, tiny.cloned(NAME)[0], KEY)
    full, out = played(3)[0], played(1)[0]
    np.testing.assert_array_equal(free.tokens, full.tokens)
    np.testing.assert_allclose(free.logprobs, full.logprobs, atol=1e-5)
    first = full.action_mask & (full.turn == 0)
    np.testing.assert_array_equal(full.tokens[first], out.tokens[first])
    np.testing.assert_allclose(full.logprobs[first], out.logprobs[first], atol=1e-5)
    second = full.action_mask & out.action_mask & (full.turn == 1) & (out.turn == 1)
    assert second.sum() > 10 and np.abs(full.logprobs - out.logprobs)[second].max() > 0.01


def test_scatter_back_inverts_split_turns_on_every_answer():
    out, turn_windows = played(2)
    mask = jnp.asarray(out.action_mask)
    back = windows.scatter_back(
        windows.split_turns(jnp.asarray(out.logprobs), turn_windows), turn_windows, mask.shape[1]
    )
    np.testing.assert_array_equal(np.where(mask, back, 0.0), out.logprobs)
    trained = windows.own_turn_mask(mask, turn_windows)
    assert trained.sum() == mask.sum()  # each sampled token is trained in one sample


def as_turns(out, b):
    """Convert an episode of a rollout to the turns of a demonstration."""
    turns, prefix = [], len(tiny.task(NAME).prefix)
    for k in range(int(out.num_turns[b])):
        in_turn = (out.turn[b] == k) & (np.arange(out.turn.shape[1]) >= prefix)
        prompt, answer = in_turn & ~out.action_mask[b], out.tokens[b][in_turn & out.action_mask[b]]
        cut = int(out.begin[b, k] - np.argmax(in_turn)) if k else 0
        written = out.part[b, k] != agents.ACT
        turns.append(Turn(out.tokens[b][prompt].tolist(), answer.tolist(), cut, written))
    return turns


def test_a_clone_trains_on_the_contexts_of_the_policy():
    window = 2
    out, turn_windows = played(window)
    prefix = np.asarray(tiny.task(NAME).prefix).tolist()
    rows = rows_of(prefix, (as_turns(out, b) for b in range(16)), window)
    assert [row for row, _ in rows] == list(samples(out, turn_windows).values())
    trained = sum(np.sum(train) for _, train in rows)
    assert trained == out.action_mask.sum() and all(train[-1] for _, train in rows)


def test_the_context_of_a_clone_has_the_last_plan_before_its_window():
    first, second, third = (
        Turn([1, 2, 3], [4], opening=0, written=True),
        Turn([5, 6, 7], [8], opening=2),
        Turn([9, 10, 11], [12], opening=2),
    )
    rows = rows_of([0], [[first, second, third]], 1)
    assert [row for row, _ in rows] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 11, 12],
    ]


def test_demonstrations_with_a_window_are_the_full_ones_cut_into_turns():
    task = tiny.task(NAME)

    def expert(states, used):
        return task.env.plans(states, used, task.max_actions_per_episode, task.env_params)

    def demo_rows(window):
        sizes = dict(seed=0, episodes=8, oracle=0.5, max_tokens=400, window=window)
        data = jax.device_get(demonstrate(task, tiny.tokenizer(), expert, **sizes))
        rows = zip(data.tokens, data.attention_mask, data.mask, strict=True)
        return [(row[segment].tolist(), train[segment]) for row, segment, train in rows]

    full, cut, prefix = demo_rows(0), iter(demo_rows(1)), len(task.prefix)
    several = 0
    for row, mask in full:
        begin = prefix
        for k, end in enumerate(1 + np.flatnonzero(mask & ~np.append(mask[1:], False))):
            got, trained = next(cut)
            segment, visible = row[begin:end], len(got) - prefix
            assert got == row[:prefix] + segment[len(segment) - visible :]
            assert (visible < len(segment)) == (k > 0)  # no reward, no end of a turn
            assert trained.sum() == mask[begin:end].sum()
            several += k > 0
            begin = end
    assert several > 3 and next(cut, None) is None


def history_text(task, states, turns, k, m):
    """Return the history of the last m turns before turn k."""
    if not k or not m:
        return ''
    text = f'Summary: {k} turns completed so far. Showing the last {min(k, m)}.\n'
    for i in range(max(k - m, 0), k):
        names = [task.env.ACTION_NAMES[part] for part in turns[i]['said']] or ['none']
        actions = ''.join(f'Action: {name}\n' for name in names)
        rewarded = f'Reward: {turns[i]["reward"]:.1f}\n' if task.style.reward else ''
        text += f'Turn {i + 1}:\n{task.env.observation_text(states[i])}{actions}{rewarded}'
    return text


def micro(**changes):
    sizes = {'env.max_turns': 3, 'rollout.max_tokens': 144, 'steps': 2, 'eval.every': 0}
    return micro_runs.config(NAME, **(sizes | changes))


@pytest.mark.soak
def test_training_on_windows_of_all_turns_equals_training_on_conversations(tmp_path):
    """Shapes differ, but samples and weights are the same: losses and gradients agree."""
    rows = {}
    changes = {'algorithm': 'mt_grpo', 'loss.aggregation': 'seq_mean_token_mean'}
    changes |= {'batch.shuffle': True, 'clone.episodes': 32, 'clone.steps': 30}
    for window in (0, 3):
        folder = tmp_path / str(window)
        with micro_runs.one_device():
            assert train.train(micro(**changes, **{'context.window': window}), str(folder)) == 0
        rows[window] = run_log.read_metrics(folder / run_log.METRICS_FILE)
    assert rows[0][0]['policy/grad_norm'] > 0
    names = ('policy/loss', 'policy/grad_norm', 'policy/entropy')
    for name in (*names, 'batch/trained_tokens', 'batch/trained_rows'):
        for step in (0, 1):
            assert rows[3][step][name] == pytest.approx(rows[0][step][name], rel=1e-3, abs=1e-6)
