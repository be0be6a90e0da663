"""The animated episode of the README: made from a rollout document, and from nothing else."""

import copy
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from agentrl_jax.records.document import check
from agentrl_jax.tools import episode_svg

DEMO = pathlib.Path(__file__).resolve().parents[2] / 'experiments' / 'demo'
PREFIX = '{http://www.w3.org/2000/svg}'


@pytest.fixture
def document():
    return json.loads((DEMO / 'episode.json').read_text(encoding='utf-8'))


def test_the_committed_picture_is_what_the_script_makes_of_the_excerpt(tmp_path, document):
    check(document)
    outputs = [tmp_path / 'episode.svg', tmp_path / 'episode.json']
    episode_svg.main([str(DEMO / 'episode.json'), f'--out={outputs[0]}', f'--excerpt={outputs[1]}'])
    for output in outputs:
        assert output.read_bytes() == (DEMO / output.name).read_bytes(), output.name


def test_the_picture_needs_nothing_from_outside_and_says_nothing_a_token_could_forge(document):
    document['episodes'][0]['tokens'][2]['s'] = '</text><script>alert(1)</script>'
    picture = episode_svg.render(document, 0)
    root = ElementTree.fromstring(picture)
    assert {node.tag for node in root.iter()}.isdisjoint({f'{PREFIX}script', f'{PREFIX}image'})
    assert not re.search(r'href|url\(|@import', picture)


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
