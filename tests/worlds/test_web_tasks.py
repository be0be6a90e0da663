"""WebArena's actions, lines of a page, tasks and scores, without a browser."""

import json
import pathlib

import pytest
from web_site import NOTE, ROWS, row, write_rows

from agentrl_jax.envs.hosts.answers import READERS, Unreadable
from agentrl_jax.envs.hosts.web import actions, chromium, scoring, tasks, tree, world
from agentrl_jax.envs.hosts.web.actions import Action, read_action
from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.envs.splits import SPLITS

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    'text, action',
    [
        ('click [12]', Action('click', 12)),
        ('type [3] [a [b] c] [0]', Action('type', 3, 'a [b] c', False)),
        ('type [3] [x ] [press_enter_after=1]', Action('type', 3, 'x ')),
        ('scroll [direction=down]', Action('scroll', text='down')),
        ('press [Ctrl+a]', Action('press', text='Ctrl+a')),
        ('stop', Action('stop')),
        ('stop [two\nlines]', Action('stop', text='two\nlines')),
    ],
)
def test_actions_are_parsed_in_the_format_of_webarena(text, action):
    assert read_action(text) == action
    assert READERS['in_backticks'](f'I think.\n```{text}``` and ```none```') == text.strip()


@pytest.mark.parametrize('text', ['', 'click', 'click [a]', 'press []', 'scroll [left]', 'fly [1]'])
def test_text_without_an_action_is_unreadable(text):
    for verbs in (tuple(actions.FORMS), actions.ON_A_PAGE):
        with pytest.raises(Unreadable):
            read_action(text, verbs)


def node(number, role, name='', children=(), ignored=False, **properties):
    """Return a node of Accessibility.getFullAXTree; its backend number is 10 x number."""
    value = {'value': {'value': properties.pop('value')}} if 'value' in properties else {}
    return {
        'nodeId': str(number),
        'backendDOMNodeId': 10 * number,
        'ignored': ignored,
        'role': {'value': role},
        'name': {'value': name},
        'childIds': [str(child) for child in children],
        'properties': [{'name': k, 'value': {'value': v}} for k, v in properties.items()],
    } | value


def test_a_page_is_the_lines_of_its_accessibility_tree():
    nodes = [
        node(1, 'RootWebArea', 'Title', [2, 9]),
        node(2, 'generic', '', [3, 4, 6], focusable=False),
        node(3, 'none', ignored=True, children=[5]),
        node(4, 'textbox', 'Name', [7], value='Ann', focusable=True, focused=True),
        node(5, 'link', "It's", [8], focusable=True),
        node(6, 'checkbox', 'Yes', checked='false', focusable=True),
        node(7, 'StaticText', 'Ann'),
        node(8, 'StaticText', "It's"),
        node(9, 'StaticText', 'far  below'),
    ]
    lines = tree.lines(nodes, {90: (0, 800, 10, 10)}, (0, 0, 100, 100))
    assert [line.text(n) for n, line in enumerate(lines, 1)] == [
        '[1] link "It\'s"',
        "[2] textbox 'Name' focused: True value: 'Ann'",
        "[3] checkbox 'Yes' checked: False",
    ]
    assert [line.node for line in lines] == [50, 40, 60]
    scrolled = tree.lines(nodes, {90: (0, 800, 10, 10)}, (0, 750, 100, 100))
    assert scrolled[-1] == tree.Line(0, 90, 'StaticText', 'far below')


# ---- tasks and scores ----------------------------------------------------------------------------


def test_tasks_of_listed_sites_are_read(tmp_path):
    path, sites = write_rows(tmp_path, ROWS)
    by_id = world.read(path, sites)
    assert sorted(by_id) == [0, 1, 2, 3, 4, 5]
    assert by_id[3].start == (
        'http://127.0.0.1:80/f/books/7/comment/1',
        'http://127.0.0.1:80/item?of=lamp',
    )
    assert by_id[0].state == 'shop_state.json' and by_id[0].answers == (('must_include', ('20',)),)
    assert by_id[2].targets[0].contents == ('buy a lamp |OR| buy lamps', 'high')
    assert [task.number for task in by_id.values() if task.needs_judge] == [5]
    unjudged, judged = (
        {number for split in SPLITS for number in env.our_items(split).tolist()}
        for env in (world.WebEnvironment(tasks=path, sites=sites, judge=j) for j in ('', 'a:b'))
    )
    assert judged - unjudged == {5} and judged == by_id.keys()


NOTHING = NOTE | {'required_contents': {'must_include': ['a |OR| ']}}


@pytest.mark.parametrize(
    'field, changes',
    [
        ('eval_types', dict(eval_types=['taste'])),
        ('reference_answers', dict(reference_answers={'guess': 'x'})),
        ('locator', dict(program_html=[NOTE | {'locator': 'lambda: 1'}])),
        ('required_contents', dict(program_html=[{'url': 'last'}])),
        ('shop', dict(sites=['elsewhere'])),
        # Any stop would solve these: an evaluator without anything to compare scored 1
        ('reference_answers', dict(reference_answers=None)),
        ('reference_answers', dict(reference_answers={'must_include': ['a', ' ']})),
        ('reference_url', dict(eval_types=['string_match', 'url_match'], reference_url='')),
        ('reference_url', dict(eval_types=['url_match'], reference_url='__SHOP__/a |OR| ')),
        ('program_html', dict(eval_types=['program_html'], program_html=[])),
        ('required_contents', dict(eval_types=['program_html'], program_html=[NOTHING])),
    ],
)
def test_tasks_that_cannot_be_scored_are_rejected_by_field(tmp_path, field, changes):
    path, sites = write_rows(tmp_path, [row(0, 'x', **changes)])
    with pytest.raises(ValueError, match=field):
        tasks.read_tasks(path, tasks.read_sites(sites))


def test_a_program_may_require_an_empty_part_of_a_page():
    target = {'url': 'last', 'locator': '', 'required_contents': {'exact_match': ''}}
    assert tasks.read_target(target).contents == ('',)


def test_sites_are_names_and_addresses():
    for site in ('shop', 'Shop=http://a', 'shop=ftp://a', 'shop=a', 'shop=http://me:secret@host'):
        with pytest.raises(ValueError) as raised:
            tasks.read_sites([site])
        assert 'secret' not in str(raised.value)
    assert chromium.origin('https://a.b/c?d') == 'https://a.b:443'
    assert chromium.origin('http://[::1]:80/') == 'http://[::1]:80'
    with pytest.raises(ValueError, match='web.tasks'):
        world.read('', ())


def score_of(answers, answer, judge=None, reason=''):
    task_row = row(0, 'Why?', reference_answers=answers, string_note=reason)
    return scoring.string_score(tasks.read_task(task_row, {'shop': 'http://a'}), answer, judge)


@pytest.mark.parametrize(
    'reference, answer, score',
    [
        ({'exact_match': 'Two Lamps'}, ' "two lamps" ', 1),
        ({'exact_match': 'Two Lamps'}, 'two lamps, red', 0),
        ({'must_include': ['lamp', '20']}, 'The LAMP costs 20.00', 1),
        ({'must_include': ['lamp', '20']}, 'The lamp', 0),
        # A single phrase of one character must be a separate word; one of several need not be
        ({'must_include': ['0']}, '10', 0),
        ({'must_include': ['0']}, '0.', 1),
        ({'must_include': ['0', '1']}, '10', 1),
        ({'fuzzy_match': 'N/A'}, 'n/a', 1),
        ({'fuzzy_match': 'N/A'}, 'no', 0),
    ],
)
def test_answers_are_scored_as_in_webarena(reference, answer, score):
    assert score_of(reference, answer) == score


def test_words_of_one_character_match_nltk():
    lines = (ROOT / 'tests/data/webarena_words.tsv').read_text(encoding='utf-8').splitlines()
    rows = [line.split('\t') for line in lines if not line.startswith('#')]
    assert len(rows) > 600
    for expected, character, text in rows:
        score = score_of({'must_include': [character]}, json.loads(text))
        assert score == int(expected), (character, text)


def test_a_judge_receives_answer_reference_and_intent():
    calls = []

    def judge(*words):
        calls.append(words)
        return words[0] == 'it is'

    assert score_of({'fuzzy_match': ['so', 'yes']}, 'It is', judge) == 1
    assert score_of({'fuzzy_match': ['so']}, '', judge) == 0
    assert score_of({'fuzzy_match': 'N/A'}, 'cannot', judge, 'too far') == 0
    assert calls[0] == ('it is', 'so', 'Why?') and calls[-1] == ('cannot', 'too far', 'Why?')
    with pytest.raises(WorldError, match='web.judge'):
        score_of({'fuzzy_match': ['so']}, 'x')


def test_addresses_are_scored_by_path_and_query():
    targets = ('http://a/b', 'http://a/c?d=1', 'http://a/c?d=2')
    assert scoring.url_score('http://a/c/e/?d=2&f=3', targets) == 1
    assert scoring.url_score('http://a/c?d=3', targets) == 0
    assert scoring.url_score('http://a/b', targets) == 0  # the other query is missing
    assert scoring.url_score('http://b/b?d=1', targets) == 0
    assert scoring.post_of('http://a/f/books/7/x/-/comment/9') == 'http://a/f/books/7/'
    assert scoring.post_of('http://a/other') == 'http://a/other'
