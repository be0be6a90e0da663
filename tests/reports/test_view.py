import html.parser
import re

import pytest
from golden_text import assert_golden

from agentrl_jax.records.page_episode import flags_of
from agentrl_jax.records.page_html import MAX_TOKENS, render_page

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
        'row': 12,
        'level': 7,
        'group': 2,
        'return': 10.9,
        'success': True,
        'episode_stop': 'terminated',
        'turns': [turn()],
        'replies': [],
        'final_grid': None,
        'tokens': [token('see', k='p', lp=None, ratio=None, adv=None), token()],
    }
    return entry | changes


def reply(turn=1, **changes):
    """What a world on a host said."""
    return {'turn': turn, 'seconds': 0.25, 'tries': 1, 'fault': '', 'text': ''} | changes


def group(number=2, **changes):
    entry = {
        'group': number,
        'level': 7,
        'episodes': 4,
        'faulty': 0,
        'solved': 1,
        'return': 0.25,
        'return_std': 0.5,
        'turns': 1.5,
        'sampled': 11.0,
        'advantages': 1.5,
    }
    return entry | changes


TOTALS = {
    'episodes': 4,
    'faulty': 1,
    'solved': 2,
    'return': 0.5,
    'turns': 6,
    'invalid': 1,
    'truncated': 1,
}


def document(*episodes, **changes):
    made = {
        'version': 3,
        'title': 'T',
        'env': 'sokoban',
        'about': {'model': 'M'},
        'every': 1,
        'totals': TOTALS,
        'worlds': None,
        'groups': [group()],
        'episodes': list(episodes),
    }
    return made | changes


def test_the_page_has_no_script_loads_nothing_and_says_so():
    links = {'step 1': 'step_000001.html'}
    text = render_page(document(episode(), episode(row=13)), links=links)
    page = Page(text)
    assert {'#e12', '#e13', '#g2', './step_000001.html'} <= {
        a['href'] for _, a in page.elements if 'href' in a
    }
    tags = {tag for tag, _ in page.elements}
    assert not tags & {'script', 'img', 'link', 'iframe', 'object', 'base', 'svg'}
    policy = next(a['content'] for _, a in page.elements if 'http-equiv' in a)
    assert "default-src 'none'" in policy and 'script-src' not in policy and 'http' not in policy
    assert 'url(' not in text and '@import' not in text and '//' not in text.replace('-//', '')
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith('on')]
        assert not {'src', 'action', 'srcset', 'ping'} & attributes.keys()
        # Links lead to other places of the page or to files beside it.
        assert re.fullmatch(r'#(e|g)\d+|#overview|\./[\w.]+\.html', attributes.get('href', '#e1'))


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
            about={'model': text},
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


def prompt(*texts):
    return [token(text, k='p', lp=None, ratio=None, adv=None) for text in texts]


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


def test_documents_that_do_not_fit_are_refused_with_the_reason():
    for wrong, reason in (
        ([], 'version is missing'),
        ({'version': 2}, 'version 2; this code reads 3'),
        (document(episode(), env=None), 'env of the document must be a text'),
        (document(episode(), about={'model': None}), "'model' in about is no text"),
        (document(episode(), totals={}), 'totals lacks episodes'),
        (document(episode(), worlds={}), 'worlds lacks replies'),
        (document(episode(), worlds=3), 'worlds of the document must be an object, or null'),
        (document(episode(replies=[reply(tries=0.5)])), 'tries of a reply of episode 0 must be a'),
        (document(episode(), groups=[group(level='x')]), 'level of group 0 must be a whole number'),
        (document({}), 'episode 0 lacks row'),
        (document(episode(turns=None)), 'turns of episode 0 must be a list'),
        (document(episode(success=1)), 'success of episode 0 must be true or false'),
        (document(episode(level=10**30)), 'level of episode 0 must be a whole number'),
        (document(episode(turns=[turn(grid=[3])])), 'grid of a turn of episode 0 must be rows of'),
        (document(episode(turns=[turn(actions='Up')])), 'actions of a turn of episode 0 must be'),
        (document(episode(tokens=[token(lp='low')])), 'lp of a token of episode 0 must be a num'),
        (document(episode(turns=[{'index': 0}])), 'a turn of episode 0 lacks stop'),
        (document(episode(), episode(tokens=[3])), 'a token of episode 1 lacks s'),
    ):
        with pytest.raises(ValueError, match=reason):
            render_page(wrong)


def test_a_page_is_bounded_and_says_of_how_many_episodes_its_head_is():
    """It was counted from the episodes on the page: 64 of 256, and nothing said so."""
    totals = TOTALS | {'episodes': 256, 'faulty': 6, 'solved': 50, 'turns': 500, 'invalid': 125}
    made = document(episode(), episode(), every=128, totals=totals)
    text = Page(render_page(made)).text
    assert '20.0 %' in text and '50 of 250' in text and '125 of 500 turns' in text
    assert 'of all 256 episodes; 2 of them are shown below: every 128th. 254 are left out.' in text
    text = Page(render_page(made, max_episodes=1)).text
    assert '1 of them are shown below: every 128th, of these the first 1. 255 are left out' in text
    for n, ordinal in ((2, '2nd'), (3, '3rd'), (11, '11th'), (21, '21st')):
        assert f'every {ordinal}.' in render_page(document(episode(), every=n, totals=totals))
    long = episode(tokens=[token()] * (MAX_TOKENS // 2 + 1))
    assert render_page(document(long, long)).count('class="episode ') == 1


WORLDS = {'replies': 3, 'seconds': 0.5, 'slowest': 4.25, 'retries': 2, 'faults': 1}
HEARD = prompt('heard')[0] | {'turn': 1}
BROKEN = reply(1, tries=3, fault='TimeoutError: no reply \x1b[31m<script>')
PAGES = {
    'what the filters look at, and a start that is shown once': document(
        episode(row=12),
        episode(row=13, success=False, turns=[turn(valid=False)]),
        episode(row=14, success=False, episode_stop='token_budget', turns=[turn(valid=None)]),
        episode(row=15, turns=[turn(), turn(1, stop='length')], final_grid=[['player on goal']]),
        episode(row=16, group=3, success=False, episode_stop='env_error', turns=[], tokens=[]),
        totals=TOTALS | {'episodes': 5},
        about={'method': 'StarPO-S', 'commit': 'e2cb778b1f2c'},
    ),
    'groups by their order, what was not trained on, advantages that are nowhere': document(
        episode(row=0, group=0, success=False, tokens=[token(adv=-1.0)] * 3),
        episode(row=1, group=0, tokens=[token(adv=1.0)]),
        episode(row=4, group=1, tokens=[token(adv='nan')] * 2),
        episode(row=5, group=1, tokens=[token(ratio='inf', adv='nan', lp='-inf'), token()]),
        groups=[
            group(0, solved=1, sampled=2.0, advantages=0.5, **{'return': 0.0}),
            group(1, solved=3, sampled=1.0, advantages=None, **{'return': 'nan'}),
        ],
    ),
    'nothing but probabilities; a cell and characters without a sign; no answer': document(
        episode(tokens=[token('a\u202eb\x07c', adv=None, ratio=None), HEARD]),
        totals=TOTALS | {'invalid': None, 'success_low': 0.25, 'success_high': 0.75},
        groups=[],
    ),
    'worlds on hosts, a trial that ended, a plan': document(
        episode(
            turns=[turn(grid=None), turn(1, part='plan', actions=[], penalty=-0.1)],
            tokens=[*prompt('begin'), token('say'), HEARD, token('again', turn=1)],
            replies=[reply(0), reply(1, text='lost'), reply(1, seconds=1.5, tries=3)]
            + [reply(2, text='the <b>end</b> is near')],
        ),
        worlds=WORLDS,
    ),
    'worlds that failed in a turn and before the first': document(
        episode(turns=[turn(valid=False)], replies=[reply(0), BROKEN], episode_stop='env_error'),
        episode(
            row=13,
            turns=[],
            tokens=prompt('begin'),
            replies=[reply(0, fault='WorldDown: nobody is there', seconds=0.0)],
            episode_stop='env_error',
        ),
        worlds=WORLDS,
    ),
}


def test_pages_are_the_golden_ones():
    def body(text):  # the style sheet is in the template
        return text.split('<body>')[1].replace('><', '>\n<')

    assert_golden('pages.html', {title: body(render_page(made)) for title, made in PAGES.items()})
    ended = PAGES['worlds that failed in a turn and before the first']['episodes'][0]
    assert not flags_of(ended)['invalid'] and flags_of(ended)['faulty']  # lost, not answered badly
