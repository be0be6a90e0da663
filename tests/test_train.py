"""Whole runs in miniature: what they write, that they learn, and what they refuse to start."""

import functools
import importlib
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.measure import metrics
from agentrl_jax.records import run_log
from agentrl_jax.rollout.episodes import Episodes, draw_episodes, every_level
from agentrl_jax.run import build as build_module
from agentrl_jax.run import check, derived, mixture, parts, settings
from agentrl_jax.run import params as run_params
from agentrl_jax.run import state as start
from agentrl_jax.run.build import build
from agentrl_jax.run.effective import effective
from agentrl_jax.types import Continuations, Demonstrations, Rollout

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = sorted(p.stem for p in (ROOT / 'configs').glob('*.py') if p.stem != '__init__')
RUNS = {
    'ppo with a critic and a filter': ('frozen_lake', {'filter.keep': 0.5}),
    'ppo on a shared backbone': (
        'frozen_lake',
        {
            'critic.share_backbone': True,
            'loss.reward_on': 'episode',
            'loss.bootstrap_truncated': True,
            'batch.epochs': 2,
        },
    ),
    'grpo with a KL loss that adapts': (
        'sokoban',
        {
            'algorithm': 'grpo',
            'loss.norm': 'none',  # the untrained answer badly, all alike
            'loss.kl_coef': 0.1,
            'loss.kl_target': 0.01,
            'loss.kl_horizon': 100.0,
            'loss.aggregation': 'seq_mean_token_mean',
            'filter.keep': 0.5,
            'batch.microbatch_rows': 8,
        },
    ),
    'grpo with KL in the reward and a horizon that grows': (
        'frozen_lake',
        {
            'algorithm': 'grpo',
            'loss.norm': 'none',  # the untrained answer badly, all alike
            'loss.kl_coef': 0.1,
            'loss.kl_in': 'reward',
            'rollout.sampler_dtype': 'bfloat16',
            'loss.sampler_correction': 'tis',
            'curriculum.rounds': (1, 2),
            'curriculum.stage_steps': 2,
        },
    ),
    'mt_grpo with a tool': (
        'library',
        {
            'algorithm': 'mt_grpo',
            'loss.norm': 'none',
            'env.max_turns': 3,
            'env.max_actions_per_turn': 1,
        },
    ),
}
WITH_CRITIC = ('value/loss', 'value/grad_norm', 'value/clip_frac', 'value/explained_variance')


@pytest.fixture(scope='module')
def finished(tmp_path_factory, shared_programs):
    """name of RUNS -> (config, workdir, rows of metrics.jsonl) of a run of three steps."""

    @functools.cache
    def run(name):
        env, changes = RUNS[name]
        cloned = {'clone.episodes': 32, 'clone.steps': 12} if 'critic' in name else {}
        cfg = micro_runs.config(env, **changes, **cloned)
        workdir = tmp_path_factory.mktemp('run')
        assert train.train(cfg, str(workdir)) == 0
        return cfg, workdir, run_log.read_metrics(workdir / run_log.METRICS_FILE)

    return run


each_run = pytest.mark.parametrize('name', RUNS)


@each_run
def test_every_step_leaves_a_row_of_finite_documented_numbers(finished, name):
    cfg, _, rows = finished(name)
    assert [row['step'] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        unknown = set(row) - {'step', 'time_s'} - set(metrics.METRICS)
        assert not unknown, unknown
        assert all(math.isfinite(value) for value in row.values()), row
        assert row['perf/recompiles'] == 0 and ('eval/success' in row) == (row['step'] in (0, 2, 3))
    for row in rows[:-1]:
        assert row['update/skipped'] == 0 and row['policy/grad_norm'] > 0
        assert row['time/step_s'] >= row['time/collect_s'] and row['perf/tokens_per_s'] > 0
        # The sampler was the policy of the first mini-batch; later ones see it moved.
        gap = 0.05 if cfg.rollout.sampler_dtype else 1e-5  # that of bfloat16
        assert row['sampler/logprob_gap'] <= gap and 1 < row['policy/ratio_max'] < 3
        kept = derived.kept_groups(cfg) * cfg.rollout.group_size
        assert row['batch/trained_rows'] == kept
        per_episode = row['rollout/response_length']
        assert 0 < row['batch/trained_tokens'] <= 16 * per_episode + 1e-3
        if kept == 16:
            assert row['batch/trained_tokens'] == pytest.approx(16 * per_episode)
        assert row['progress/episodes'] == 16 * (row['step'] + 1)
        assert row['optim/lr'] == cfg.optim.lr and row['perf/flops_per_s'] > 0
        own = derived.needs_critic(cfg) and not cfg.critic.share_backbone
        assert ('optim/critic_lr' in row) == own
    tokens = [16 * row['rollout/response_length'] for row in rows[:-1]]
    assert [row['progress/tokens'] for row in rows] == pytest.approx(
        np.append(np.cumsum(tokens), sum(tokens)), abs=0.1
    )


def test_every_documented_metric_is_written_by_some_run(finished):
    written = set().union(*(row for name in RUNS for row in finished(name)[2]))
    written -= {'step', 'time_s'}
    seldom = (
        'collapse/',
        'filter/',
        'alarm/',
        'sampler/',
        'fork/',
        'hosts/',
        'babyai/',
        'search/',
        'agent/',
        'shop/',
        'policy/clip_frac_dual',
        'value/vine_',
        'eval/pass_at_k',
        'eval/solvable_success',
        'eval/exact_match',
        'eval/format',
        'eval/trials',
        'eval/success_',
        'eval/gain',
        'eval/score',
        'perf/flops_share',
        'perf/device_peak_bytes',
    )  # only where their options or worlds are set
    missing = {name for name in metrics.METRICS if not name.startswith(seldom)} - written
    assert written <= set(metrics.METRICS) and not missing


@each_run
def test_a_critic_and_a_reference_exist_only_where_something_asks_for_them(finished, name):
    cfg, workdir, rows = finished(name)
    saved = checkpoint.read_extra(workdir)
    assert saved['config']['env']['name'] == cfg.env.name
    for metric in WITH_CRITIC:
        own_step = metric == 'value/grad_norm' and 'shared' in name
        assert (metric in rows[0]) == (cfg.algorithm == 'ppo' and not own_step)
    assert ('policy/kl_ref' in rows[0]) == (cfg.loss.kl_coef > 0)  # in the loss or the reward
    assert (workdir / 'reference').is_dir() == (cfg.loss.kl_coef > 0)


def test_the_first_update_sees_no_distance_to_the_reference_and_the_coefficient_adapts(finished):
    """Target .01 over a horizon of 100: below it the coefficient shrinks by 1 - .2 * 8 / 100."""
    _, _, rows = finished('grpo with a KL loss that adapts')
    coefficients = [row['policy/kl_coef'] for row in rows[:-1]]
    assert coefficients[0] == pytest.approx(0.1)
    assert coefficients[1] == pytest.approx(0.1 * (1 - 0.2 * 8 / 100), rel=1e-5)
    assert rows[1]['policy/kl_ref'] > 0


@each_run
def test_the_run_leaves_pages_curves_and_checkpoints(finished, name):
    cfg, workdir, _ = finished(name)
    found = {str(path.relative_to(workdir)) for path in workdir.glob('*')}
    assert {'metrics.jsonl', 'config.json', 'curves.png', 'curves.svg', 'checkpoints'} <= found
    pages = sorted(path.name for path in (workdir / 'rollouts').iterdir())
    assert pages == [f'step_{s:06d}.{kind}' for s in (0, 2) for kind in ('html', 'json')]
    document = json.loads((workdir / 'rollouts' / 'step_000000.json').read_text())
    tokens = [token for episode in document['episodes'] for token in episode['tokens']]
    sampled = [token for token in tokens if token['k'] == 'a']
    assert len(document['episodes']) == 16 and document['env'] == cfg.env.name
    for token in sampled:
        assert token['lp'] <= 0 and token['ratio'] > 0
    left_out = sum(token['adv'] == 'nan' for token in sampled) > 0
    assert left_out == (cfg.filter.keep < 1)  # groups the filter dropped have no advantage
    assert checkpoint.steps(workdir / 'checkpoints') == [2, 3]
    reference = json.loads((workdir / 'reference.json').read_text())
    assert 0 <= reference['random'] <= reference['oracle'] <= 1


def test_a_finished_run_is_only_looked_at(finished, tmp_path):
    """The same command again: no step is trained, the state stays bit for bit."""
    cfg, workdir, rows = finished('ppo with a critic and a filter')
    before = micro_runs.saved_state(cfg, workdir)
    assert train.train(cfg, str(workdir)) == 0
    jax.tree.map(np.testing.assert_array_equal, before, micro_runs.saved_state(cfg, workdir))
    again = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    assert micro_runs.without_times(again) == micro_runs.without_times(rows)


def test_a_run_may_be_prolonged_but_not_changed(finished):
    cfg, workdir, _ = finished('ppo on a shared backbone')
    other = cfg.copy_and_resolve_references()
    other.optim.lr = 2e-3
    with pytest.raises(ValueError, match='optim.lr: 0.001 in the checkpoint, 0.002 now'):
        train.train(other, str(workdir))


def test_validation_that_comes_late_after_a_resume_is_no_recompile(
    tmp_path, monkeypatch, shared_programs
):
    """Its program compiles when a resumed run first validates, whatever step that is."""
    env, changes = RUNS['ppo on a shared backbone']  # whose programs are compiled already
    changes = changes | {'eval.every': 5, 'log.rollouts_every': 0, 'steps': 1}
    cfg = micro_runs.config(env, **changes)
    assert train.train(cfg, str(tmp_path)) == 0
    monkeypatch.setattr(train, 'build', shared_programs)  # as in a process of its own
    cfg.steps = 6
    assert train.train(cfg, str(tmp_path)) == 0
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert [row['step'] for row in rows if 'eval/success' in row] == [0, 5, 6]
    assert [row['perf/recompiles'] for row in rows] == [0] * 7


# ---- a horizon that grows ----------------------------------------------------------------------

GROWS = 'grpo with KL in the reward and a horizon that grows'


def test_the_horizon_grows_within_a_run_without_a_recompile(finished):
    _, _, rows = finished(GROWS)
    assert [row['rollout/horizon'] for row in rows[:-1]] == [1, 1, 2]
    assert [row['perf/recompiles'] for row in rows] == [0] * 4
    turns = [row['rollout/turns'] for row in rows[:-1]]
    assert turns[:2] == [1, 1] and 1 < turns[2] <= 2


def test_a_run_resumed_at_the_border_of_a_stage_is_the_run_that_was_not(finished, tmp_path):
    cfg, workdir, rows = finished(GROWS)
    for steps in (2, 3):
        resumed = micro_runs.config(RUNS[GROWS][0], **RUNS[GROWS][1], steps=steps)
        assert train.train(resumed, str(tmp_path)) == 0
    again = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert micro_runs.without_times(again) == micro_runs.without_times(rows)
    one, other = (micro_runs.saved_state(cfg, folder) for folder in (workdir, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_validation_plays_every_turn_whatever_the_horizon(finished, tmp_path):
    """Step 0 validates the same policy on the same luck with and without a curriculum."""
    plain = micro_runs.config('frozen_lake', steps=0, algorithm='grpo')
    assert train.train(plain, str(tmp_path)) == 0
    (row,) = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    first = finished(GROWS)[2][0]
    assert all(row[name] == first[name] for name in row if name.startswith('eval/'))
    # An untrained policy breaks the format: -.1 a turn, two turns where the horizon was one.
    assert row['eval/return'] < -0.15


# ---- learning ----------------------------------------------------------------------------------


def bandit_probe(algorithm, seed, workdir):
    """Success of the training rollouts, of a policy that was shown random names only."""
    cfg = micro_runs.config(
        'bandit',
        **{
            'seed': seed,
            'steps': 30,
            'algorithm': algorithm,
            'env.max_turns': 1,
            'env.max_actions_per_turn': 1,
            'rollout.max_tokens': 128,
            'rollout.max_response': 8,
            'rollout.num_groups': 2,
            'rollout.group_size': 64,
            'rollout.serve_rows': 16,
            'batch.minibatch_rows': 128,
            'batch.microbatch_rows': 128,
            'batch.epochs': 2,
            'optim.lr': 3e-3,
            'optim.critic_lr': 3e-3,
            'model.tie_embeddings': False,
            'model.rope_theta': 100.0,
            'clone.episodes': 256,
            'clone.steps': 60,
            'clone.batch': 64,
            'clone.oracle': 0.0,
            'clone.lr': 1e-2,
            'eval.every': 0,
            'log.rollouts_every': 0,
            'checkpoint.every': 1000,
        },
    )
    assert train.train(cfg, str(workdir)) == 0
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)[:-1]
    assert all(row['perf/recompiles'] == 0 for row in rows)
    reference = json.loads((workdir / 'reference.json').read_text())
    assert (reference['random'], reference['oracle']) == (pytest.approx(0.5), pytest.approx(1.0))
    return np.array([row['rollout/success'] for row in rows])


@pytest.mark.soak
def test_the_arm_that_pays_more_on_average_is_found(tmp_path):
    """Phoenix always pays .1, Dragon 1 in one of four: .25. From one in six to nine in ten.

    By PPO, which has a critic to learn too; every algorithm learns in test_probes.py.
    """
    with micro_runs.one_device():
        success = bandit_probe('ppo', 0, tmp_path)
    assert success[0] < 0.4 and success[-5:].mean() > 0.9


# ---- configs -----------------------------------------------------------------------------------


def config_file(name):
    return importlib.import_module(f'configs.{name}').get_config()


def trace(cfg, *, with_rollout):
    """Shapes of one whole cycle of a config: nothing is computed or compiled."""
    cfg = effective(cfg)
    mesh, tokenizer = parts.build_mesh(cfg), parts.build_tokenizer(cfg)
    found = []

    def init():
        config, params = parts.build_model(cfg, tokenizer, mesh)
        found.append(config)
        return params

    params = jax.eval_shape(init)
    txs = parts.build_optimisers(cfg)
    run = types.SimpleNamespace(cfg=cfg, config=found[0], mesh=mesh, txs=txs)
    state = jax.eval_shape(functools.partial(start.start_state, run), params)
    reference = run_params.policy_of(state.params, {}) if derived.needs_reference(cfg) else None
    rows = cfg.rollout.num_groups * cfg.rollout.group_size
    out = abstract_rollout(rows, cfg)
    if count := derived.continuations(cfg):
        forked = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, count, *x.shape[1:]), x.dtype), out
        )
        turn = jax.ShapeDtypeStruct((rows, count), jnp.int32)
        out = out.replace(continuations=Continuations(turn=turn, rollout=forked))
    task = None
    if with_rollout or cfg.context.window:
        task = build_module.build_task(cfg, tokenizer, mesh)
    if with_rollout and derived.on_hosts(cfg):
        if names := task.env.FIGURES:
            figures = jax.ShapeDtypeStruct((rows, len(names)), jnp.float32)
            out = out.replace(figures=figures)
    elif with_rollout:
        each = map(derived.episodes, mixture.members(cfg))
        listed = tuple(Episodes(*[jax.ShapeDtypeStruct((n,), jnp.int32)] * 3) for n in each)
        listed = listed if cfg.env.mix else listed[0]
        _, collect, _ = build_module.build_play(cfg, mesh, found[0], task, {})
        key = jax.eval_shape(lambda: jax.random.key(0))
        policy = run_params.policy_of(state.params, {})
        made, _ = jax.eval_shape(collect, policy, task, listed, key)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
            lambda x: (x.shape, x.dtype), out
        )
    learn = functools.partial(
        build_module.learn,
        fns=parts.build_functions(cfg, found[0], mesh),
        learning=settings.build_learning(cfg, mesh, task, tokenizer, txs),
    )
    shape = (derived.base_rows(cfg), cfg.rollout.max_tokens)
    shown = [jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, bool, bool)]
    joined = dict(base=Demonstrations(*shown)) if shape[0] else {}
    frozen = run_params.Frozen({}, reference)
    after, measured, *_ = jax.eval_shape(learn, state, frozen, out, **joined)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return measured


def abstract_rollout(rows, cfg):
    empty = functools.partial(
        Rollout.empty,
        pad_id=0,
        max_tokens=cfg.rollout.max_tokens,
        max_turns=cfg.env.max_turns,
        max_actions=cfg.env.max_actions_per_turn,
    )
    level, prefix = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, 1))
    return jax.eval_shape(empty, level, prefix)


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_builds(name):
    """Checked as it is; traced on small pools and one layer, of the bundled model if of a path."""
    cfg = config_file(name)
    check.check(cfg)
    cfg.env.train_levels = cfg.env.eval_levels = 8
    cfg.model.path = cfg.model.tokenizer = ''
    cfg.model.num_layers = 1
    cfg.mesh.tensor = max(8 // cfg.batch.microbatch_rows, 1)  # whose rows fill the data shards
    measured = trace(cfg, with_rollout=not derived.on_hosts(cfg))  # a loop of the host
    assert set(measured) <= set(metrics.METRICS)


@pytest.mark.parametrize('name', ALGORITHMS)
def test_every_algorithm_runs_with_the_fields_of_the_config(name):
    cfg = micro_runs.config('frozen_lake', algorithm=name)
    check.check(cfg)
    assert set(trace(cfg, with_rollout=False)) <= set(metrics.METRICS)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'algorithm': 'dqn'}, "algorithm='dqn' is not one of ppo, grpo"),
        ({'loss.aggregation': 'mean'}, "loss.aggregation='mean' is not one of token_mean"),
        ({'loss.kl_estimator': 'k9'}, "loss.kl_estimator='k9' is not one of k1, k2, k3"),
        ({'loss.kl_in': 'value'}, "loss.kl_in='value' is not one of loss, reward"),
        ({'loss.reward_on': 'step'}, "loss.reward_on='step' is not one of turn, episode"),
        ({'eval.split': 'train'}, "eval.split='train' is not one of validation, test"),
        ({'model.dtype': 'float16'}, "model.dtype='float16' is not one of float32, bfloat16"),
        ({'env.max_turns': 0}, 'env.max_turns=0 must be at least 1'),
        ({'rollout.serve_rows': 0}, 'rollout.serve_rows=0 must be at least 1'),
        ({'checkpoint.every': 0}, 'checkpoint.every=0 must be at least 1'),
        ({'eval.temperature': -1.0}, 'eval.temperature=-1.0 must be in'),
        ({'rollout.temperature': 0.0}, 'rollout.temperature=0.0 must be in'),
        ({'filter.keep': 1.5}, 'filter.keep=1.5 must be in'),
        ({'eval.top_p': 0.0}, 'eval.top_p=0.0 must be in'),
        ({'batch.minibatch_rows': 12}, 'no multiple of batch.minibatch_rows=12'),
        ({'batch.microbatch_rows': 3}, 'must be a multiple of batch.microbatch_rows=3'),
        ({'model.num_heads': 3}, 'hidden_size=32 must be a multiple of 2 x model.num_heads=3'),
        (
            {'rollout.num_groups': 5, 'batch.minibatch_rows': 4, 'batch.microbatch_rows': 4},
            '20 episodes .* must be a multiple of the 8 data shards',
        ),
        ({'batch.microbatch_rows': 4}, 'batch.microbatch_rows=4 must be a multiple of the 8 data'),
        ({'rollout.slots': 12}, 'rollout.slots=12 must be a multiple of the 8 data shards'),
        ({'mesh.data': 3}, 'mesh data=3 x fsdp=1 x tensor=1 does not use exactly the 8 devices'),
        ({'mesh.fsdp': 0}, 'fsdp=0'),
        ({'env.name': 'chess'}, "env.name='chess' is not one of frozen_lake, sokoban, bandit"),
        ({'env.prompt': 'long'}, "env.prompt='long' is not one of"),
        ({'rollout.max_tokens': 20}, 'rollout.max_tokens=20 is too small: .* set it to at least'),
        ({'model.tokenizer': 'none.model'}, 'none.model: no such folder or file'),
    ],
)
def test_impossible_runs_are_refused_before_time_is_spent(changes, message, monkeypatch):
    """Before any parameter is made."""

    def too_late(*_):
        raise AssertionError('parameters were made')

    monkeypatch.setattr(parts, 'build_model', too_late)
    with pytest.raises(ValueError, match=message):
        build(micro_runs.config('frozen_lake', **changes))


@pytest.mark.parametrize('argument', ['--config.env.max_turn=3', '--config.optim.lr=fast'])
def test_a_mistyped_field_is_an_error_that_names_it(argument, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'agentrl_jax.train',
            '--config=configs/demo.py',
            f'--workdir={tmp_path / "run"}',
            argument,
        ],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode not in (0, 75)
    assert argument.split('=')[0].removeprefix('--config.').split('.')[-1] in done.stderr
    assert not (tmp_path / 'run').exists()


def test_levels_are_drawn_without_repetition_and_by_step():
    draw = functools.partial(draw_episodes, levels=6, groups=6, group_size=2)
    drawn = [draw(jax.random.key(0), step, common=True) for step in (0, 1)]
    assert sorted(drawn[0].level[::2].tolist()) == list(range(6))
    assert (drawn[0].level[::2] == drawn[0].level[1::2]).all()
    assert (drawn[0].level != drawn[1].level).any()
    np.testing.assert_array_equal(drawn[0].world_stream, np.arange(12) // 2)
    own = draw(jax.random.key(0), 0, common=False)
    np.testing.assert_array_equal(own.world_stream, own.token_stream)
    many = draw_episodes(jax.random.key(0), 0, levels=2, groups=5, group_size=1, common=False)
    assert many.level.shape == (5,) and set(many.level.tolist()) <= {0, 1}


def test_validation_plays_every_level_and_counts_no_filling():
    """12 episodes over a pool of 5 on 8 shards: 16 rows, each level twice or three times in 12."""
    listed = every_level(12, 5, 8)
    assert listed.level.shape == (16,)
    assert np.bincount(listed.level[:12]).tolist() == [3, 3, 2, 2, 2]
    assert sharding.row_shards(parts.build_mesh(micro_runs.config('bandit'))) == 8
