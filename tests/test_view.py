import html.parser
import json

import numpy as np
import pytest

from agentrl_jax import view
from agentrl_jax.records.page_html import MAX_TOKENS, check_document, render_page
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

HOSTILE = (
    '<script>alert(1)</script>',
    '</pre></details></body><img src=x onerror=alert(2)>',
    '" onmouseover="alert(3)',
    "' autofocus onfocus='alert(4)",
    '&lt;b&gt; &#60;i&#62; ]]> <!-- <style>*{display:none}</style>',
    'right\u202eto\u2066left\u200bzero\ufeff',
    'control\x00\x07\x1b[31m\x7f\x9b\r',
    'lone \ud800 surrogate \udfff',
    '\u2028\u2029\U000e0041',
    '$title $$ ${episodes} {0} %s',
)
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


def token(s='a', turn=0, k='a', lp=-0.5, ratio=1.1, adv=0.5):
    return {'s': s, 'turn': turn, 'k': k, 'lp': lp, 'ratio': ratio, 'adv': adv}


def turn(index=0, **changes):
    entry = {
        'index': index,
        'stop': 'eos',
        'valid': True,
        'reward': -0.1,
        'penalty': 0.0,
        'actions': ['Up'],
        'grid': [['wall', 'player'], ['box', 'mystery']],
    }
    return entry | changes


def episode(**changes):
    entry = {
        'level': 7,
        'group': 2,
        'return': 10.9,
        'success': True,
        'episode_stop': 'terminated',
        'turns': [turn()],
        'tokens': [token('see', k='p', lp=None, ratio=None, adv=None), token()],
    }
    return entry | changes


def document(*episodes, **changes):
    return {'version': 1, 'title': 'T', 'env': 'sokoban', 'episodes': list(episodes)} | changes


def test_the_page_has_no_script_loads_nothing_and_says_so():
    text = render_page(document(episode()))
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {'script', 'img', 'link', 'iframe', 'object', 'base', 'a', 'svg'}
    policy = next(a['content'] for _, a in page.elements if 'http-equiv' in a)
    assert "default-src 'none'" in policy and 'script-src' not in policy and 'http' not in policy
    assert 'url(' not in text and '@import' not in text and '//' not in text.replace('-//', '')
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith('on')]
        assert not {'src', 'href', 'action', 'srcset'} & attributes.keys()


@pytest.mark.parametrize('text', HOSTILE)
def test_hostile_text_anywhere_is_shown_and_never_markup(text):
    clean = Page(render_page(document(episode())))
    page_text = render_page(
        document(
            episode(
                episode_stop=text,
                turns=[turn(stop=text, actions=[text], grid=[['wall', text], ['box', 'x']])],
                tokens=[token(text, k='p', lp=None, ratio=None, adv=None), token(text)],
            ),
            title=text,
            env=text,
        )
    )
    page_text.encode('utf-8')
    page = Page(page_text)
    assert page.duplicates == []
    # Only the marks for unseen characters are new; nothing that the text asked for.
    tags = [tag for tag, attributes in page.elements if attributes != {'class': 'esc'}]
    assert tags == [tag for tag, _ in clean.elements]
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith('on') or name == 'autofocus']
    seen = [c for c in page_text if not c.isprintable() and c != '\n']
    assert seen == [], seen
    shown = ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    assert page.text.count(shown) >= 4


def test_unseen_characters_are_spelled_out():
    text = Page(render_page(document(episode(tokens=[token('a\u202eb\x07c\ud800')])))).text
    assert r'a\u202eb\x07c\ud800' in text


def test_every_episode_is_there_with_what_the_filters_look_at():
    episodes = [
        episode(),
        episode(success=False, turns=[turn(valid=False)]),
        episode(success=False, episode_stop='token_budget'),
        episode(turns=[turn(), turn(1, stop='length')]),
        episode(success=False, episode_stop='env_error', turns=[]),
    ]
    text = render_page(document(*episodes))
    page = Page(text)
    flags = ('success', 'invalid', 'truncated', 'faulty')
    found = [tuple(int(a[f'data-{name}']) for name in flags) for a in page.having('episode')]
    assert found == [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0), (0, 0, 0, 1)]
    for control in ('only-solved', 'only-failed', 'only-invalid', 'only-truncated', 'only-faulty'):
        assert any(a.get('id') == control for _, a in page.elements)
        assert f':root:has(#{control}:checked) .episode:not(' in text
    # Two of the four healthy ones are solved; the faulty one only has its own count.
    assert '2 of 4' in page.text and '5 episodes' in page.text


def test_tokens_carry_their_numbers_and_a_class_for_each_heat_map():
    tokens = [
        token('x', lp=-0.005, ratio=1.0, adv=2.0),
        token('y', lp=-20.0, ratio=0.5, adv=-1.2),
        token('z', lp=-0.2, ratio=None, adv=None),
    ]
    page = Page(render_page(document(episode(tokens=tokens))))
    spans = [a for a in page.having('t') if 'title' in a]
    # -log p: 0.005 below the first edge, 20 above the last; |log 0.5| = 0.69; |-1.2 / 2| = 0.6.
    assert [a['class'] for a in spans] == ['t l0 rp0 ap4', 't l7 rn4 an3', 't l2']
    assert spans[1]['title'] == 'token 1; log p -20 (p 2.06e-09); ratio 0.5; advantage -1.2'


def test_numbers_that_are_not_finite_stand_out():
    page = Page(render_page(document(episode(tokens=[token(ratio='inf', adv='nan', lp='-inf')]))))
    (span,) = page.having('odd')
    assert 'log p -inf (p 0); ratio inf; advantage +nan' in span['title']


def test_heat_maps_that_were_not_recorded_cannot_be_chosen():
    text = render_page(document(episode(tokens=[token(ratio=None, adv=None)])))
    inputs = {a['id']: a for _, a in Page(text).elements if 'id' in a and 'type' in a}
    assert 'disabled' in inputs['heat-ratio'] and 'disabled' in inputs['heat-advantage']
    assert 'checked' in inputs['heat-logprob'] and 'disabled' not in inputs['heat-mask']


def test_a_page_is_bounded_and_says_what_it_left_out():
    text = render_page(document(*[episode()] * 9, left_out=5), max_episodes=4)
    page = Page(text)
    assert len(page.having('episode')) == 4
    assert '4 episodes; 10 more are left out of this page' in page.text
    long = episode(tokens=[token()] * (MAX_TOKENS // 2 + 1))
    page_text = render_page(document(long, episode()))
    assert page_text.count('class="episode"') == 2
    assert render_page(document(long, long)).count('class="episode"') == 1


def test_worlds_are_drawn_cell_by_cell():
    text = render_page(document(episode(final_grid=[['player on target']])))
    page = Page(text)
    cells = [a for _, a in page.elements if 'title' in a and 'token' not in a['title']]
    assert [a['title'] for a in cells] == ['wall', 'player', 'box', 'mystery', 'player on target']
    assert [a['class'] for a in cells] == ['wall', 'player', 'box', '', 'target']


def test_a_prompt_that_was_never_answered_is_still_shown():
    tokens = [token('seen'), token('unanswered', turn=1, k='p', lp=None, ratio=None, adv=None)]
    text = Page(render_page(document(episode(tokens=tokens)))).text
    assert 'Turn 2' in text and 'never answered' in text and 'unanswered' in text


def test_documents_that_do_not_fit_are_refused_with_the_reason():
    for wrong, reason in (
        ([], 'version is missing'),
        ({'version': 2}, 'version 2'),
        (document(episode(), env=None) | {'episodes': [{}]}, 'episode 0 lacks level'),
        (document(episode(turns=[{'index': 0}])), 'a turn of episode 0 lacks stop'),
        (document(episode(), episode(tokens=[3])), 'a token of episode 1 lacks s'),
    ):
        with pytest.raises(ValueError, match=reason):
            render_page(wrong)


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
        'anchor': np.array([[7, 0], [7, 0]], np.uint32),
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
    return view.episodes_document(
        small_rollout(), ByteTokenizer(), 'lake', ['Left', 'Down'], grids, extras, **kwargs
    )


def test_a_rollout_becomes_a_document_by_hand():
    made = small_document(group_size=2, title='step 1')
    check_document(made)
    first, second = made['episodes']
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
    # The prompt's two bytes are one character; sampled tokens stand alone, broken or not.
    assert texts == ['', 'é', r'\xc3', r'\xa9', '<|im_end|>', 'h']
    assert [entry['s'] for entry in second['tokens']] == ['h', '[257]']
    assert [entry['k'] for entry in first['tokens']] == list('ppaaap')
    assert first['tokens'][2] == {
        's': r'\xc3',
        'turn': 0,
        'k': 'a',
        'lp': -0.1,
        'ratio': 1.5,
        'adv': 'inf',
    }
    assert first['tokens'][0]['lp'] is None and first['tokens'][0]['adv'] is None


def test_a_document_can_be_limited_and_works_without_grids_and_extras():
    made = view.episodes_document(
        small_rollout(), ByteTokenizer(), 'lake', ['Left', 'Down'], limit=1
    )
    assert made['left_out'] == 1 and len(made['episodes']) == 1
    assert made['episodes'][0]['turns'][0]['grid'] is None
    assert made['episodes'][0]['tokens'][2]['ratio'] is None
    assert '1 more are left out' in render_page(made)


def test_the_command_finds_the_last_document_of_a_run_and_writes_one_page(tmp_path, capsys):
    folder = tmp_path / 'rollouts'
    folder.mkdir()
    view.write_document(folder / 'step_000002.json', small_document(title='old'))
    view.write_document(folder / 'step_000010.json', small_document(title='new'))
    view.main([str(tmp_path)])
    page = folder / 'step_000010.html'
    assert capsys.readouterr().out.strip() == str(page)
    assert '<h1>new</h1>' in page.read_text(encoding='utf-8')
    view.main([str(folder / 'step_000002.json'), '--out', str(tmp_path / 'p.html')])
    assert '<h1>old</h1>' in (tmp_path / 'p.html').read_text(encoding='utf-8')
    assert len(list(folder.iterdir())) == 3
    json.loads((folder / 'step_000002.json').read_text(), parse_constant=pytest.fail)


def test_the_command_explains_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / 'half.json').write_text('{"version": 1, "ti')
    for source in (tmp_path, tmp_path / 'none.json', tmp_path / 'half.json'):
        with pytest.raises(SystemExit) as stopped:
            view.main([str(source)])
        assert stopped.value.code == 1
        assert capsys.readouterr().err.startswith('python -m agentrl_jax.view: ')
