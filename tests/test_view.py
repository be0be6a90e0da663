import html.parser
import re

import pytest

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
    text = render_page(document(*episodes, totals=TOTALS | {'episodes': 5}))
    page = Page(text)
    flags = ('success', 'invalid', 'truncated', 'faulty')
    found = [tuple(int(a[f'data-{name}']) for name in flags) for a in page.having('episode')]
    assert found == [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0), (0, 0, 0, 1)]
    for control in ('only-solved', 'only-failed', 'only-invalid', 'only-truncated', 'only-faulty'):
        assert any(a.get('id') == control for _, a in page.elements)
        assert f':root:has(#{control}:checked) .item:not(' in text
    # The map has the same episodes, and hides the same ones.
    mapped = [tuple(int(a[f'data-{name}']) for name in flags) for a in page.having('cell')]
    assert mapped == found
    # Two of the four healthy ones are solved; the faulty one only has its own count.
    assert '2 of 4' in page.text and 'All 5 episodes' in page.text


def test_the_head_is_of_all_episodes_and_not_of_those_shown():
    """It was counted from the episodes on the page: 64 of 256, and nothing said so."""
    totals = TOTALS | {'episodes': 256, 'faulty': 6, 'solved': 50, 'turns': 500, 'invalid': 125}
    made = document(episode(), episode(), every=128, totals=totals)
    text = Page(render_page(made)).text
    assert '20.0 %' in text and '50 of 250' in text and '125 of 500 turns' in text
    assert 'mean turns2' in text and 'mean return0.5' in text
    assert 'of all 256 episodes; 2 of them are shown below: every 128th. 254 are left out.' in text
    text = Page(render_page(made, max_episodes=1)).text
    assert '1 of them are shown below: every 128th, of these the first 1. 255 are left out' in text


@pytest.mark.parametrize(
    'n, text', [(2, '2nd'), (3, '3rd'), (4, '4th'), (11, '11th'), (21, '21st')]
)
def test_ordinals(n, text):
    totals = TOTALS | {'episodes': 100}
    assert f'every {text}.' in render_page(document(episode(), every=n, totals=totals))


def test_the_head_says_what_was_played():
    about = {'method': 'StarPO-S', 'model': 'Qwen2.5-0.5B', 'commit': 'e2cb778b1f2c', 'seed': '3'}
    text = Page(render_page(document(episode(), about=about))).text
    for label, value in {'world': 'sokoban', **about}.items():
        assert f'{label}{value}' in text


def prompt(*texts):
    return [token(text, k='p', lp=None, ratio=None, adv=None) for text in texts]


def test_the_prompt_of_a_group_is_shown_once():
    start = prompt('common', ' start')
    shared = [
        episode(row=row, tokens=[*start, token('do'), *prompt('next'), token('on', turn=1)])
        for row in (12, 13, 14)
    ]
    page = Page(render_page(document(*shared)))
    assert page.text.count('common start') == 1 and page.text.count('next') == 3
    assert page.text.count('prompt, 2 tokens') == 1
    # Positions of tokens are still those of the episode.
    assert sum('token 2;' in a['title'] for a in page.having('t') if 'title' in a) == 3
    # Alone, or where the prompts differ, every episode has its own.
    assert Page(render_page(document(*shared[:1]))).text.count('common start') == 1
    other = episode(row=15, tokens=[*prompt('common', ' end'), token('do')])
    text = Page(render_page(document(*shared, other))).text
    assert text.count('common start') == 3 and text.count('common end') == 1


def test_a_group_says_what_all_of_its_members_did():
    made = document(episode(), episode(row=13), groups=[group(solved=1, episodes=4)])
    text = Page(render_page(made)).text
    for fact in ('Group 2', 'level 7', '1 of 4 solved', 'return 0.25 ± 0.5', 'turns 1.5'):
        assert fact in text
    assert 'tokens 11' in text and 'advantages 1.5 apart' in text and '2 of 4 shown' in text
    for quiet in (group(advantages=None), group(advantages='nan')):
        assert (
            'not trained on'
            in Page(render_page(document(episode(), episode(row=13), groups=[quiet]))).text
        )


def order(attributes):
    pairs = (pair.split(':') for pair in attributes['style'].split(';'))
    return {name.strip('-'): int(value) for name, value in pairs}


def test_groups_and_episodes_are_sorted_without_a_script():
    """Each carries its place by every key; the style sheet chooses one."""
    episodes = [
        episode(row=0, group=0, success=False, tokens=[token(adv=-1.0)] * 3),
        episode(row=1, group=0, tokens=[token(adv=1.0)]),
        episode(row=4, group=1),
        episode(row=5, group=1),
    ]
    groups = [
        group(0, solved=1, sampled=2.0, advantages=0.5, **{'return': 0.0}),
        group(1, solved=3, sampled=1.0, advantages=None, **{'return': 'nan'}),
    ]
    text = render_page(document(*episodes, groups=groups))
    page = Page(text)
    places = [order(a) for a in page.having('group')]
    assert places == [
        {'n': 0, 's': 1, 'r': 0, 'l': 0, 'a': 0},
        {'n': 1, 's': 0, 'r': 1, 'l': 1, 'a': 1},  # what is not known comes last
    ]
    assert [order(a) for a in page.having('episode')[:2]] == [
        {'n': 0, 's': 1, 'r': 0, 'l': 0, 'a': 1},
        {'n': 1, 's': 0, 'r': 0, 'l': 1, 'a': 0},
    ]
    for letter in 'srla':
        rule = (
            f':root:has(#sort-{letter}:checked) .rank {{ order: calc(var(--sign) * var(--{letter}))'
        )
        assert rule in text
    assert [order(a) for a in page.having('strip')] == places
    ids = [a['id'] for _, a in page.elements if 'id' in a]
    assert len(ids) == len(set(ids)) and {'e0', 'e1', 'e4', 'e5', 'g0', 'g1'} <= set(ids)


def test_without_advantages_nothing_is_sorted_by_them():
    text = render_page(document(episode(tokens=[token(adv=None)])))
    inputs = {a['id']: a for _, a in Page(text).elements if 'id' in a and 'type' in a}
    assert 'disabled' in inputs['sort-a'] and 'disabled' not in inputs['sort-r']


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
    tokens = [token(ratio='inf', adv='nan', lp='-inf'), token()]
    page = Page(render_page(document(episode(tokens=tokens))))
    (span,) = page.having('odd')
    assert 'log p -inf (p 0); ratio inf; advantage +nan' in span['title']


def test_an_episode_that_was_not_trained_on_is_no_broken_one():
    """Its advantages are all nan: every token of it was marked as broken, and as trained."""
    page = Page(render_page(document(episode(tokens=[token(adv='nan')] * 2), episode())))
    assert page.having('odd') == [] and len(page.having('un')) == 2
    assert all('not trained on' in a['title'] for a in page.having('un'))
    assert page.text.count('not trained on') == 1  # a chip


def test_heat_maps_that_were_not_recorded_cannot_be_chosen():
    text = render_page(document(episode(tokens=[token(ratio=None, adv=None)])))
    inputs = {a['id']: a for _, a in Page(text).elements if 'id' in a and 'type' in a}
    assert 'disabled' in inputs['heat-ratio'] and 'disabled' in inputs['heat-advantage']
    assert 'checked' in inputs['heat-logprob'] and 'disabled' not in inputs['heat-mask']


def test_a_page_is_bounded_and_says_what_it_left_out():
    made = document(*[episode()] * 9, totals=TOTALS | {'episodes': 14})
    page = Page(render_page(made, max_episodes=4))
    assert len(page.having('episode')) == 4
    assert '4 of them are shown below: the first 4. 10 are left out.' in page.text
    long = episode(tokens=[token()] * (MAX_TOKENS // 2 + 1))
    page_text = render_page(document(long, episode()))
    assert page_text.count('class="episode ') == 2
    assert render_page(document(long, long)).count('class="episode ') == 1


def test_worlds_are_drawn_cell_by_cell():
    text = render_page(document(episode(final_grid=[['player on target']])))
    page = Page(text)
    cells = [
        a
        for tag, a in page.elements
        if tag == 'span' and 'title' in a and 'token' not in a['title']
    ]
    assert [a['title'] for a in cells] == ['wall', 'player', 'box', 'mystery', 'player on target']
    assert [a['class'] for a in cells] == ['wall', 'player', 'box', '', 'target']


def test_a_prompt_that_was_never_answered_is_still_shown():
    tokens = [token('seen'), token('unanswered', turn=1, k='p', lp=None, ratio=None, adv=None)]
    text = Page(render_page(document(episode(tokens=tokens)))).text
    assert 'Turn 2' in text and 'never answered' in text and 'unanswered' in text


WORLDS = {'replies': 3, 'seconds': 0.5, 'slowest': 4.25, 'retries': 2, 'faults': 1}


def test_worlds_on_hosts_are_told_apart_from_the_policy_and_say_what_they_took():
    tokens = [
        token('begin', k='p', lp=None, ratio=None, adv=None),
        token('say'),
        token('heard', turn=1, k='p', lp=None, ratio=None, adv=None),
        token('again', turn=1),
    ]
    said = [reply(0), reply(1, seconds=1.5, tries=3), reply(2, text='the <b>end</b> is near')]
    played = episode(turns=[turn(), turn(1)], tokens=tokens, replies=said)
    page = Page(render_page(document(played, worlds=WORLDS)))
    for shown in (
        'world 2 s',  # 0.25 + 1.5 + 0.25, in the head of the episode
        'asked again 2 times',
        'began in 0.25 s',
        'prompt, 1 token',
        'world, 1 token, 1.5 s, 3 tries',  # what it said to the first answer
        'policy, 1 token',
        'world, its end, 0.25 sthe <b>end</b> is near',
        '0.5 slowest 4.25',
        '2 times',
    ):
        assert shown in page.text, shown
    assert len(page.having('world')) == 2 and len(page.having('answer')) == 2
    assert 'seconds of a reply' not in render_page(document(episode()))


def test_what_ended_a_trial_is_shown_in_front_of_the_one_that_began_there():
    heard = token('heard', turn=1, k='p', lp=None, ratio=None, adv=None)
    said = [reply(0), reply(1, text='lost'), reply(1, seconds=1.5)]
    tokens = [token('say'), heard, token('again', turn=1)]
    played = episode(turns=[turn(), turn(1)], tokens=tokens, replies=said)
    first, second = Page(render_page(document(played, worlds=WORLDS))).text.split('Turn 2')
    assert 'world, its end, 0.25 slost' in first and 'world, 1 token, 1.5 s' in second


def test_plans_and_reflections_are_folded_and_named():
    tokens = [token('hm'), token('go', turn=1)]
    played = episode(turns=[turn(part='plan', actions=[]), turn(1)], tokens=tokens)
    html = render_page(document(played))
    assert '<summary class="who">plan of the policy, 1 token</summary>' in html
    assert html.count('<details class="msg answer">') == 1
    text = Page(html).text
    assert 'actions: ' not in text.split('Turn 1')[1].split('Turn 2')[0]


def test_a_fault_of_a_world_is_shown_where_it_ended_the_episode():
    broken = reply(1, tries=3, fault='TimeoutError: no reply \x1b[31m<script>')
    turns = [turn(valid=False)]
    ended = episode(turns=turns, replies=[reply(0), broken], episode_stop='env_error')
    page = Page(render_page(document(ended, worlds=WORLDS)))
    turn_1 = page.text.split('Turn 1')[1]
    assert 'faulty world' in turn_1 and 'invalid answer' not in turn_1
    assert (
        'fault of the world, 0.25 s, 3 triesTimeoutError: no reply \\x1b[31m<script>' in page.text
    )
    assert not flags_of(ended)['invalid'] and flags_of(ended)['faulty']
    never = reply(0, fault='WorldDown: nobody is there', seconds=0.0)
    begun = [token('begin', k='p', lp=None, ratio=None, adv=None)]
    lost = episode(turns=[], tokens=begun, replies=[never], episode_stop='env_error')
    assert 'WorldDown: nobody is there' in Page(render_page(document(lost, worlds=WORLDS))).text


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
