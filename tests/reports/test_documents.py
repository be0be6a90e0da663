"""Rollout documents: built from rollouts, written to files and rendered as pages."""

import html.parser

import numpy as np
import pytest

from agentrl_jax.records import document as documents
from agentrl_jax.records import page_html
from agentrl_jax.records.page_html import render_page
from agentrl_jax.text.agents import PLAN
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

VOID = {'meta', 'input', 'img', 'br', 'link', 'hr', 'base'}


class Page(html.parser.HTMLParser):
    """Collects elements as (tag, attributes) and the text inside each; checks the nesting."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack, self.text, self.duplicates = [], [], '', []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.duplicates += [tag] if len(dict(attrs)) != len(attrs) else []
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, (tag, self.stack)

    def handle_data(self, data):
        if self.stack and self.stack[-1] != 'style':
            self.text += data

    def having(self, css):
        return [a for _, a in self.elements if css in (a['class'] if 'class' in a else '').split()]


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 is <|im_end|>, 257 is unused."""

    def token_bytes(self):
        return [bytes([i]) for i in range(256)] + [b'', b'']

    def decode(self, ids, *, show_special=False):
        return '<|im_end|>' if show_special and ids == [256] else ''


def small_rollout():
    """2 episodes of at most 2 turns: prompt 'é', answer 'é' byte by byte and an end; prompt 'h'."""
    tokens = np.array([[0xC3, 0xA9, 0xC3, 0xA9, 256, 104, 0], [104, 257, 0, 0, 0, 0, 0]])
    real = np.array([[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0]], bool)
    acted = np.array([[0, 0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0]], bool)
    fields = {
        'tokens': tokens,
        'logprobs': np.where(acted, np.float32(-0.1), 0).astype(np.float32),
        'attention_mask': real,
        'action_mask': acted,
        'turn': np.array([[0, 0, 0, 0, 0, 1, -1], [0, 0, -1, -1, -1, -1, -1]]),
        'begin': np.array([[0, 5], [0, 0]]),
        'part': np.zeros((2, 2), np.int32),
        'trial': np.zeros((2, 2), np.int32),
        'anchor': np.zeros((2, 2), np.uint32),
        'rewards': np.array([[-0.1, 1.0], [0, 0]], np.float32),
        'penalties': np.array([[0, 0], [-0.1, 0]], np.float32),
        'turn_stop': np.array([[TurnStop.EOS, 0], [TurnStop.LENGTH, 0]]),
        'valid': np.array([[1, 0], [0, 0]], bool),
        'num_actions': np.array([[2, 0], [0, 0]]),
        'actions': np.array([[[1, 0], [-1, -1]], [[-1, -1], [-1, -1]]]),
        'num_turns': np.array([1, 1]),
        'episode_stop': np.array([EpisodeStop.TERMINATED, EpisodeStop.TOKEN_BUDGET]),
        'success': np.array([True, False]),
        'level': np.array([3, 3]),
    }
    return Rollout(**fields)


def small_document(**kwargs):
    extras = {'ratio': np.full((2, 7), 1.5), 'advantages': np.full((2, 7), np.inf)}
    grids = [[[['player']], [['goal']]], [[['player']]]]
    return document_of(small_rollout(), grids=grids, extras=extras, **kwargs)


def document_of(rollout, names=('Left', 'Down'), **kwargs):
    document = documents.of_rollout(rollout, ByteTokenizer(), 'lake', names, **kwargs)
    documents.check(document)
    return document


def test_a_rollout_becomes_a_document_by_hand():
    document = small_document(group_size=2, title='step 1')
    first, second = document['episodes']
    assert (first['level'], first['group'], first['return']) == (3, 0, 0.9)
    assert first['episode_stop'] == 'terminated' and second['episode_stop'] == 'token_budget'
    assert first['turns'] == [
        {
            'index': 0,
            'stop': 'eos',
            'valid': True,
            'reward': -0.1,
            'penalty': 0.0,
            'actions': ['Down', 'Left'],
            'grid': [['player']],
        }
    ]
    assert first['final_grid'] == [['goal']] and second['final_grid'] is None
    texts = [entry['s'] for entry in first['tokens']]
    # The prompt's two bytes are one character; sampled tokens are separate, broken or not.
    assert texts == ['', 'é', r'\xc3', r'\xa9', '<|im_end|>', 'h']
    assert [entry['s'] for entry in second['tokens']] == ['h', '[257]']
    assert [entry['k'] for entry in first['tokens']] == list('ppaaap')
    token = {'s': r'\xc3', 'turn': 0, 'k': 'a', 'lp': -0.1, 'ratio': 1.5, 'adv': 'inf'}
    assert first['tokens'][2] == token
    assert first['tokens'][0]['lp'] is None and first['tokens'][0]['adv'] is None
    # -0.1 + 1.0 and -0.1; one turn each, the second cut at its length and out of tokens.
    assert document['totals'].pop('return') == pytest.approx(0.4)
    ends = [document['totals'].pop(f'success_{end}') for end in ('low', 'high')]
    # Both have one level: Wilson's interval for one episode. z^2 = 3.841459, margin
    # z sqrt(.25 + z^2 / 4) / (1 + z^2) = 0.445379
    np.testing.assert_allclose(ends, (0.054621, 0.945379), atol=1e-6)
    counts = {'episodes': 2, 'faulty': 0, 'solved': 1, 'turns': 2, 'invalid': 1, 'truncated': 1}
    assert document['totals'] == counts
    (both,) = document['groups']
    assert (both['return'], both['return_std']) == pytest.approx((0.4, 0.5**0.5))
    assert (both['sampled'], both['advantages']) == (2.0, None)  # 3 and 1 tokens; none is finite


def test_the_interval_on_a_page_treats_levels_not_episodes_as_independent():
    """Previously it was Wilson's over all episodes, narrower than the one in the terminal."""
    document = small_document()
    assert '95 % interval 5.5 to 94.5' in render_page(document)
    document['totals']['success_low'] = 'much'
    with pytest.raises(ValueError, match='success_low'):
        documents.check(document)


def test_a_turn_whose_world_does_not_report_validity_has_no_badge():
    """Previously it was marked valid next to "No such action", with 0 invalid answers."""
    doubtful = small_rollout().replace(judged=np.array([[False, False], [True, False]]))
    document = document_of(doubtful, group_size=2)
    assert [episode['turns'][0]['valid'] for episode in document['episodes']] == [None, False]
    assert document['totals']['invalid'] is None
    text = Page(render_page(document)).text
    assert 'invalid answers' not in text and text.count('invalid answer') == 2  # filter, badge
    known = Page(render_page(small_document(group_size=2))).text
    assert 'invalid answers' in known


def test_a_faulty_episode_only_counts_as_faulty():
    faulty = small_rollout().replace(
        episode_stop=np.array([EpisodeStop.ENV_ERROR, EpisodeStop.TOKEN_BUDGET])
    )
    document = document_of(faulty, group_size=2)
    totals, group_of_two = document['totals'], document['groups'][0]
    assert [totals[name] for name in ('faulty', 'solved', 'return', 'turns')] == [1, 0, -0.1, 1]
    assert (group_of_two['faulty'], group_of_two['return_std']) == (1, None)
    none = faulty.replace(episode_stop=np.full(2, EpisodeStop.ENV_ERROR))
    document = document_of(none, group_size=2)
    text = Page(render_page(document)).text
    assert document['totals']['return'] == 'nan' and '0 of 0' in text
    assert '0.0 %' not in text and 'interval' not in text  # nothing was measured


def test_replies_of_worlds_on_hosts_match_the_log():
    rollout = small_rollout().replace(begin=np.array([[1, 5], [1, 0]]))
    line = {'turn': 0, 'seconds': 0.5, 'tries': 1, 'fault': '', 'observation': 'shown', 'item': 7}
    end = line | {'turn': 1, 'seconds': 2.5, 'tries': 3}
    long = end | {'observation': 'x' * (documents.MAX_REPLY_CHARS + 5)}

    def of(*replies, **more):
        return document_of(rollout, None, replies=replies, **more)

    document = of([line, end], [line, long])
    # Reply 1 opens a prompt in the first episode; in the second it ends the episode.
    texts = [[reply['text'] for reply in episode['replies']] for episode in document['episodes']]
    assert texts[0] == ['', ''] and texts[1][0] == ''
    assert texts[1][1] == 'x' * documents.MAX_REPLY_CHARS + ' [... 5 more characters]'
    second_reply = document['episodes'][0]['replies'][1]
    assert second_reply == {'turn': 1, 'seconds': 2.5, 'tries': 3, 'fault': '', 'text': ''}
    figures = {'replies': 4, 'seconds': 1.5, 'slowest': 2.5, 'retries': 4, 'faults': 0}
    assert document['worlds'] == figures and small_document()['worlds'] is None
    # Every second episode is included, but the figures cover all
    some = of([line], [end | {'fault': 'lost'}], every=2)
    assert len(some['episodes']) == 1 and some['worlds']['faults'] == 1
    # If one reply ends a trial and another starts the next, the prompt contains the second
    document = of([line, end | {'observation': 'lost'}, end], [line])
    assert [reply['text'] for reply in document['episodes'][0]['replies']] == ['', 'lost', '']


def test_a_written_turn_names_its_part_and_takes_no_action():
    rollout = small_rollout().replace(
        part=np.array([[PLAN, 0], [0, 0]]), actions=np.full((2, 2, 2), -1)
    )
    for names in (['Left', 'Down'], None):
        document = document_of(rollout, names)
        first, second = (episode['turns'][0] for episode in document['episodes'])
        assert (first['part'], first['actions']) == ('plan', []) and 'part' not in second


def test_pages_of_a_run_link_to_their_neighbours(tmp_path):
    for name in ('step_000000', 'step_000050', 'step_000100', 'evaluation_test'):
        documents.write(tmp_path / f'{name}.json', small_document(title=name))
        page_html.write(tmp_path / f'{name}.html', small_document(title=name))
        page_html.link_before(tmp_path / f'{name}.html')
    (tmp_path / 'odd name"<.html').write_text('')
    page_html.write(tmp_path / 'evaluation_test.html', small_document())

    def targets(name):
        page = Page((tmp_path / f'{name}.html').read_text(encoding='utf-8'))
        hrefs = [a['href'] for tag, a in page.elements if tag == 'a' and a['href'][0] == '.']
        assert all((tmp_path / href).is_file() for href in hrefs)
        return hrefs

    assert targets('step_000000') == ['./step_000050.html']  # rendered again when 50 was written
    assert targets('step_000050') == ['./step_000000.html', './step_000100.html']
    assert targets('step_000100') == ['./step_000050.html']
    assert targets('evaluation_test') == ['./step_000100.html']
    assert '← step 0' in (tmp_path / 'step_000050.html').read_text(encoding='utf-8')
    page_html.write(tmp_path / 'step_000100.html', small_document())
    assert targets('step_000100')[1:] == ['./evaluation_test.html']
