"""Rollout pages: worlds played again from the tokens, and what the document says of an episode."""

import functools
import json
import types

import jax
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.records import document as documents
from agentrl_jax.records import pages
from agentrl_jax.run import recorder
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import EpisodeStop, TurnStop


def replayed(name):
    out, _ = tiny.played(name)
    return pages.replay(out, np.arange(16), tiny.task(name), tiny.tokenizer(), tiny.KEY)


@pytest.mark.parametrize('name', tiny.NAMES)
def test_replayed_worlds_are_those_of_the_rollout(name):
    """Cell for cell those of a replay by hand: before every turn, and after the last."""
    out, _ = tiny.played(name)
    env, grids = tiny.task(name).env, replayed(name)
    for b in range(16):
        states, _ = tiny.replay(out, b, tiny.task(name), tiny.KEY, b)
        assert len(grids[b]) == out.num_turns[b] + 1
        assert grids[b] == [env.cells(jax.device_get(state)) for state in states]


def write_some(folder, name='some', *, limit, group_size=4, **extras):
    out, _ = tiny.played('frozen_lake')
    path = pages.write(
        folder,
        name,
        out,
        task=tiny.task('frozen_lake'),
        tokenizer=tiny.tokenizer(),
        streams=np.arange(16),
        key=tiny.KEY,
        group_size=group_size,
        title='some',
        extras=extras,
        limit=limit,
    )
    return path, json.loads(path.with_suffix('.json').read_text(encoding='utf-8'))


@pytest.fixture(scope='module')
def document(tmp_path_factory):
    """The document of a lake rollout with ratios, and advantages for the first half only."""
    out, _ = tiny.played('frozen_lake')
    advantages = np.where(np.arange(16)[:, None] < 8, out.logprobs - 1, np.nan)
    extras = {'ratio': np.exp(out.logprobs), 'advantages': advantages}
    return write_some(tmp_path_factory.mktemp('run'), limit=16, **extras)[1]


def test_the_document_holds_every_token_and_turn(document):
    out, _ = tiny.played('frozen_lake')
    assert document['env'] == 'frozen_lake' and len(document['episodes']) == 16
    names = tiny.task('frozen_lake').env.ACTION_NAMES
    for b, episode in enumerate(document['episodes']):
        assert episode['level'] == out.level[b] and episode['group'] == b // 4
        assert episode['return'] == pytest.approx(out.returns[b], abs=1e-6)
        assert episode['episode_stop'] == EpisodeStop(out.episode_stop[b]).name.lower()
        ids = out.tokens[b][out.attention_mask[b]]
        text = ''.join(token['s'] for token in episode['tokens'])
        assert text == tiny.tokenizer().decode(ids, show_special=True)
        sampled = [token for token in episode['tokens'] if token['k'] == 'a']
        np.testing.assert_allclose(
            [token['lp'] for token in sampled], out.logprobs[b][out.action_mask[b]], rtol=1e-6
        )
        for token in sampled:
            assert token['ratio'] == pytest.approx(np.exp(token['lp']), rel=1e-5)
            expected = token['lp'] - 1 if b < 8 else 'nan'
            assert token['adv'] == pytest.approx(expected) if b < 8 else token['adv'] == expected
        for k, turn in enumerate(episode['turns']):
            assert turn['stop'] == TurnStop(out.turn_stop[b, k]).name.lower()
            acted = [names[i] for i in out.actions[b, k] if i >= 0]
            assert turn['actions'] == acted and turn['valid'] == out.valid[b, k]


def test_a_page_names_the_arm_that_was_pulled():
    """Of a bandit the action is the place of the arm, and pages named it out of all arms."""
    task, (out, _) = tiny.task('bandit'), tiny.played('bandit')
    names = functools.partial(task.env.names_of, params=task.env_params)
    made = documents.of_rollout(out, tiny.tokenizer(), 'bandit', names)
    for episode in made['episodes']:
        shown = task.env.cells(task.env.reset_level(episode['level'], task.env_params))[0]
        assert names(episode['level']) == shown and len(set(shown)) == 2
        assert all(set(turn['actions']) <= set(shown) for turn in episode['turns'])


def test_the_head_of_a_page_with_less_room_is_of_the_whole_rollout(tmp_path):
    """It was that of the episodes shown, 64 of 256, and called them all."""
    out, _ = tiny.played('frozen_lake')
    for limit, group_size in ((8, 4), (5, 1), (1, 4)):
        path, made = write_some(tmp_path, limit=limit, group_size=group_size)
        totals, shown, every = made['totals'], made['episodes'], made['every']
        assert (totals['episodes'], totals['faulty']) == (16, 0) and len(shown) <= limit
        assert [episode['row'] for episode in shown] == list(range(0, 16, every))
        assert [episode['level'] for episode in shown] == out.level[::every].tolist()
        full = replayed('frozen_lake')[::every]
        assert [episode['turns'][0]['grid'] for episode in shown] == [grids[0] for grids in full]
        assert [episode['final_grid'] for episode in shown] == [grids[-1] for grids in full]
        assert totals['solved'] == out.success.sum() and totals['turns'] == out.num_turns.sum()
        assert totals['return'] == pytest.approx(np.mean(out.returns), abs=1e-6)
        played = np.arange(3) < out.num_turns[:, None]
        assert totals['invalid'] == (played & ~out.valid).sum()
        assert (
            totals['truncated']
            == (
                (played & (out.turn_stop == TurnStop.LENGTH)).any(1)
                | (out.episode_stop == EpisodeStop.TOKEN_BUDGET)
            ).sum()
        )
        text = path.read_text(encoding='utf-8')
        assert f'{16 - len(shown)} are left out' in text
        for group in made['groups']:
            rows = slice(group['group'] * group_size, (group['group'] + 1) * group_size)
            assert group['solved'] == out.success[rows].sum() and group['episodes'] == group_size
            assert group['return'] == pytest.approx(np.mean(out.returns[rows]), abs=1e-6)


@pytest.mark.parametrize('groups', [4, 3, 0])
def test_the_page_of_a_step_with_dynamic_sampling_shows_the_groups_that_it_kept(tmp_path, groups):
    """Places that stayed free were worlds that had failed, on a page of a whole step."""
    out, _ = tiny.played('frozen_lake')
    free = np.arange(16) >= 4 * groups
    stop = np.where(free, EpisodeStop.ENV_ERROR, out.episode_stop)  # as collecting.pack marks them
    face = micro_runs.config('frozen_lake')
    run = types.SimpleNamespace(
        config=read_config(face),
        config_dict=face,
        tokenizer=tiny.tokenizer(),
        worlds={},
        training=types.SimpleNamespace(
            tasks=(tiny.task('frozen_lake'),), rescore=lambda policy, rollout: rollout.logprobs
        ),
    )
    played = recorder.Played(
        out.replace(episode_stop=stop),
        (tiny.episodes('frozen_lake'),),
        tiny.KEY,
        3,
        np.arange(16),
        out.logprobs,
        groups,
        2,
    )
    recorder.save_page(run, tmp_path, 5, None, played)
    path = tmp_path / 'rollouts' / 'step_000005.html'
    made = json.loads(path.with_suffix('.json').read_text(encoding='utf-8'))
    totals = made['totals']
    assert (totals['episodes'], totals['faulty']) == (4 * groups, 0)
    assert totals['solved'] == out.success[: 4 * groups].sum()
    assert [group['faulty'] for group in made['groups']] == [0] * groups
    text = path.read_text(encoding='utf-8')
    assert 'of step 5: groups that dynamic sampling kept, of 2 rollouts' in text


def test_a_run_that_goes_on_has_the_pages_of_one_that_never_stopped(tmp_path):
    """Those of later steps stayed, and pages of a mixture linked to what was not yet played."""

    def write_steps(run, *steps):
        for step in steps:
            for world in ('lake', 'library'):
                write_some(run, f'{world}_step_{step:06d}', limit=16)

    def texts(run):
        return {path.name: path.read_text() for path in (run / 'rollouts').iterdir()}

    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    write_steps(whole, 0, 5, 7)
    write_steps(killed, 0, 5, 7)
    (killed / 'rollouts' / 'evaluation_test.json').write_text('')  # of no step
    pages.cut(killed, 8)
    assert len(texts(killed)) == 2 * 2 * 3 + 1
    pages.cut(killed, 5)
    (killed / 'rollouts' / 'evaluation_test.json').unlink()
    left = texts(killed)
    assert len(left) == 2 * 2 * 1 and not any('step_000005' in text for text in left.values())
    write_steps(killed, 5, 7)
    assert texts(killed) == texts(whole)
