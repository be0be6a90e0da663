"""The rollout page in a real browser: nothing is missing or refused, and its buttons work."""

import contextlib

import pytest
from browser import Tab, needs_chromium
from test_view import HOSTILE, document, episode, group, prompt, reply, token, turn

from agentrl_jax.envs.hosts.web import chromium
from agentrl_jax.records import page_html

pytestmark = needs_chromium
EPISODES = [
    episode(row=0, group=0, level=7, tokens=[*prompt('go'), token('Up', lp=-9.0, adv=1.0)]),
    episode(
        row=1,
        group=0,
        success=False,
        turns=[turn(valid=False), turn(1)],
        tokens=[*prompt('go'), token('jump', adv=-1.0), *prompt('no'), token('Left', turn=1)],
    ),
    episode(row=2, group=1, success=False, tokens=[*prompt('go'), token('Down', adv=0.1)] * 3),
    episode(
        row=3, group=1, success=False, episode_stop='env_error', replies=[reply(0, fault='gone')]
    ),
]
GROUPS = [group(0, solved=1, **{'return': 0.1}), group(1, solved=0, **{'return': 0.9})]


@pytest.fixture(scope='module')
def browser():
    with chromium.browser() as found:
        yield found


@pytest.fixture
def tab(browser, tmp_path):
    with contextlib.closing(opened(browser, tmp_path, document(*EPISODES, groups=GROUPS))) as made:
        yield made


def opened(browser, folder, made):
    page_html.write(folder / 'step_000000.html', made)
    page_html.write(folder / 'step_000050.html', made)
    return Tab(browser, (folder / 'step_000050.html').as_uri())


def test_the_page_shows_its_turns_and_nothing_fails(tab):
    assert tab.faults == []
    assert tab.seen('.episode') == 4 and tab.seen('.cell') == 4
    assert tab.seen('.turn') == 2  # the first episode of each group is open
    assert 'Up' in tab.text('#g0') and '4 of 4' not in tab.text()
    tab.click('.episode:has(#e1) > summary')
    tab.wait("document.querySelectorAll('.episode[open]').length === 3")
    assert tab.seen('.turn') == 4 and 'jump' in tab.text('#g0')


def test_its_filters_hide_what_they_say(tab):
    for button, left in (
        ('#only-solved', 1),
        ('#only-failed', 3),
        ('#only-all', 4),
        ('#only-invalid', 1),
    ):
        tab.click(button)
        assert (tab.seen('.episode'), tab.seen('.cell')) == (left, left), button
    tab.click('#only-invalid')
    tab.click('#only-faulty')
    assert tab.seen('.episode') == 1 and tab.seen('.group') == 1 and tab.faults == []


def test_its_order_and_colours_change(tab):
    def first_group():
        return tab.evaluate(
            "[...document.querySelectorAll('.group')].sort((a, b) => "
            'a.getBoundingClientRect().top - b.getBoundingClientRect().top)[0].id'
        )

    def colour(word):
        return tab.evaluate(
            f"getComputedStyle([...document.querySelectorAll('.t')].find((x) => "
            f"x.textContent === '{word}')).backgroundColor"
        )

    assert first_group() == 'g0'
    tab.click('#sort-r')
    assert first_group() == 'g1'
    tab.click('#sort-reversed')
    assert first_group() == 'g0'
    tab.click('#heat-logprob')
    by_probability = colour('Up')
    tab.click('#heat-advantage')
    assert colour('Up') != by_probability and tab.seen('.scale-advantage') == 1
    pages = {}
    for theme in ('light', 'dark'):
        tab.click(f'#theme-{theme}')
        pages[theme] = tab.evaluate('getComputedStyle(document.body).backgroundColor')
    assert pages['light'] != pages['dark'] and tab.faults == []


def test_its_links_lead_to_episodes_and_to_the_page_before(tab):
    tab.click('.cell[href="#e2"]')
    assert tab.evaluate('location.hash') == '#e2'
    tab.click('.top nav a')
    tab.wait("location.pathname.endsWith('step_000000.html') && document.readyState === 'complete'")
    assert tab.seen('.episode') == 4 and tab.faults == []


def test_hostile_text_stays_text_in_a_browser(browser, tmp_path):
    tokens = [token(text) for text in HOSTILE]
    hostile = document(episode(row=0, tokens=tokens), title=HOSTILE[0], env=HOSTILE[1])
    with contextlib.closing(opened(browser, tmp_path, hostile)) as tab:
        assert tab.faults == [] and tab.seen('.turn') == 1 and tab.seen('img, script') == 0
        assert '<script>alert(1)</script>' in tab.text('.turn')
        assert tab.evaluate('document.scripts.length') == 0
