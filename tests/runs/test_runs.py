"""Full runs in miniature: their files, exact resuming, and commands that use them.

A few configs cover pairs of features. Each is trained once, and every test reads its workdir.
"""

import functools
import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import micro_runs
import ml_collections
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from agentrl_jax import evaluate, export, play, train
from agentrl_jax.machine import checkpoint
from agentrl_jax.measure import collapse, metrics
from agentrl_jax.models import weights
from agentrl_jax.records import report, run_log
from agentrl_jax.rollout import replies
from agentrl_jax.run import loading
from agentrl_jax.run import params as run_params
from agentrl_jax.run.config import effective
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.state import disk_bytes_needed, start_state

CLONED = {'clone.episodes': 32, 'clone.steps': 12}
CLONED_LONGER = {'clone.episodes': 64, 'clone.steps': 40}  # returns that differ
AXES = ('data', 'fsdp', 'tensor')
CRITIC = {
    'filter.keep': 0.5,
    'filter.refill': 1,
    'critic.freeze_attention': True,
    'checkpoint.best': True,
    'eval.samples': 2,
    'env.eval_levels': 12,
    'eval.temperature': 0.5,
    **CLONED,
}
RUNS = {
    'a critic': ('frozen_lake', CRITIC),
    'a critic on a mesh': ('frozen_lake', CRITIC | {f'mesh.{x}': 2 for x in AXES}),
    'a shared backbone': (
        'frozen_lake',
        {
            'critic.share_backbone': True,
            'loss.bootstrap_truncated': True,
            'batch.epochs': 2,
            **CLONED,
        },
    ),
    'adapters': (
        'frozen_lake',
        {
            'algorithm': 'grpo',
            'env.mix': (('frozen_lake', 0.5), ('catch', 0.5)),
            'env.eval_levels': 8,
            'curriculum.rounds': (1, 2),
            'curriculum.stage_steps': 2,
            'rollout.sampler_dtype': 'bfloat16',
            'loss.sampler_correction': 'tis',
            'lora.rank': 2,
            'lora.alpha': 8.0,
            'lora.targets': 'q_proj,v_proj,down_proj',
            'loss.norm': 'none',
            'loss.kl_coef': 0.1,
            'loss.aggregation': 'seq_mean_token_mean',
            'filter.keep': 0.5,
            'batch.widths': 2,
            'batch.prefix_rows': 4,
            **CLONED,
        },
    ),
    'continuations': (
        'library',
        {
            'algorithm': 'vine',
            'env.max_turns': 3,
            'env.max_actions_per_turn': 1,
            'curriculum.rounds': (2, 3),
            'curriculum.stage_steps': 2,
            'batch.shuffle': True,
            'batch.widths': 2,
            'batch.prefix_rows': 2,
            'mesh.data': 2,
            **CLONED_LONGER,
        },
    ),
    'iterations': (
        'frozen_lake',
        {
            'algorithm': 'agent_evol',
            'steps': 4,
            'evol.iteration': 2,
            'evol.base_rows': 8,
            'frozen_lake.success_rate': 1.0,
            'eval.every': 0,
            'eval.temperature': 0.5,
            'log.rollouts_every': 0,
            **CLONED_LONGER,
        },
    ),
    'a world on hosts': (
        'frozen_lake',
        {
            'env.mix': (('frozen_lake', 0.5), ('objects', 0.5)),
            'env.eval_levels': 8,
            'objects.make_object': 'host_worlds:Echo',
            'hosts.instruction': 'Say something.\n',
            'hosts.max_observation': 40,
            'hosts.read_tokens': 16,
            'rollout.max_tokens': 160,
            'algorithm': 'grpo',
            'loss.norm': 'none',
        },
    ),
}
SOAK = {name: pytest.mark.soak for name in RUNS if name != 'a critic'}
each = [pytest.param(name, marks=SOAK.get(name, ())) for name in RUNS]
each_run = pytest.mark.parametrize('name', each)
each_critic = pytest.mark.parametrize('name', each[:2])


def config(name, **changes):
    """Validation shares the program of training, unless a run overrides its settings."""
    world, settings = RUNS[name]
    more = {'checkpoint.every': 1, 'checkpoint.keep': 9}
    more |= {'env.eval_levels': 16, 'eval.temperature': 1.0}
    cfg = micro_runs.plain(world, **more | settings | changes)
    if name == 'adapters':
        cfg.catch = ml_collections.ConfigDict(dict(rows=4, columns=3))
    return effective(cfg)


write_curves = report.write_curves  # quick_runs skips it


class Finished(NamedTuple):
    cfg: Any
    workdir: Path
    rows: list[dict]

    def state(self, step=None):
        return micro_runs.saved_state(self.cfg, self.workdir, step)


def finish(cfg, workdir):
    assert train.train(cfg, str(workdir)) == 0
    return Finished(cfg, workdir, run_log.read_metrics(workdir / run_log.METRICS_FILE))


@pytest.fixture(scope='module')
def finished(tmp_path_factory, quick_runs):
    """name of RUNS -> a run of three steps (four of AgentEvol), one of them with curves."""

    @functools.cache
    def run(name):
        with pytest.MonkeyPatch.context() as patch:
            if name == 'a critic':
                patch.setattr(report, 'write_curves', write_curves)
            return finish(config(name), tmp_path_factory.mktemp('run'))

    return run


@each_run
def test_every_step_writes_a_row_of_finite_documented_metrics(finished, name):
    cfg, _, rows = finished(name)
    validated = {0, cfg.steps} | ({2} if cfg.eval.every else set())
    assert [row['step'] for row in rows] == [*range(cfg.steps + 1)]
    for row in rows:
        known = {re.sub(r'_(frozen_lake|catch|objects|test)/', '/', n) for n in row}
        assert known - {'step', 'time_s'} <= set(metrics.METRICS), row
        unjudged = '/valid_format' if 'hosts' in name else 'none'
        assert all(math.isfinite(row[n]) for n in row if not n.endswith(unjudged)), row
        assert row['perf/recompiles'] == 0 and ('eval/success' in row) == (row['step'] in validated)
    rollouts = np.cumsum([row['filter/collects'] for row in rows[:-1]])
    for row in rows[:-1]:
        assert row['update/skipped'] == 0 and row['policy/grad_norm'] > 0
        assert row['time/step_s'] >= row['time/collect_s'] and row['perf/tokens_per_s'] > 0
        assert (row['time/host_s'] > 0) == (row['step'] > 0)
        # The sampler is the policy of the first mini-batch; it has changed in later ones.
        gap = 0.05 if cfg.rollout.sampler_dtype else 1e-5  # the gap of bfloat16
        if cfg.algorithm != 'agent_evol' or row['step'] == 0:  # then another policy explores
            assert row['sampler/logprob_gap'] <= gap and 1 < row['policy/ratio_max'] < 3
        assert row['progress/episodes'] == 16 * rollouts[row['step']]
        assert row['optim/lr'] == cfg.optim.lr
        assert cfg.algorithm == 'vine' or row['perf/flops_per_s'] > 0
        has_critic = read_config(cfg, None).algorithm.USES_CRITIC and not cfg.critic.share_backbone
        assert ('optim/critic_lr' in row) == has_critic == ('value/grad_norm' in row)
        assert ('value/loss' in row) == (cfg.algorithm == 'ppo')
        assert ('policy/kl_ref' in row) == (cfg.loss.kl_coef > 0)  # in the loss or the reward
        choice = read_config(cfg, None).algorithm.filter
        trained_rows = choice.kept(cfg.rollout.num_groups) * cfg.rollout.group_size
        if cfg.algorithm in ('ppo', 'grpo'):
            assert row['batch/trained_rows'] == trained_rows
        if cfg.filter.refill:  # top_k keeps half of each rollout
            assert row['filter/collects'] == 2
        elif cfg.algorithm in ('ppo', 'grpo'):
            sampled = 16 * row['rollout/response_length']
            assert 0 < row['batch/trained_tokens'] <= sampled + 1e-3
            assert trained_rows < 16 or row['batch/trained_tokens'] == pytest.approx(sampled)
        if cfg.algorithm == 'vine':
            assert row['fork/trained_rows'] > 0 and row['fork/tokens'] > row['fork/played'] > 0
            assert row['batch/trained_rows'] <= 16
        else:
            assert not any(figure.startswith('fork/') for figure in row)
    if cfg.algorithm != 'vine' and not cfg.filter.refill:
        tokens = [16 * row['rollout/response_length'] for row in rows[:-1]]
        assert [row['progress/tokens'] for row in rows] == pytest.approx(
            np.append(np.cumsum(tokens), sum(tokens)), abs=0.1
        )


@each_run
def test_a_run_writes_pages_curves_and_checkpoints(finished, name):
    cfg, workdir, _ = finished(name)
    files = {path.name for path in workdir.iterdir()}
    assert {'metrics.jsonl', 'config.json', 'checkpoints', 'reference.json'} <= files
    restarts = cfg.algorithm == 'agent_evol'
    assert ('reference' in files) == (cfg.loss.kl_coef > 0 or restarts)
    assert (run_params.BASE_FOLDER in files) == (cfg.lora.rank > 0)
    assert ('curves.png' in files) == ('curves.svg' in files) == (name == 'a critic')
    assert checkpoint.read_extra(workdir)['config']['env']['name'] == cfg.env.name
    assert checkpoint.steps(workdir / 'checkpoints') == [*range(cfg.steps + 1)]
    page_steps = (0, 2) if cfg.log.rollouts_every else (cfg.steps - 1,)
    worlds = [f'{world}_' for world in read_config(cfg, None).env.worlds] if cfg.env.mix else ['']
    assert {path.name for path in (workdir / 'rollouts').iterdir()} == {
        f'{world}step_{step:06d}.{kind}'
        for world in worlds
        for step in page_steps
        for kind in ('html', 'json')
    }
    untrained = False
    for world in worlds:
        file = workdir / 'rollouts' / f'{world}step_{page_steps[-1]:06d}.json'
        document = json.loads(file.read_text())
        assert document['env'] == (world[:-1] or cfg.env.name)
        episodes = document['episodes']
        assert len(episodes) == document['totals']['episodes'] == 16 // len(worlds)
        sampled = [x for episode in episodes for x in episode['tokens'] if x['k'] == 'a']
        assert all(token['lp'] <= 0 and token['ratio'] > 0 for token in sampled)
        untrained |= any(token['adv'] == 'nan' for token in sampled)
    if cfg.algorithm in ('ppo', 'grpo'):  # groups the filter dropped have no advantage
        assert untrained == (cfg.filter.keep < 1 and not cfg.filter.refill)
    reference = json.loads((workdir / 'reference.json').read_text())
    assert 'hosts' in name or 0 <= reference['random'] <= reference['oracle'] <= 1


# ---- resuming ------------------------------------------------------------------------------------


@each_run
def test_a_resumed_run_equals_an_uninterrupted_run(finished, name, tmp_path):
    """With adapters it starts with only their base: it was killed before its first checkpoint."""
    cfg, workdir, rows = finished(name)
    if cfg.lora.rank:
        base = run_params.BASE_FOLDER
        shutil.copytree(workdir / base, tmp_path / base)
        finish(config(name, steps=2), tmp_path)
    else:
        shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / 'checkpoints' / str(cfg.steps))
    again = finish(config(name), tmp_path)
    np.testing.assert_equal(*map(micro_runs.without_times, (again.rows, rows)))
    micro_runs.assert_same(again.state(), finished(name).state())
    for page in (workdir / 'rollouts').glob('[!o]*.json'):  # replies of objects have times
        assert (tmp_path / 'rollouts' / page.name).read_bytes() == page.read_bytes()


@each_critic
def test_a_finished_run_trains_no_step_and_its_config_may_not_change(finished, name):
    """The same command again trains no step and keeps the state bit for bit."""
    before = finished(name)
    state = before.state()
    again = finish(before.cfg, before.workdir)
    micro_runs.assert_same(state, again.state())
    assert micro_runs.without_times(again.rows) == micro_runs.without_times(before.rows)
    with pytest.raises(ValueError, match='optim.lr: 0.001 in the checkpoint, 0.002 now'):
        train.train(config(name, **{'optim.lr': 2e-3}), str(before.workdir))


@pytest.mark.soak
def test_a_run_whose_filter_drops_all_groups_ends_with_exit_code_1(
    quick_runs, tmp_path, monkeypatch, capsys
):
    cfg = config('adapters')
    monkeypatch.setattr(collapse, 'starved', lambda rows, limit: f'no {limit}' * (len(rows) == 2))
    assert train.train(cfg, str(tmp_path)) == 1
    assert [row['step'] for row in run_log.read_metrics(tmp_path / run_log.METRICS_FILE)] == [0, 1]
    assert f'step 1: no {cfg.filter.max_empty}' in capsys.readouterr().err
    assert not (tmp_path / run_log.FINISHED_FILE).exists()


# ---- effects of features -------------------------------------------------------------------------


@pytest.mark.soak
def test_a_horizon_grows_and_validation_plays_every_turn(finished):
    cfg, _, rows = finished('adapters')
    assert [row['rollout/horizon'] for row in rows[:-1]] == [1, 1, 2]
    turns = [row['rollout/turns'] for row in rows[:-1]]
    assert max(turns[:2]) <= 1 < turns[2] <= 2
    assert {int(pool.task.turn_limit) for pool in train.build(cfg).pools} == {2}


@pytest.mark.soak
def test_the_policy_moves_away_from_the_reference(finished):
    rows = finished('adapters').rows
    assert rows[1]['policy/kl_ref'] > 0


@pytest.mark.soak
def test_an_iteration_explores_with_the_last_policy_and_learns_from_the_first(finished):
    run = finished('iterations')
    states = [run.state(step) for step in range(5)]
    base = states[0].params
    for state in states[:3]:
        micro_runs.assert_same(base, state.explorer)
    assert not np.array_equal(*(jax.tree.leaves(x)[0] for x in (base, states[2].params)))
    # Step 2 starts the second iteration: the current policy explores.
    for state in states[3:]:
        micro_runs.assert_same(states[2].params, state.explorer)
    # Learning restarted: Adam has counted one step's optimiser steps, (16 + 8) / 8.
    assert [int(jax.tree.leaves(state.opt_state)[0]) for state in states] == [0, 3, 6, 3, 6]
    # Demonstrations are among the trained rows of every step.
    trained = [row['batch/trained_rows'] for row in run.rows[:-1]]
    assert min(trained) >= 8 and 8 < max(trained) <= 24
    # A step that trained only demonstrations is not empty: five such steps ended a run
    assert [row['filter/empty'] for row in run.rows[:-1]] == [0.0] * 4


@each_critic
def test_success_is_in_its_interval_and_below_pass_at_k(finished, name):
    _, workdir, rows = finished(name)
    for row in (rows[0], *rows[2:]):
        low, mid, high = (row[f'eval/success{end}'] for end in ('_low', '', '_high'))
        assert 0 <= low <= mid <= high <= 1 and mid <= row['eval/pass_at_k'] <= 2 * mid + 1e-9
    reference = json.loads((workdir / 'reference.json').read_text())
    assert reference['random'] < reference['oracle']


@each_critic
def test_a_run_can_start_from_the_best_or_the_newest_saved_policy(finished, name):
    cfg, workdir, rows = run = finished(name)
    validated = [row for row in rows if 'eval/success' in row]
    best = max(validated, key=lambda row: (row['eval/success'], -row['step']))
    saved = checkpoint.read_extra(workdir / 'best')
    assert (saved['step'], saved['eval/success']) == (best['step'], best['eval/success'])
    for folder, step in (('best', best['step']), ('', cfg.steps)):
        new_cfg = config(name, **{'model.path': str(workdir / folder), 'clone.episodes': 0})
        micro_runs.assert_same(jax.device_get(train.build(new_cfg).params), run.state(step).params)


@pytest.mark.soak
def test_metrics_of_a_mixture_are_means_of_the_metrics_of_worlds(finished):
    _, workdir, rows = finished('adapters')
    for row in rows[:-1]:
        for name in ('success', 'return', 'turns', 'tokens'):  # worlds have equal episode counts
            lake, catch = row[f'rollout_frozen_lake/{name}'], row[f'rollout_catch/{name}']
            np.testing.assert_allclose(row[f'rollout/{name}'], (lake + catch) / 2, rtol=1e-5)
    both = [rows[-1][f'eval_{name}/success'] for name in ('frozen_lake', 'catch')]
    np.testing.assert_allclose(rows[-1]['eval/success'], np.mean(both))
    reference = json.loads((workdir / run_log.REFERENCE_FILE).read_text(encoding='utf-8'))
    for player in ('random', 'oracle'):
        each = [reference[f'eval_{name}/{player}'] for name in ('frozen_lake', 'catch')]
        np.testing.assert_allclose(reference[player], np.mean(each))
        assert min(each) > 0
    assert reference['eval_catch/oracle'] == 1


@pytest.mark.soak
def test_a_mixture_of_one_world_equals_the_plain_run(finished, tmp_path):
    plain = finished('a shared backbone')
    mixed = finish(config('a shared backbone', **{'env.mix': (('frozen_lake', 1.0),)}), tmp_path)
    micro_runs.assert_same(plain.state(), mixed.state())
    for row, expected in zip(*map(micro_runs.without_times, (mixed.rows, plain.rows)), strict=True):
        np.testing.assert_equal({name: row[name] for name in expected}, expected)
        if 'eval/success' in row:
            assert row['eval_frozen_lake/return'] == row['eval/return']
        if 'rollout/success' in row:
            assert row['rollout_frozen_lake/tokens'] == row['rollout/tokens']


@pytest.mark.soak
def test_a_policy_is_evaluated_on_each_world_and_on_other_worlds(finished, tmp_path):
    """Another environment is compared with its own oracle, and named in the file."""
    cfg, workdir, rows = finished('adapters')
    score = functools.partial(evaluate.evaluate, workdir=str(workdir), out=str(tmp_path), step=None)
    with pytest.raises(ValueError, match='evaluated one by one.* frozen_lake, catch'):
        score(cfg)
    alone = functools.partial(config, 'adapters', **{'env.mix': ()})
    catch = score(alone(**{'env.name': 'catch'}))
    for name in ('success', 'return', 'valid_format'):
        assert catch[f'eval/{name}'] == rows[-1][f'eval_catch/{name}']
    bandit = {'env.name': 'bandit', 'rollout.max_tokens': 224}
    for changes in (bandit, {'env.name': 'catch', 'lora.alpha': 4.0}):
        with pytest.raises(ValueError, match='env.name|lora.alpha'):
            score(alone(**changes))
    assert score(alone(**bandit), transfer=True)['reference/oracle'] == 1.0
    saved = json.loads((tmp_path / 'evaluation_validation.json').read_text())
    rules = [one['settings'].get('rules', {}) for one in (saved, *saved['earlier'])]
    assert rules[0]['env.name'] == 'bandit' and rules[1:] == [{}]
    with pytest.raises(ValueError, match='model.num_layers'):
        score(alone(**bandit, **{'model.num_layers': 3}), transfer=True)


@pytest.mark.soak
def test_the_policy_of_a_run_on_a_mesh_can_be_watched_on_one_device(finished):
    """Watching failed because the mesh of the run has eight devices."""
    cfg, workdir, _ = finished('a critic on a mesh')
    output = io.StringIO()
    options = dict(force_terminal=True, color_system='standard', soft_wrap=True, highlight=False)
    console = Console(file=output, markup=False, **options)
    options = dict(level=1, seed=3, delay=0.0, console=console)
    total, solved = play.watch(read_config(cfg, None), str(workdir), 'validation', **options)
    text = output.getvalue()
    # Up to two turns of six tokens; the first piece is the system message and the first prompt
    assert 2 <= text.count('\x1b[1m') <= 12 and text.startswith('\x1b[2m') and 'system' in text
    assert text.endswith(f'return {total:g}\n')
    assert ('√' in text[text.index('The end') :]) == solved


@pytest.mark.soak
def test_shards_of_one_head_can_end_at_different_steps(finished, tmp_path):
    """Shards of this mesh deadlocked if their loops ended at different steps."""
    _, workdir, _ = finished('a critic on a mesh')
    turns = {'env.max_turns': 4, 'env.max_actions_per_episode': 8, 'rollout.max_tokens': 256}
    result = evaluate.evaluate(
        config('a critic on a mesh', **turns), str(workdir), str(tmp_path), None, transfer=True
    )
    assert result['eval/env_error'] == 0


@pytest.mark.soak
def test_a_world_on_hosts_trains_with_one_on_the_device(finished):
    _, workdir, rows = finished('a world on hosts')
    for row in rows[:-1]:
        assert row['rollout/env_error'] == 0
        lake, echo = row['rollout_frozen_lake/tokens'], row['rollout_objects/tokens']
        np.testing.assert_allclose(row['rollout/tokens'], (lake + echo) / 2, rtol=1e-5)
    assert {'eval_frozen_lake/success', 'eval_objects/success'} <= rows[-1].keys()
    lines = replies.read_log(workdir / 'replies_objects.jsonl')
    trained = {line['stream'] for line in lines if line['split'] == 'train'}
    assert trained == set(range(8, 16)) and len(lines) > len(trained)  # after FrozenLake's
    document = json.loads((workdir / 'rollouts' / 'objects_step_000002.json').read_text())
    assert document['worlds']['replies'] > 0 and document['worlds']['faults'] == 0


# ---- adapters ------------------------------------------------------------------------------------


def base_of(run):
    """(parameters under the adapters, initial parameters)."""
    built = train.build(run.cfg)
    base = run_params.load_base(
        built.config, run.workdir, built.params, checkpoint.read_extra(run.workdir)
    )
    return jax.device_get(base), built.params


@pytest.mark.soak
def test_checkpoints_hold_adapters_and_their_moments_only(finished):
    """Rank 2: q, v and down_proj of 1 layer, [32, 32], [32, 16], [64, 32]."""
    run = finished('adapters')
    state = run.state()
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 3 * 2 * (64 + 48 + 96)
    base, drawn = base_of(run)
    assert checkpoint.state_bytes(base) > 10 * checkpoint.state_bytes(state)
    up = [x['model']['layers_0']['mlp']['up_proj']['kernel'] for x in (base, drawn)]
    assert (up[0] != up[1]).any()  # it was cloned


def test_the_disk_space_needed_excludes_files_that_exist(tmp_path):
    changes = {'lora.rank': 2, 'loss.kl_coef': 0.0, 'clone.episodes': 0, 'algorithm': 'grpo'}

    def needed(**more):
        run = train.build(micro_runs.plain('frozen_lake', **changes | more))
        state = jax.eval_shape(functools.partial(start_state, run), run.params)
        sizes = (state, state.params, run.params)
        return disk_bytes_needed(run, tmp_path), *map(checkpoint.state_bytes, sizes)

    need, state, adapters, base = needed(**{'checkpoint.keep': 2})
    assert need == 3 * state + base
    assert needed(**{'checkpoint.keep': 2, 'checkpoint.best': True})[0] == need + 2 * adapters
    assert needed(**{'checkpoint.keep': 2, 'loss.kl_coef': 0.1})[0] == need + adapters
    (tmp_path / run_params.BASE_FOLDER).mkdir()
    (tmp_path / run_params.BASE_FOLDER / 'arrays').write_bytes(bytes(base))  # an existing base
    assert needed(**{'checkpoint.keep': 2})[0] == 3 * state


@pytest.mark.soak
def test_a_run_without_its_base_or_with_another_is_rejected(finished, tmp_path):
    cfg, workdir, _ = finished('adapters')
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match='holds the parameters of another run'):
        run_params.save_base(read_config(cfg, None), tmp_path, train.build(cfg).params)
    shutil.rmtree(tmp_path / run_params.BASE_FOLDER)
    with pytest.raises(FileNotFoundError, match='base'):
        train.train(cfg, str(tmp_path))


def export_to(out, cfg, workdir, part):
    return export.export_checkpoint(
        cfg, str(workdir), str(out), step=None, dtype='float32', part=part
    )


@pytest.fixture(scope='module')
def exported(finished, tmp_path_factory):
    """Exported folder of each part."""
    cfg, workdir, _ = finished('adapters')
    out = tmp_path_factory.mktemp('exported')
    return {
        part: export_to(out / part, cfg, workdir, part) for part in ('policy', 'adapter', 'base')
    }


@pytest.mark.soak
def test_the_exported_policy_is_the_base_plus_the_adapter(exported):
    """W + alpha / rank B A with alpha 8, rank 2, in the files' layout: W [out, in].

    Names, shapes and settings: huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    policy, base = (load_file(exported[part] / weights.SINGLE) for part in ('policy', 'base'))
    adapter = load_file(exported['adapter'] / 'adapter_model.safetensors')
    layer = 'base_model.model.model.layers.0'
    assert {name: array.shape for name, array in adapter.items()} == {
        f'{layer}.self_attn.q_proj.lora_A.weight': (2, 32),
        f'{layer}.self_attn.q_proj.lora_B.weight': (32, 2),
        f'{layer}.self_attn.v_proj.lora_A.weight': (2, 32),
        f'{layer}.self_attn.v_proj.lora_B.weight': (16, 2),
        f'{layer}.mlp.down_proj.lora_A.weight': (2, 64),
        f'{layer}.mlp.down_proj.lora_B.weight': (32, 2),
    }
    assert policy.keys() == base.keys()
    for name, kernel in base.items():
        where = f'base_model.model.{name.removesuffix(".weight")}'
        if f'{where}.lora_A.weight' in adapter:
            a, b = (np.float64(adapter[f'{where}.lora_{x}.weight']) for x in 'AB')
            assert b.any()
            np.testing.assert_allclose(policy[name], kernel + 4.0 * b @ a, atol=1e-6)
        else:
            np.testing.assert_array_equal(policy[name], kernel)
    settings = json.loads((exported['adapter'] / 'adapter_config.json').read_text())
    assert settings['peft_type'] == 'LORA' and settings['task_type'] == 'CAUSAL_LM'
    assert (settings['r'], settings['lora_alpha']) == (2, 8.0)
    assert settings['target_modules'] == ['q_proj', 'v_proj', 'down_proj']
    assert settings['base_model_name_or_path'] is None  # the base was cloned (see --part=base)
    cards = {part: (exported[part] / 'README.md').read_text() for part in exported}
    assert 'eval/success' in cards['policy'] and 'eval/success' in cards['adapter']


@pytest.mark.soak
def test_peft_loads_the_adapter(exported):
    peft = pytest.importorskip('peft')
    import torch
    import transformers

    tokens = torch.arange(24).reshape(2, 12)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected = load(exported['policy'])(tokens).logits
        base = load(exported['base'])
        logits = peft.PeftModel.from_pretrained(base, exported['adapter'])(tokens).logits
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.soak
def test_a_base_of_model_path_is_not_stored_again(exported, tmp_path):
    changes = {
        'model.path': str(exported['policy']),
        'model.tokenizer': str(loading.BUNDLED_TOKENIZER),
        'clone.episodes': 0,
    }
    for steps in (1, 2):
        cfg, workdir, rows = finish(config('adapters', steps=steps, **changes), tmp_path / 'run')
    assert len(rows) == 3 and not (workdir / run_params.BASE_FOLDER).exists()
    out = export_to(tmp_path / 'out', cfg, workdir, 'adapter')
    settings = json.loads((out / 'adapter_config.json').read_text())
    assert settings['base_model_name_or_path'] == str(exported['policy'])
