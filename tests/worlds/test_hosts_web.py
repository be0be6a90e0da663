"""Pages in a browser: their text, actions on them, and blocked addresses."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import fastapi
import host_worlds as hosts
import numpy as np
import pytest
from fastapi.testclient import TestClient
from waiting import until
from web_site import NOTE, ROWS, Forbidden, Site, row, served, write_rows

from agentrl_jax.envs.hosts import server
from agentrl_jax.envs.hosts.answers import READERS
from agentrl_jax.envs.hosts.web import actions, chromium, experts, scoring, tabs, world
from agentrl_jax.envs.hosts.web.miniwob import MiniWoB, MiniWoBEnvironment
from agentrl_jax.envs.hosts.web.world import WebArena, WebEnvironment
from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.envs.splits import SPLITS
from agentrl_jax.rollout import keepers

ROOT = pathlib.Path(__file__).resolve().parents[2]
MISSING = not any(map(shutil.which, chromium.NAMES)) or not importlib.util.find_spec('miniwob')
pytestmark = pytest.mark.skipif(MISSING, reason='apt-get install chromium; pip install miniwob')


@pytest.fixture(scope='module')
def site():
    with (
        served(Forbidden) as other,
        served(Site) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(('127.0.0.1', 0))
        udp.setblocking(False)
        server.other, server.udp = other.server_port, udp.getsockname()[1]
        server.notes, other.hits = [], []
        server.away, server.datagrams = other, udp
        yield server


@pytest.fixture(scope='module')
def shop(site, tmp_path_factory):
    """Return settings of worlds with the tasks ROWS."""
    path, sites = write_rows(tmp_path_factory.mktemp('web'), ROWS, site.server_port)
    return dict(tasks=path, sites=sites)


@pytest.fixture(scope='module')
def arena(shop):
    with contextlib.closing(WebArena(**shop)) as play:
        yield play


def number(text, line):
    """Return the number of the element with a line that starts with this text."""
    lines = [one for one in text.split('\n') if f'] {line}' in one]
    assert lines, f'{line!r} is not in:\n{text}'
    return lines[0].strip().partition(']')[0][1:]


def click(play, text, line):
    return play.step(f'click [{number(text, line)}]').observation


def write(play, text, name, content, enter):
    field = number(text, f'textbox {name!r}')
    return play.step(f'type [{field}] [{content}] [{enter}]').observation


def test_an_answer_from_a_page_of_a_list_is_scored(arena, site):
    text = arena.reset(0)
    assert text.startswith("OBSERVATION:\nTab 0 (current): Shop\n\n[1] heading 'Shop'\n")
    assert text.endswith(
        f'URL: http://127.0.0.1:{site.server_port}/\nOBJECTIVE: What does the lamp cost?\n'
        'PREVIOUS ACTION: none'
    )
    assert 'The end' not in text  # it is below the window
    scrolled = [arena.step(f'scroll [{way}]') for way in 3 * ['down'] + 3 * ['up']]
    assert 'The end' in scrolled[2].observation
    text = scrolled[-1].observation
    text = click(arena, text, "link 'Lamp'")
    assert 'It costs $20.' in text
    reply = arena.step('stop [$20]')
    assert (reply.reward, reply.done, reply.success) == (1.0, True, True)
    assert arena.step('none').done


def test_navigation_by_tabs_addresses_and_history(arena, site):
    text, here = arena.reset(1), f'http://127.0.0.1:{site.server_port}'
    text = click(arena, text, "link 'Desk'")
    assert text.startswith('OBSERVATION:\nTab 0: Shop | Tab 1 (current): Item\n')
    assert arena.step('close_tab').observation.startswith('OBSERVATION:\nTab 0 (current): Shop\n')
    text = write(arena, arena.step('none').observation, 'Search', 'a lamp', '1')
    assert f'URL: {here}/item?of=a+lamp\n' in text  # Enter sent the form
    assert f'URL: {here}/\n' in arena.step('go_back').observation
    assert f'URL: {here}/item?of=a+lamp\n' in arena.step('go_forward').observation
    assert 'Tab 1 (current): ' in arena.step('new_tab').observation
    assert f'URL: {here}/item?of=lamp\n' in arena.step(f'goto [{here}/item?of=lamp]').observation
    for wrong in ('tab_focus [9]', 'click [99]', 'press [Hyper+a]', 'fly [1]'):
        reply = arena.step(wrong)
        assert f'PREVIOUS ACTION: {wrong} (not done: ' in reply.observation and not reply.done
        assert reply.valid is False
    assert arena.step('stop').success
    arena.reset(1)
    assert arena.step('stop').success is False


def test_links_that_open_no_page_cause_no_wait(arena):
    for name in ('Nothing', 'File', 'Down'):
        text = click(arena, arena.reset(0), f"link '{name}'")
        assert 'Tab 0 (current): Shop' in text and arena.visitor.front.late == 0, name
    assert 'The end' in text


def test_a_form_after_a_login_is_sent_and_checked_by_a_program(arena, site):
    site.notes.clear()
    text = click(arena, arena.reset(2), "link 'Notes'")
    assert '/login\n' in text
    text = write(arena, text, 'Name', 'ann', '0')
    text = write(arena, text, 'Word', 'secret', '1')
    assert '/notes\n' in text
    text = write(arena, text, 'Note', 'Buy a lamp', '0')
    text = click(arena, text, "option 'high'")
    assert "combobox 'Priority'" in text and "option 'high' selected: True" in text
    text = click(arena, text, "checkbox 'Sure'")
    assert "checkbox 'Sure' focused: True checked: True" in text
    text = click(arena, text, "button 'Add'")
    assert site.notes == ['Buy a lamp high on'] and 'Buy a lamp high on' in text
    assert arena.step('stop [done]').success
    # The next episode starts without the login, but with the note
    text = arena.reset(2)
    assert '/login\n' in click(arena, text, "link 'Notes'")
    assert arena.step('stop').success is False


def test_a_login_may_come_from_a_file(site, shop, tmp_path):
    site.notes[:] = ['high: buy lamps']
    cookie = {'name': 'user', 'value': 'ann', 'domain': '127.0.0.1', 'path': '/', 'expires': -1}
    state = tmp_path / 'shop_state.json'
    with contextlib.closing(WebArena(**shop, states=str(tmp_path))) as play:
        with pytest.raises(WorldError, match='shop_state.json'):
            play.reset(2)
        state.write_text(json.dumps({'cookies': [cookie | {'expires': 5}], 'origins': []}))
        with pytest.raises(WorldError, match='shop_state.json'):
            play.reset(2)
        state.write_text(json.dumps({'cookies': [cookie], 'origins': []}))
        play.reset(2)
        assert play.step('stop').success


def test_programs_can_call_only_the_functions_of_webarena(arena):
    text = arena.reset(3)
    assert text.startswith('OBSERVATION:\nTab 0 (current): ') and '| Tab 1: Item' in text
    assert arena.step('stop').success
    for wrong in ('func:open("x")', 'func:1 + 1'):
        with pytest.raises(ValueError):
            scoring.Programs(arena.visitor, arena.sites, arena.login).call(wrong)


def test_a_program_that_leads_away_from_the_sites_scores_0_and_ends_the_episode(site, tmp_path):
    """`stop` counted as an invalid action, although the episode was over."""
    away = NOTE | {'url': 'http://elsewhere/', 'required_contents': {'exact_match': ''}}
    task = row(0, 'x', eval_types=['program_html'], program_html=[away])
    path, sites = write_rows(tmp_path, [task], site.server_port)
    with contextlib.closing(WebArena(tasks=path, sites=sites)) as play:
        play.reset(0)
        reply = play.step('stop [done]')
    assert (reply.reward, reply.done, reply.success, reply.valid) == (0.0, True, False, True)


def test_pages_cannot_reach_unlisted_addresses(arena, site):
    arena.reset(0)
    here, there = (f'http://127.0.0.1:{port}' for port in (site.server_port, site.other))
    text = arena.step(f'goto [{here}/tricks]').observation
    for name in ('Away', 'Moved'):
        observation = click(arena, text, f"link '{name}'")
        assert 'The page is empty, or cannot be reached.' in observation
        text = arena.step(f'goto [{here}/tricks]').observation
    assert '/tricks\n' in click(arena, text, "link 'File'")
    for url in (f'{there}/x', 'file:///etc/passwd', 'chrome://version', 'view-source:' + here):
        assert 'none of the sites' in arena.step(f'goto [{url}]').observation
    time.sleep(0.3)  # for requests that may still be on their way
    assert site.away.hits == []
    with pytest.raises(BlockingIOError):
        site.datagrams.recv(100)


# ---- processes -----------------------------------------------------------------------------------


def ended(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    """Return the temporary folder of browsers that start in this test."""
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setattr(tabs, 'SHARED', chromium.Shared(0.0))
    yield tmp_path
    until(lambda: not list(tmp_path.glob('playwright*')))


def test_worlds_share_a_browser_that_outlives_them_for_a_while(arena, miniwob, profiles):
    """Rollouts close their worlds, so each rollout would start a new browser."""
    miniwob.reset(0)
    assert miniwob.visitor.browser is not arena.visitor.browser
    tabs.SHARED.linger_s = 60.0
    with contextlib.closing(MiniWoB()) as one, contextlib.closing(MiniWoB()) as other:
        shared = one.visitor.browser
        assert shared is other.visitor.browser is not miniwob.visitor.browser
        one.reset(0)
        assert other.reset(1) and one.step('click [1]').done
        one.close(), one.close()
    assert not shared.dead and list(profiles.iterdir())
    tabs.SHARED.linger_s = 0.0
    with contextlib.closing(MiniWoB()) as again:
        assert again.visitor.browser is shared and again.reset(0)
    until(lambda: ended(shared.pid))


def test_a_browser_that_dies_fails_its_worlds_and_is_restarted(shop, profiles):
    with contextlib.closing(WebArena(**shop)) as play:
        play.reset(0)
        dead = play.visitor.browser
        os.killpg(dead.pid, signal.SIGKILL)
        with pytest.raises(WorldError):
            play.step('scroll [down]')
        assert dead.dead and 'Shop' in play.reset(0)


@pytest.mark.soak
def test_an_episode_continues_in_another_browser_after_a_kill(profiles):
    pool = keepers.Pool(lambda: MiniWoB(tasks=('click-option',)), lambda text, instruction: text)

    def play(*actions, replies=()):
        pool.submit(keepers.Request(slot=0, stream=0, item=3, actions=actions, replies=replies))
        return pool.done.get(timeout=60)

    first = play()
    chosen = play('click [1]', replies=(first.reply,))
    assert play().reply == first.reply and 'checked: True' in chosen.reply.observation
    (browser,) = tabs.SHARED._running.values()
    os.killpg(browser.pid, signal.SIGKILL)
    failure = play('click [1]', replies=(first.reply,))
    assert failure.reply is None and failure.deterministic and failure.fault
    again = play('click [1]', replies=(first.reply,))
    assert again.reply == chosen.reply and not again.fault
    pool.close()


def test_a_browser_that_hangs_is_replaced(profiles, monkeypatch):
    monkeypatch.setattr(chromium, 'PROBE_S', 0.5)
    hung = tabs.SHARED.take(())
    os.killpg(hung.pid, signal.SIGSTOP)
    with pytest.raises(WorldError):
        hung.run(hung._session.send('Browser.getVersion'), timeout_s=0.5)
    until(lambda: ended(hung.pid), 30)
    fresh = tabs.SHARED.take(())
    assert fresh is not hung and fresh.pages('') == 0
    for browser in (hung, fresh):
        tabs.SHARED.give_back(browser)
        until(lambda pid=browser.pid: ended(pid))
    assert hung._profile.parent.is_dir() and not hung._profile.exists()


def test_a_missing_chromium_is_a_clear_error(monkeypatch):
    monkeypatch.setenv('PATH', '')
    for start in (WebArena.check, chromium.Chromium):
        with pytest.raises(FileNotFoundError, match='apt-get install chromium'):
            start()


def test_the_wait_for_a_page_that_hangs_is_limited_by_the_settings(profiles):
    """It failed after a fixed 30 s."""
    with contextlib.closing(MiniWoB()) as play:
        play.reset(0)
        tab = play.visitor.tab
        tab.evaluate('setTimeout(() => {while (true);}, 0)')
        start = time.monotonic()
        tab.settle(0.2)
        assert time.monotonic() - start < 2 and tab.late == 1


EXPERT_RUN = """
import json, os
from agentrl_jax.envs.hosts.web.miniwob import MiniWoB, Player
play = Player(MiniWoB(), 'in_backticks')
texts = [[play.reset(item), play.step(play.best()).observation] for item in (43, 62, 65)]
print(json.dumps([texts, play.world.visitor.browser.pid]), flush=True)
os.killpg(0, 9)
"""
STARTING = """
import os, threading, time
from agentrl_jax.envs.hosts.web.chromium import Chromium
threading.Thread(target=Chromium).start()
while not any(name.startswith('playwright_') for name in os.listdir(os.environ['TMPDIR'])):
    time.sleep(0.001)
os.killpg(0, 9)
"""


def run_until_killed(code):
    """Return the output of a process that kills its group."""
    more = {'PYTHONHASHSEED': '12345', 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, '-c', code]
    options = dict(env=os.environ | more, stdout=subprocess.PIPE, start_new_session=True, text=True)
    other = subprocess.run(command, **options)
    assert other.returncode == -signal.SIGKILL
    return other.stdout


def test_a_killed_process_leaves_no_browser_and_has_the_same_pages(miniwob, profiles):
    texts, group = json.loads(run_until_killed(EXPERT_RUN))
    assert texts == [play_expert(miniwob, item)[1][:2] for item in (43, 62, 65)]
    until(lambda: ended(group))


def test_a_process_killed_while_its_browser_starts_leaves_none(tmp_path, monkeypatch):
    """Chromium's command line names its profile; the folder itself may stay."""

    def running():
        paths = []
        for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
            with contextlib.suppress(OSError):  # a process that has just ended
                paths += [path] * (str(tmp_path).encode() in path.read_bytes())
        return paths

    monkeypatch.setenv('TMPDIR', str(tmp_path))
    run_until_killed(STARTING)
    until(lambda: not running())


# ---- MiniWoB++ -----------------------------------------------------------------------------------

SOLVED = {expert: name for name, expert in experts.EXPERTS.items()}.values()  # one per expert


def play_expert(play, item):
    """Return the last reply and all texts of an episode of the expert."""
    text = play.reset(item)
    texts = [text]
    for _ in range(20):
        action = experts.best(play.task, play.visitor.seen, play.goal, play.before)
        reply = play.step(action)
        texts.append(reply.observation)
        if reply.done:
            break
    return reply, texts


@pytest.fixture(scope='module')
def miniwob():
    with contextlib.closing(MiniWoB()) as play:
        yield play


def test_experts_solve_more_than_twenty_tasks_of_miniwob(miniwob):
    failed = []
    for number, task in enumerate(miniwob.tasks):
        if task in SOLVED:
            reply, texts = play_expert(miniwob, number + len(miniwob.tasks))
            if not (reply.success and reply.reward == 1.0):
                failed.append((task, texts))
    assert not failed and len(SOLVED) > 20


def test_a_wrong_click_is_penalised_and_ends_the_task(miniwob):
    with pytest.raises(ValueError, match='miniwob.tasks'):
        MiniWoB(tasks=('../x',))
    with contextlib.closing(MiniWoB(tasks=('click-test', 'button-delay'))) as timed:
        assert miniwob.deterministic and not timed.deterministic
    miniwob.reset(miniwob.tasks.index('click-test-2'))
    reply = miniwob.step('click [2]')
    assert (reply.reward, reply.done, reply.success) == (-1.0, True, False)
    miniwob.reset(0)
    assert 'not done' in miniwob.step('goto [http://a]').observation


def test_a_click_reaches_an_element_with_a_covered_centre(miniwob):
    miniwob.reset(6 * len(miniwob.tasks) + miniwob.tasks.index('click-test-2'))
    assert miniwob.step('click [1]').reward == 1.0  # was -1: TWO covers the middle of ONE


def test_keys_work_and_a_removed_element_is_reported(miniwob):
    miniwob.reset(miniwob.tasks.index('enter-text'))
    assert "value: 'ab'" in miniwob.step('type [1] [ab] [0]').observation
    miniwob.step('press [Ctrl+a]')
    assert 'value' not in miniwob.step('press [Backspace]').observation
    assert "value: 'é+'" in miniwob.step('type [1] [é+] [0]').observation
    miniwob.visitor.tab.evaluate('document.querySelector("input").remove()')
    gone = miniwob.step('click [1]')
    assert 'not done, that element' in gone.observation and gone.valid is False


# ---- in environments and servers -----------------------------------------------------------------


def test_the_miniwob_environment_of_a_run_has_items_and_players():
    env = MiniWoBEnvironment(tasks=('click-test-2', 'enter-text'), seeds=20, prompt='short')
    pools = [set(env.item_range(split).tolist()) for split in SPLITS]
    assert set.union(*pools) == set(range(40)) and sum(map(len, pools)) == 40
    generator = np.random.default_rng(0)
    with contextlib.closing(env.player()) as player:
        player.reset(0)
        while not (reply := player.step(player.best())).done:
            pass
        assert reply.success and player.best() == ''
        text = player.reset(1)
        answers = {player.random(generator) for _ in range(50)}
        assert all(actions.read_action(READERS['in_backticks'](one)) for one in answers)
        typed = [one for one in answers if one.startswith('```type')]
        assert typed and all(f'type [{number(text, "textbox")}]' in one for one in typed)
        assert player.step('no action').observation.startswith('Cannot parse action')
        assert len(answers) > 5 and env.accepted == '' and MiniWoBEnvironment().accepted == 'Ok.'


def test_the_web_environment_of_a_run_has_the_tasks_of_its_sites(shop):
    env = WebEnvironment(**shop)
    assert sorted(sum((env.item_range(s).tolist() for s in SPLITS), [])) == [0, 1, 2, 3, 4]
    with contextlib.closing(env.make()) as play:
        play.reset(0)
        assert play.step('It is on the page: ```stop [20]```').success


def test_the_server_supports_the_calls_of_agentgyms_webarena_client(shop):
    app = fastapi.FastAPI()
    with contextlib.closing(world.AgentGymWebArena(**shop)) as play:
        server.add_routes(app, hosts.Kept(play), server.WORDINGS['webarena'])
        client = TestClient(app)

        def post(path, **body):
            return client.post(path, json=body).json()

        assert client.post('/create').json() == {'env_idx': 5}
        reply = post('/reset', env_idx=5, idx=0, seed=0)
        assert reply['sites'] == ['shop'] and reply['object'] == 'What does the lamp cost?'
        assert client.get('/observation?env_idx=5').json() == reply['observation']
        reply = post('/step', env_idx=5, action='Nothing in backticks')
        assert reply['observation'].startswith('Cannot parse action') and not reply['terminated']
        reply = post('/step', env_idx=5, action='The next action is ```stop [20]```')
        assert reply['reward'] == 1.0 and reply['terminated'] and not reply['truncated']
        assert post('/close', env_idx=5) is True
