"""Full runs on hosts: training, validation, pages, resuming, replays."""

import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys

import host_worlds as hosts
import jax
import micro_runs
import numpy as np
import pytest
from rich.console import Console

from agentrl_jax import evaluate, play, train
from agentrl_jax.envs.hosts import textcraft
from agentrl_jax.envs.hosts.search import world as search_world
from agentrl_jax.envs.hosts.world import WorldDown, WorldError
from agentrl_jax.extras.games import base as games
from agentrl_jax.machine import checkpoint, processes
from agentrl_jax.records import run_log
from agentrl_jax.rollout import replies, world_calls
from agentrl_jax.run import loading, state, usage
from agentrl_jax.run.build import build
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.migration import canonical_json, to_metadata


def config(**changes):
    return micro_runs.config('frozen_lake', **(hosts.OBJECTS | changes))


@pytest.fixture(scope='module')
def finished(tmp_path_factory, quick_runs):
    """(config, workdir) of three steps."""
    cfg, workdir = (
        config(**{'checkpoint.every': 1, 'checkpoint.keep': 9}),
        tmp_path_factory.mktemp('run'),
    )
    assert train.train(cfg, str(workdir)) == 0
    return cfg, workdir


def rows_of(workdir):
    return run_log.read_metrics(workdir / run_log.METRICS_FILE)


def test_a_run_trains_validates_counts_logs_and_never_recompiles(finished):
    cfg, workdir = finished
    rows = rows_of(workdir)
    assert [row['step'] for row in rows] == [0, 1, 2, 3] and 'eval/success' in rows[-1]
    for row in rows[:-1]:
        assert row['policy/grad_norm'] > 0 and row['perf/recompiles'] == 0
        assert row['rollout/env_error'] == 0 == row['hosts/faults']
        assert 0 <= row['hosts/idle_slots'] < 1 and row['hosts/reply_s'] > 0
        assert row['sampler/logprob_gap'] < 1e-4
    lines = replies.read_log(workdir / 'replies.jsonl')
    steps = {(row['split'], row['step']) for row in lines}
    assert steps == {('train', n) for n in (0, 1, 2)} | {('validation', n) for n in (0, 2, 3)}
    first = [row for row in lines if (row['split'], row['step']) == ('train', 0)]
    assert {row['stream'] for row in first} == set(range(16))
    echo = hosts.Echo()
    for row in first:
        assert row['turn'] or row['observation'] == echo.reset(row['item'])


@pytest.mark.soak
def test_a_policy_can_be_watched_on_hosts(finished):
    cfg, workdir = finished
    console, read = Console(file=io.StringIO(), width=400), read_config(cfg)
    options = dict(level=2, seed=5, delay=0.0, console=console)
    total, solved = play.watch(read, str(workdir), 'validation', **options)
    text = console.file.getvalue()
    assert 'Say something.' in text and f'return {total:g}' in text
    assert ('not solved: ' in text) == (not solved)


def test_a_page_shows_answers_and_replies(finished):
    _, workdir = finished
    document = json.loads((workdir / 'rollouts' / 'step_000002.json').read_text())
    turn = document['episodes'][0]['turns'][0]
    assert document['env'] == 'objects' and turn['grid'] is None and len(turn['actions']) == 1
    # This environment does not report validity: no metric, and no badge
    assert turn['valid'] is None and document['totals']['invalid'] is None
    for row in run_log.read_metrics(workdir / run_log.METRICS_FILE):
        assert all(np.isnan(row[name]) for name in row if name.endswith('valid_format'))
    page = (workdir / 'rollouts' / 'step_000002.html').read_text()
    assert 'a wall' in page and 'Say something.' in page
    lines = replies.read_log(workdir / 'replies.jsonl')
    lines = [line for line in lines if (line['step'], line['split']) == (2, 'train')]
    assert document['worlds']['replies'] == len(lines) and document['worlds']['faults'] == 0
    assert document['worlds']['slowest'] == max(line['seconds'] for line in lines)
    for episode in document['episodes']:
        turns = len(episode['turns'])
        assert [reply['turn'] for reply in episode['replies']] == list(range(turns + 1))
        last = [line for line in lines if line['observation'] == episode['replies'][-1]['text']]
        assert len(last) >= 1 and episode['replies'][0]['text'] == ''


def test_the_end_of_a_log_is_read_without_the_rest(tmp_path):
    path = tmp_path / 'replies.jsonl'
    assert replies.newest(path, 0) == []
    path.write_text('')
    assert replies.newest(path, 0) == []
    rows = [{'step': step, 'stream': stream} for step in (1, 2, 3) for stream in (0, 1)]
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    path.write_text(f'not JSON\n{text}' + '{"step": 3, "str')  # a partly written line
    assert replies.newest(path, 3) == rows[4:] and replies.newest(path, 2) == rows[2:]
    assert replies.newest(path, 4) == []


def test_a_killed_step_is_repeated_bit_for_bit(finished, tmp_path):
    cfg, workdir = finished
    again = tmp_path / 'again'
    shutil.copytree(workdir, again)
    for step in (2, 3):
        shutil.rmtree(again / 'checkpoints' / str(step))
    assert train.train(cfg, str(again)) == 0
    one, other = (micro_runs.saved_state(cfg, folder) for folder in (workdir, again))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert strip(again / 'replies.jsonl') == strip(workdir / 'replies.jsonl')


@pytest.mark.soak
def test_a_run_that_waits_for_its_worlds_stops_on_a_signal(finished, tmp_path, monkeypatch, capfd):
    """The state is saved, and the run resumes from it when its environments work again."""
    resets = itertools.count()

    class Unreachable(hosts.Echo):
        def reset(self, item):
            if next(resets) >= 40:  # in step 1, after 16 of validation and 16 of step 0
                raise WorldDown('the server is gone')
            return super().reset(item)

    def stop_in_outage(calls, sampling):
        look(calls, sampling)
        if calls.down_since < math.inf:
            os.kill(os.getpid(), signal.SIGTERM)

    look = world_calls.WorldCalls._look_for_outage
    # Only the end of the run saves: a checkpoint before it is due to the signal.
    cfg = config(**{'checkpoint.every': 9, 'checkpoint.keep': 9, 'hosts.outage_s': 10.0})
    with monkeypatch.context() as patch:
        patch.setattr(hosts, 'Echo', Unreachable)
        patch.setattr(world_calls.WorldCalls, '_look_for_outage', stop_in_outage)
        assert train.train(cfg, str(tmp_path)) == processes.EXIT_PREEMPTED
    assert checkpoint.steps(tmp_path / 'checkpoints') == [0, 1]
    assert 'stop requested while all environments are down' in capfd.readouterr().err
    assert train.train(cfg, str(tmp_path)) == 0
    one, other = (micro_runs.saved_state(cfg, folder) for folder in (finished[1], tmp_path))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert strip(tmp_path / 'replies.jsonl') == strip(finished[1] / 'replies.jsonl')


def strip(path):
    """Return the sorted lines of a log, without times."""
    rows = [row | {'seconds': 0} for row in replies.read_log(path)]
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_an_evaluation_is_replayed_without_worlds(finished, tmp_path, monkeypatch):
    """Both the log of the evaluation and the log of the run work."""
    cfg, workdir = finished
    before = evaluate.evaluate(cfg, str(workdir), str(tmp_path / 'one'), None)

    def document(folder):  # the run's environments had other timings
        text = (folder / 'rollouts' / 'evaluation_validation.json').read_text()
        return re.sub(r'"(seconds|slowest)":[0-9.e-]+', '', text)

    first = (tmp_path / 'one' / 'replies_validation.jsonl').read_bytes()
    assert evaluate.evaluate(cfg, str(workdir), str(tmp_path / 'one'), None) == before
    earlier = tmp_path / 'one' / 'replies_validation.earlier_1.jsonl'
    assert earlier.read_bytes() == first  # the second evaluation erased it
    monkeypatch.setattr('agentrl_jax.envs.hosts.objects.Objects.make', lambda self: 1 / 0)
    logs = tmp_path / 'one' / 'replies_validation.jsonl', workdir / 'replies.jsonl'
    for number, log in enumerate(logs):
        out = tmp_path / f'again_{number}'
        assert evaluate.evaluate(cfg, str(workdir), str(out), None, '', str(log)) == before
        assert document(out) == document(tmp_path / 'one')


def test_logs_of_other_rollouts_are_rejected(finished, tmp_path):
    cfg, workdir = finished
    log, other = workdir / 'replies.jsonl', tmp_path / 'other.jsonl'
    with pytest.raises(ValueError, match='has no rollout with step=1, split=validation; it has'):
        evaluate.evaluate(cfg, str(workdir), str(tmp_path), 1, '', str(log))
    rows = replies.read_log(log)

    def write(rows):
        other.write_text(''.join(json.dumps(row) + '\n' for row in rows))

    write([row | {'action': 5 if row['turn'] else 0} for row in rows])
    with pytest.raises(ValueError, match='differs from the log'):
        evaluate.evaluate(cfg, str(workdir), str(tmp_path), None, '', str(other))
    write([rows[0], {'step': 3}])
    with pytest.raises(ValueError, match='line 2: missing or of the wrong type: .*stream'):
        replies.read_log(other)
    other.write_text(json.dumps(rows[0]) + '\n' + json.dumps(rows[1])[:20])
    assert len(replies.read_log(other)) == 1


CASES = {
    'a wider window, GiGPO, adapters and a curriculum': {
        'context.window': 2,
        'algorithm': 'gigpo',
        'lora.rank': 2,
        'curriculum.rounds': (1, 2),
        'curriculum.stage_steps': 1,
    },
    'turn credit, a filter, few slots, a forced opening and stop strings': {
        'algorithm': 'mt_grpo',
        'filter.rule': 'varied',
        'filter.refill': 2,
        'rollout.slots': 8,
        'hosts.answer_prefix': '<think>',
        'hosts.stop': ('up', 'the'),
    },
}


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
@pytest.mark.parametrize('case', CASES)
def test_features_of_device_runs_work_on_hosts(case, tmp_path):
    changes = {'steps': 2, 'log.rollouts_every': 0, 'eval.every': 0} | CASES[case]
    assert train.train(config(**changes), str(tmp_path)) == 0
    rows = rows_of(tmp_path)
    assert rows[1]['policy/grad_norm'] > 0 and np.isfinite(rows[1]['policy/loss'])
    assert rows[1]['perf/recompiles'] == 0 and rows[1]['sampler/logprob_gap'] < 1e-4


def test_episodes_of_failed_worlds_are_not_trained(tmp_path, monkeypatch):
    class Broken(hosts.Echo):
        deterministic = False

        def step(self, action):
            if int(self.said[0]) % 3 == 0:
                raise WorldError('broken')
            return super().step(action)

    monkeypatch.setattr(hosts, 'Echo', Broken)
    changes = {'hosts.deterministic': False, 'steps': 2, 'hosts.min_healthy': 0.0}
    assert train.train(config(**changes), str(tmp_path)) == 0
    rows = rows_of(tmp_path)
    shares = [row['rollout/env_error'] for row in rows[:2]]
    assert any(0 < share < 1 for share in shares)
    for row in rows[:2]:
        assert row['batch/trained_rows'] == 16 * (1 - row['rollout/env_error'])
        assert row['hosts/faults'] == 16 * row['rollout/env_error']
    page = (tmp_path / 'rollouts' / 'step_000001.html').read_text()
    assert page.count('WorldError: broken') == rows[1]['hosts/faults']


def test_a_run_fails_with_the_reason_if_all_worlds_failed(tmp_path, monkeypatch, capfd):
    """The exit code was 0, and after five steps the run reported that returns were equal."""

    class Broken(hosts.Echo):
        def reset(self, item):
            raise WorldError('out of order')

    monkeypatch.setattr(hosts, 'Echo', Broken)
    changes = {'steps': 2, 'hosts.min_healthy': 0.0, 'hosts.tries': 1}
    assert train.train(config(**changes), str(tmp_path)) == 1
    assert 'nothing was trained in 2 steps: all episodes were lost' in capfd.readouterr().err
    assert not (tmp_path / 'finished.json').exists()
    for row in rows_of(tmp_path)[:2]:
        assert row['rollout/env_error'] == 1 and math.isnan(row['rollout/success'])
    assert math.isnan(rows_of(tmp_path)[0]['eval/success'])
    with pytest.raises(ValueError, match='all were lost to environment faults'):
        evaluate.evaluate(config(**changes), str(tmp_path), '', None)
    assert not (tmp_path / 'evaluation_validation.json').exists()


LAKE = {
    'env.name': 'gymnasium',
    'env.max_turns': 3,
    'rollout.max_tokens': 320,
    'hosts.max_observation': 64,
    'gymnasium.id': 'FrozenLake-v1',
    'gymnasium.keywords': '{"is_slippery": false, "render_mode": "ansi"}',
    'gymnasium.actions': ('Left', 'Down', 'Right', 'Up'),
    'hosts.instruction': 'Walk from S to G over the ice. Holes are H.\n',
}


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'gymnasium.id': 'FrozenLak-v1'}, 'cannot create an environment: NameNot.*FrozenLak'),
        ({'gymnasium.actions': ('Up',)}, 'gymnasium.actions has 1 names for 4 actions'),
        (
            {'env.name': 'objects', 'objects.make_object': 'nowhere:Echo'},
            "objects.make_object='nowhere:Echo'",
        ),
    ],
)
def test_an_invalid_world_is_reported_before_a_model_is_built(changes, words, monkeypatch):
    """A mistyped id failed after 160 s of compiling; other ids got the keywords of FrozenLake."""
    monkeypatch.setattr(loading, 'build_model', None)
    with pytest.raises(usage.WrongUsage, match=words) as error:
        build(config(**LAKE | changes))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'changes, missing, words',
    [
        ({'env.name': 'search'}, 'bm25s', 'pip install bm25s==0.3.16'),
        (LAKE, 'gymnasium', 'pip install gymnasium'),
        ({'env.name': 'game_2048', 'env.prompt': 'brief'}, 'pgx', 'pip install pgx'),
    ],
)
def test_a_missing_package_is_reported_before_a_model_is_built(
    changes, missing, words, monkeypatch
):
    """search without bm25s failed with 47 lines after 28 s."""
    monkeypatch.setattr(loading, 'build_model', None)
    for name in [n for n in sys.modules if n.partition('.')[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    for cached in (textcraft.load, search_world.bank, games._pgx_game):
        cached.cache_clear()
    cfg = config(**{'rollout.max_tokens': 4096, 'hosts.max_observation': 64} | changes)
    with cfg.unlocked():
        cfg.game_2048 = {}
    with pytest.raises(usage.WrongUsage, match=words) as error:
        build(cfg)
    assert '\n' not in str(error.value)


SERVED = {
    'env.name': 'sciworld',
    'sciworld.urls': ('http://one:1',),
    'hosts.launch': 0,
    'clone.episodes': 0,
}
SEARCH = {'env.name': 'search', 'search.corpus': 'http://one:1'}


def test_a_run_resumes_with_other_servers_but_not_with_another_world():
    def saved(**changes):
        cfg = config(**SERVED | changes)
        return read_config(cfg), canonical_json(to_metadata(cfg))

    _, old = saved()
    cfg, now = saved(**{'sciworld.urls': ('http://other:2',), 'hosts.call_s': 90.0})
    free = (*state.CHANGEABLE_ON_RESUME, *state.changeable_world_fields(cfg))
    checkpoint.check_config(old, now, may_differ=free)
    with pytest.raises(ValueError, match='sciworld.simplification'):
        other = saved(**{'sciworld.simplification': 'openDoors'})[1]
        checkpoint.check_config(old, other, may_differ=free)
    cfg, now = saved(**SEARCH | {'search.corpus': 'http://other:1'})
    free = (*state.CHANGEABLE_ON_RESUME, *state.changeable_world_fields(cfg))
    checkpoint.check_config(saved(**SEARCH)[1], now, may_differ=free)


def test_servers_of_a_run_must_hold_all_concurrent_episodes():
    craft = {'env.name': 'textcraft', 'hosts.launch': 2, 'clone.episodes': 0}
    needed = read_config(config(**craft), None).max_concurrent_worlds
    assert read_config(config(**craft | {'eval.every': 0}), None).max_concurrent_worlds == needed
    with pytest.raises(ValueError, match=f'hosts.room=.* {needed} episodes'):
        read_config(config(**craft | {'hosts.room': needed // 4}))
    read_config(config(**craft | {'hosts.room': needed // 2}))
    read_config(config(**craft | {'hosts.room': 1, 'rollout.slots': 2}))
    read_config(config(**craft | {'hosts.room': 1, 'textcraft.urls': ('http://one',)}))
