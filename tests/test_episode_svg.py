"""The animated episode of the README: made from a rollout document, and from nothing else."""

import copy
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from agentrl_jax.records.document import check
from agentrl_jax.tools import episode_svg

DEMO = pathlib.Path(__file__).resolve().parent.parent / 'experiments' / 'demo'
PREFIX = '{http://www.w3.org/2000/svg}'


@pytest.fixture
def document():
    return json.loads((DEMO / 'episode.json').read_text(encoding='utf-8'))


def boxes(picture, css):
    """Texts of the boxes of a kind, in order; the legend's have none."""
    groups = ElementTree.fromstring(picture).iter(f'{PREFIX}g')
    words = [g.findtext(f'{PREFIX}text') for g in groups if g.get('class') == css]
    return [word for word in words if word is not None]


def test_the_committed_picture_is_what_the_script_makes_of_the_excerpt(tmp_path, document):
    check(document)
    outputs = [tmp_path / 'episode.svg', tmp_path / 'episode.json']
    episode_svg.main([str(DEMO / 'episode.json'), f'--out={outputs[0]}', f'--excerpt={outputs[1]}'])
    for output in outputs:
        assert output.read_bytes() == (DEMO / output.name).read_bytes(), output.name


def test_every_token_is_drawn_once_and_what_was_executed_once_more(document):
    (episode,) = document['episodes']
    picture = episode_svg.render(document, 0)
    for css, kind in (('prompt', 'p'), ('sample', 'a')):
        tokens = [t['s'].replace('\n', '\u21b5') for t in episode['tokens'] if t['k'] == kind]
        assert boxes(picture, css) == tokens and len(tokens) > 20
    actions = [action for turn in episode['turns'] for action in turn['actions']]
    assert (
        boxes(picture, 'action')
        == actions
        == ['Left', 'Left', 'Down', 'Down']
        + [
            *['Left', 'Down', 'Down'],
            'Up',
        ]
    )


def test_the_picture_needs_nothing_from_outside_and_says_nothing_a_token_could_forge(document):
    document['episodes'][0]['tokens'][2]['s'] = '</text><script>alert(1)</script>'
    picture = episode_svg.render(document, 0)
    root = ElementTree.fromstring(picture)
    assert {node.tag for node in root.iter()}.isdisjoint({f'{PREFIX}script', f'{PREFIX}image'})
    assert not re.search(r'href|url\(|@import', picture)


def test_a_player_slides_to_the_next_cell_and_stays_at_the_edge():
    grid = [['empty'] * 4 for _ in range(4)]
    grid[3][3] = 'player'
    # Left to column 2; Down is the edge; Up to row 2
    path = [(3, 2), (3, 2), (2, 2)]
    assert episode_svg.walk(grid, ['Left', 'Down', 'Up']) == path


def test_the_board_moves_when_the_token_lights_up_and_after_it_was_sampled(document):
    turns = episode_svg.turns_of(document['episodes'][0])
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        lit = [word for word in turn.words if word.executed is not None]
        assert [word.executed for word in lit] == [move.time for move in turn.moves]
        assert max(word.start for word in turn.words) < turn.moves[0].time < turn.end
        assert after is None or turn.end < after.start
    starts = [word.start for turn in turns for word in turn.words]
    assert starts == sorted(starts) and len(set(starts)) == len(starts)


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (lambda e: e['turns'][0].update(actions=['Left']), 'turn 1: Left does not lead to'),
        (lambda e: e['turns'][1].update(grid=None), 'saved without its worlds'),
        (lambda e: e.update(final_grid=[['player']]), 'only lakes of 4 x 4'),
        (lambda e: [t.update(s='?') for t in e['tokens'] if t['s'] == 'Up'], 'does not say Up'),
    ],
)
def test_an_episode_that_cannot_be_drawn_truly_is_refused(document, spoil, message):
    spoil(document['episodes'][0])
    with pytest.raises(ValueError, match=message):
        episode_svg.render(document, 0)


def test_what_is_no_rollout_document_is_named_in_one_line(tmp_path, document):
    path = tmp_path / 'x.json'
    path.write_text(json.dumps(copy.deepcopy(document)))
    with pytest.raises(SystemExit, match='no rollout document with episode 3'):
        episode_svg.main([str(path), '--episode=3', f'--out={tmp_path / "x.svg"}'])
    path.write_text('{}')
    with pytest.raises(SystemExit, match="no rollout document .*'episodes'"):
        episode_svg.main([str(path), f'--out={tmp_path / "x.svg"}'])
    assert not (tmp_path / 'x.svg').exists()
