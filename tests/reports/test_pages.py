"""Rollout pages: worlds replayed from the tokens, and the description of an episode."""

import functools
import json

import jax
import numpy as np
import pytest
import tiny_agents as tiny
from test_documents import document_of, small_rollout

from agentrl_jax.records import pages
from agentrl_jax.types import EpisodeStop, TurnStop


def replayed(name):
    out, _ = tiny.played(name)
    return pages.replay(out, np.arange(16), tiny.task(name), tiny.KEY)


@pytest.mark.soak
@pytest.mark.parametrize('name', tiny.NAMES)
def test_replayed_worlds_match_the_rollout(name):
    """Cell for cell as in a replay by hand, before every turn and after the last."""
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


def test_the_document_contains_every_token_and_turn(document):
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
    """A bandit's action is the position of the arm; previously pages looked it up in all arms."""
    env, params = tiny.environment('bandit')
    names = functools.partial(env.names_of, params=params)
    result = document_of(small_rollout(), names)  # arms 1 and 0 of level 3
    arms = env.cells(env.reset_level(3, params))[0]
    assert names(3) == arms and len(set(arms)) == 2
    assert result['episodes'][0]['turns'][0]['actions'] == arms[::-1]


@pytest.mark.parametrize(
    'count, limit, group_size, n', [(16, 8, 4, 2), (16, 5, 1, 4), (16, 1, 4, 16)]
)
def test_every_nth_episode_by_hand(count, limit, group_size, n):
    """2 of each group of 4; 4 of 16 alone; of four groups the first member of one."""
    assert pages.every_nth(count, limit, group_size) == n


def test_a_resumed_run_has_the_pages_of_one_that_never_stopped(tmp_path):
    """Previously later pages stayed, and pages of a mixture linked to steps not played yet."""

    def write_steps(run, *steps):
        for step in steps:
            for world in ('lake', 'library'):
                write_some(run, f'{world}_step_{step:06d}', limit=16)

    def texts(run):
        return {path.name: path.read_text() for path in (run / 'rollouts').iterdir()}

    complete, killed = tmp_path / 'whole', tmp_path / 'killed'
    write_steps(complete, 0, 5, 7)
    write_steps(killed, 0, 5, 7)
    (killed / 'rollouts' / 'evaluation_test.json').write_text('')  # belongs to no step
    pages.cut(killed, 8)
    assert len(texts(killed)) == 2 * 2 * 3 + 1
    pages.cut(killed, 5)
    (killed / 'rollouts' / 'evaluation_test.json').unlink()
    rest = texts(killed)
    assert len(rest) == 2 * 2 * 1 and not any('step_000005' in text for text in rest.values())
    write_steps(killed, 5, 7)
    assert texts(killed) == texts(complete)
