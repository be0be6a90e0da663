"""Configs that cannot be, or would do nothing, are refused in a sentence before time is spent.

Bounds and choices of single fields, and those that an algorithm lacks: test_settings.py.
"""

import types

import micro_runs
import pytest

from agentrl_jax.planning import programs
from agentrl_jax.run import build, command, parts
from agentrl_jax.run.config import read as read_config
from agentrl_jax.settings.marks import suggestion

HALVES = {'algorithm': 'grpo', 'env.mix': (('frozen_lake', 0.5), ('sokoban', 0.5))}
VINE = {'algorithm': 'vine', 'env.max_turns': 3, 'rollout.max_tokens': 128}
TAUGHT = {'algorithm': 'opd', 'opd.teachers': ('another',)}
HINTED = {'opd.privileged': 'plan'}
ITSELF = {'algorithm': 'opd'} | HINTED
EVOL = {'algorithm': 'agent_evol', 'evol.base_rows': 8, 'clone.episodes': 8}
OBJECTS = {'objects.make_object': 'host_worlds:Echo', 'objects.instruction': 'Say something.'}

STALE = {'env.name': 'objects', 'algorithm': 'grpo', 'rollout.staleness': 2} | OBJECTS


def mixed(*shares):
    return HALVES | {'env.mix': shares}


NORMALISED = {
    'algorithm': 'ppo',
    'loss.reward_on': 'episode',
    'loss.reward_normalization': 'mean',
}
SEVERAL = {'env.name': 'harness', 'harness.run': 'harness_clients:two_turns', 'harness.branches': 4}
REFUSED = {
    'values': [
        (
            {'algorithm': 'ppo', 'loss.reward_on': 'episode', 'loss.bootstrap_truncated': True},
            'values hold both, so that it would count twice: set loss.reward_on=turn',
        ),
        (
            SEVERAL | {'algorithm': 'ppo', 'loss.bootstrap_truncated': True},
            'needs the whole conversation, and an episode may have 4 .harness.branches.',
        ),
        (
            SEVERAL | {'harness.branches': 1, 'algorithm': 'ppo', 'loss.bootstrap_truncated': True},
            'a harness has earned all of it when its episode is cut: set it to False',
        ),
        (
            {'algorithm': 'agent_evol', 'loss.kl_coef': 0.01, 'loss.kl_in': 'reward'},
            'by whose sign algorithm=agent_evol keeps episodes: set loss.kl_in=loss',
        ),
        (
            {
                'algorithm': 'maxrl',
                'env.format_penalty': 0.0,
                'loss.kl_coef': 0.01,
                'loss.kl_in': 'reward',
            },
            'loss.kl_in=reward makes returns negative, and algorithm=maxrl divides',
        ),
        (
            {'algorithm': 'agent_evol', 'loss.kl_coef': 0.01, 'loss.kl_target': 0.01},
            'kl_target=0.01 steers by the policy that played, and of algorithm=.agent_evol. that',
        ),
        (
            SEVERAL | {'algorithm': 'dpo'},
            'algorithm=.dpo. compares whole episodes, and one may have 4 conversations',
        ),
        (SEVERAL | {'algorithm': 'gspo'}, 'gspo. compares whole episodes, and one may have 4'),
        (SEVERAL | {'algorithm': 'grpo', 'parity.loss_on': 'all'}, 'it needs harness.branches=1'),
        (
            {'algorithm': 'maxrl', 'env.format_penalty': -0.1},
            'env.format_penalty=-0.1 is negative, and algorithm=maxrl divides by the mean return',
        ),
        (
            {'algorithm': 'maxrl', 'env.format_penalty': 0.0, 'env.name': 'sokoban'},
            'rewards of sokoban can be negative, and algorithm=maxrl',
        ),
        (
            {
                'algorithm': 'ppo',
                'rollout.num_groups': 16,
                'rollout.group_size': 1,
                'loss.reward_on': 'episode',
                'loss.reward_normalization': 'mean_std',
            },
            'reward_normalization=mean_std compares the episodes of a group, and .*=1 leaves none',
        ),
        (
            SEVERAL | {'algorithm': 'agent_evol', 'evol.base_rows': 8, 'clone.episodes': 8},
            'evol.base_rows=8 are one conversation each: set harness.branches=1',
        ),
    ],
    'shapes': [
        ({'batch.minibatch_rows': 12}, 'no multiple of batch.minibatch_rows=12'),
        ({'batch.microbatch_rows': 3}, 'must be a multiple of batch.microbatch_rows=3'),
        ({'batch.microbatch_rows': 4}, 'batch.microbatch_rows=4 must be a multiple of the 8 data'),
        ({'rollout.slots': 12}, 'rollout.slots=12 must be a multiple of the 8 data shards'),
        (
            {'rollout.num_groups': 5, 'batch.minibatch_rows': 4, 'batch.microbatch_rows': 4},
            '20 episodes .* must be a multiple of the 8 data shards',
        ),
        ({'model.num_heads': 3}, 'hidden_size=32 must be a multiple of 2 x model.num_heads=3'),
        ({'clone.microbatch_rows': 3}, 'clone.batch=16 must be a multiple of clone.microbatch'),
    ],
    'filters': [
        ({'filter.rule': 'varied', 'filter.smallest': True}, 'only on top_k'),
        ({'filter.include_zero': True}, "no effect on filter.rule='top_k', only on top_p"),
        ({'filter.p': 0.5}, 'filter.p=0.5 .*filter.rule=top_p or top_p_softmax or min_p'),
        ({'filter.refill': 2}, 'it needs a filter.rule that drops groups'),
    ],
    'KL': [
        (
            {'loss.kl_coef': 0.01, 'loss.kl_target': 0.01, 'loss.kl_horizon': 15.0},
            'kl_horizon=15 is counted in episodes, of which a step has 16',
        ),
        (
            {
                'algorithm': 'mt_grpo',
                'turn_credit.mode': 'or',
                'loss.kl_coef': 0.1,
                'loss.kl_in': 'reward',
            },
            "turn_credit.mode='or' with turn_credit.turn_coef=1.0 leaves out",
        ),
        (
            {
                'algorithm': 'gspo_turn',
                'turn_credit.turn_coef': 0.0,
                'loss.kl_coef': 0.1,
                'loss.kl_in': 'reward',
            },
            "'mt_cumulative' with turn_credit.turn_coef=0.0 leaves out",
        ),
        (
            {'fork.value_every': 1, 'loss.kl_coef': 0.1},
            'loss.kl_in=reward has them of returns less their KL',
        ),
    ],
    'rollouts that go on across updates': [
        (
            {'rollout.staleness': 1},
            "staleness=1 is for one world on hosts, .*'frozen_lake' is none",
        ),
        (
            STALE | mixed(('objects', 0.5), ('textcraft', 0.5)),
            'rollout.staleness=2 is for one world on hosts',
        ),
        (STALE | {'curriculum.rounds': (1, 2)}, 'rounds=.1, 2. changes the turns that they may'),
        (
            STALE | {'filter.refill': 1, 'filter.rule': 'varied'},
            'plays one rollout a step, and filter.refill=1 plays more',
        ),
        (STALE | {'algorithm': 'dpo'}, "algorithm='dpo' has no ratio that corrects for it"),
        (STALE | {'parity.loss_on': 'all'}, "parity.loss_on='all' takes others: set it to 'samp"),
    ],
    'observations': [
        (
            {'loss.observation_coef': 0.1, 'parity.loss_on': 'all'},
            "observation_coef=0.1 and parity.loss_on='all' both train what the world says",
        ),
        (
            {'loss.observation_coef': 0.1, 'env.max_turns': 1},
            'observation_coef=0.1 has no effect with env.max_turns=1',
        ),
        (
            {'loss.observation_coef': 0.1, 'context.window': 1},
            'context.window=1 hides the answer',
        ),
        ({'eval.observations': True, 'context.window': 1}, 'eval.observations=True predicts'),
    ],
    'cloning': [
        ({'clone.adapters': True, 'clone.episodes': 8}, 'it needs lora.rank and demonstrations'),
        ({'clone.adapters': True, 'lora.rank': 2}, 'it needs lora.rank and demonstrations'),
    ],
    'critics': [
        ({'algorithm': 'grpo', 'critic.updates': 2}, 'critic.updates=2 needs a separate critic'),
        ({'algorithm': 'grpo', 'critic.freeze_attention': True}, 'attention=True needs a separate'),
        (
            {'critic.freeze_attention': True, 'critic.share_backbone': True},
            'critic.freeze_attention=True needs a separate critic',
        ),
        (
            {'critic.updates': 2, 'critic.share_backbone': True},
            'critic.updates=2 needs a separate critic',
        ),
        (
            {'algorithm': 'sao', 'loss.sampler_correction': 'tis'},
            'whose ratio is to the sampler already',
        ),
    ],
    'samplers': [
        (
            {'loss.sampler_correction': 'tis', 'loss.sampler_high': 0.9},
            'sampler_high=0.9 at least 1',
        ),
        (
            {'algorithm': 'agent_evol', 'loss.sampler_correction': 'tis'},
            "loss.sampler_correction='tis' has no effect on algorithm='agent_evol'",
        ),
        ({'loss.sampler_low': 0.5}, 'no effect with loss.sampler_correction=off'),
    ],
    'horizons': [
        ({'curriculum.rounds': (0, 2)}, r'rounds=\(0, 2\) must be positive and increasing'),
        ({'curriculum.rounds': (2, 2)}, r'rounds=\(2, 2\) must be positive and increasing'),
        ({'curriculum.rounds': (1, 3)}, 'more turns than env.max_turns=2.* raise it'),
        ({'curriculum.rounds': (1.0, 2.0)}, 'must be whole numbers of turns'),
        ({'curriculum.interpolate': True}, r'no effect with curriculum.rounds=\(\): give two'),
    ],
    'several worlds': [
        (mixed('frozen_lake', 0.5), 'must be pairs of a world and its share'),
        (mixed(('chess', 1.0)), 'must name different worlds: frozen_lake, '),
        (mixed(('sokoban', 0.5), ('sokoban', 0.5)), 'must name different worlds'),
        (mixed(('frozen_lake', 0.5), ('sokoban', 0.4)), 'shares must be above 0 and sum to 1'),
        (mixed(('frozen_lake', 1.5), ('sokoban', -0.5)), 'shares must be above 0'),
        (mixed(('frozen_lake', float('nan'))), 'shares must be above 0'),
        (mixed(('frozen_lake', 0.98), ('sokoban', 0.02)), 'a world none of rollout.num_groups=4'),
        (
            mixed(('objects', 0.5), ('sokoban', 0.5)) | OBJECTS | {'clone.episodes': 4},
            "needs an expert, and env.name='objects' has none",
        ),
        (
            mixed(('objects', 1.0)) | OBJECTS | {'rollout.stop_at_answer': True},
            "no effect on env.name='objects'",
        ),
        (HALVES | {'context.window': 1}, 'context.window=1 does not go with several worlds'),
        (HALVES | {'alarm.mi_every': 1}, 'alarm.mi_every=1 does not go with several worlds'),
        (HALVES | {'algorithm': 'ppo', 'fork.value_every': 1}, 'fork.value_every=1 does not go'),
        (HALVES | {'algorithm': 'dapo'}, r'filter.refill=\d+ does not go with several worlds'),
        (HALVES | {'eval.worlds': ('sokoban',)}, r"other than env.name='frozen_lake\+sokoban'"),
        (HALVES | {'rollout.num_groups': 6}, 'the worlds 12, 12 episodes, .* of the 8 data'),
    ],
    'continuations': [
        (VINE | {'fork.turns': '3'}, 'must be every, ahead, unsure, or different turns'),
        (VINE | {'env.max_turns': 1}, 'has none: set it to 2 or more'),
        (VINE | {'loss.kl_coef': 0.1, 'loss.kl_in': 'reward'}, 'set loss.kl_in=loss'),
        (VINE | {'loss.aggregation': 'seq_mean_token_mean'}, 'would undo the weights'),
        (VINE | {'parity.microbatch_means': True}, 'would undo the weights'),
        (VINE | {'parity.loss_on': 'all'}, 'does not go with fork.turns'),
        ({'algorithm': 'grpo', 'fork.turns': 'every'}, 'has no effect on .*grpo.*, only on vine'),
    ],
    'imitation': [
        ({'algorithm': 'agent_evol', 'evol.base_rows': 8}, 'needs demonstrations: set clone.file'),
        (EVOL | {'algorithm': 'ppo'}, "has no effect on algorithm='ppo'"),
        (EVOL | {'clone.max_turns': 1}, 'has the limits of rollouts'),
        (
            EVOL | {'evol.base_rows': 4},
            '16 episodes .* 4 demonstrations join .* no multiple of batch.minibatch_rows=8',
        ),
        ({'algorithm': 'agent_evol', 'evol.threshold': -1.0}, 'set evol.weights=equal'),
        ({'evol.threshold': 1.0}, "evol.threshold=1.0 has no effect on algorithm='ppo'"),
        ({'clone.file': 'shown.json', 'clone.max_turns': 1}, 'not for those of clone.file'),
        ({'algorithm': 'dpo', 'dpo.beta': 0.0}, 'dpo.beta=0.0 must be above 0'),
        ({'algorithm': 'dpo', 'rollout.group_size': 1, 'rollout.num_groups': 16}, 'must be even'),
        ({'algorithm': 'dpo', 'loss.kl_coef': 0.1, 'loss.kl_in': 'reward'}, 'loss.kl_in=loss'),
    ],
    'distillation': [
        ({'algorithm': 'opd'}, 'name them in opd.teachers'),
        ({'opd.privileged': 'plan'}, "has no effect on algorithm='ppo', only on opd"),
        (TAUGHT | HINTED | {'env.hint': 'plan'}, "reads as well with env.hint='plan'"),
        (ITSELF | {'env.mix': HALVES['env.mix']}, 'is for one world, and env.mix='),
        (ITSELF | {'env.name': 'textcraft'}, "opd.privileged='plan' needs the plans of a world on"),
        ({'env.hint': 'plan', 'env.name': 'textcraft'}, "env.hint='plan' needs the plans of worl"),
        (
            {'env.hint': 'plan', 'context.window': 1},
            'is read in the first turn, which context.window=1 hides from later ones',
        ),
        ({'opd.teachers': ('another',)}, "has no effect on algorithm='ppo', only on opd"),
        (TAUGHT | {'loss.kl_coef': 0.1}, 'with opd.teachers in its place: set it to 0'),
        (TAUGHT | {'loss.clip_high': 0.3}, 'loss.dual_clip has no effect on opd.divergence=full'),
        (TAUGHT | {'loss.sampler_correction': 'tis'}, 'sampler_correction has no effect on opd'),
        (TAUGHT | {'parity.loss_on': 'all'}, 'of which .* asks no teacher: set it to sampled'),
        (
            TAUGHT | {'opd.reward_coef': 1.0, 'rollout.group_size': 1, 'rollout.num_groups': 16},
            'opd.reward_coef=1.0 compares the episodes of a group',
        ),
        (TAUGHT | {'opd.reward_coef': -1.0}, 'opd.reward_coef=-1.0 must be at least 0'),
        (TAUGHT | {'opd.teachers': (1,)}, r"must be paths, such as \('runs/teacher',\)"),
    ],
}


@pytest.mark.parametrize('changes, message', [case for about in REFUSED.values() for case in about])
def test_a_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(micro_runs.plain('frozen_lake', **changes), 8)


@pytest.mark.parametrize(
    'changes, words',
    [
        (
            {'optim.lr': 1e-6, 'loss.kl_coef': 0.0},
            ['model.path is empty: 120 M random weights', 'optim.lr=1e-06'],
        ),
        ({'optim.lr': 1e-3, 'loss.kl_coef': 0.04}, ['120 M', 'loss.kl_coef=0.04 keeps the policy']),
        ({'optim.lr': 1e-3, 'clone.episodes': 64, 'loss.kl_coef': 0.04}, []),
        ({'optim.lr': 1e-6, 'model.path': 'a'}, []),
    ],
)
def test_a_start_from_random_weights_by_mistake_is_a_warning(changes, words, capsys):
    """configs/frozen_lake.py without model.path trained random weights at 1e-6 in silence."""
    cfg = read_config(micro_runs.plain('frozen_lake', algorithm='grpo', **changes), None)
    build.warn_of_random_start(cfg, types.SimpleNamespace(param_count=lambda: 120_000_000))
    err = capsys.readouterr().err
    assert all(word in err for word in words) and bool(err) == bool(words)


@pytest.mark.parametrize(
    'value, names, words',
    [
        ('grop', ('ppo', 'grpo'), '; did you mean grpo?'),
        ('GRPO', ('ppo', 'grpo'), '; did you mean grpo?'),
        ('frozenlake', ('frozen_lake', 'sokoban'), '; did you mean frozen_lake?'),
        ('chess', ('frozen_lake', 'sokoban'), ''),
        (3, ('ppo', 'grpo'), ''),
    ],
)
def test_the_closest_name_is_suggested(value, names, words):
    assert suggestion(value, names) == words


def test_values_of_fields_are_suggested():
    for changes, words in (
        ({'algorithm': 'grop'}, 'did you mean grpo'),
        ({'env.name': 'frozenlake'}, 'did you mean frozen_lake'),
        ({'model.dtype': 'float16'}, 'did you mean bfloat16'),
        ({'env.mix': (('frozen_lake', 0.5), ('sokobn', 0.5))}, 'did you mean sokoban'),
    ):
        with pytest.raises(command.WrongUsage, match=words):
            read_config(micro_runs.plain('frozen_lake', **changes))


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'env.max_turns': 0}, 'env.max_turns=0 must be at least 1'),
        ({'env.name': 'chess'}, "env.name='chess' is not one of frozen_lake, sokoban, bandit"),
        ({'env.prompt': 'long'}, "env.prompt='long' is not one of"),
        ({'mesh.data': 3}, 'mesh data=3 x fsdp=1 x tensor=1 does not use exactly the 8 devices'),
        ({'mesh.fsdp': 0}, 'fsdp=0'),
        ({'rollout.max_tokens': 20}, 'rollout.max_tokens=20 is too small: .* set it to at least'),
        ({'model.tokenizer': 'none.model'}, 'none.model: no such folder or file'),
    ],
)
def test_a_run_is_refused_before_any_parameter_is_made(changes, message, monkeypatch):
    def too_late(*_):
        raise AssertionError('parameters were made')

    monkeypatch.setattr(parts, 'build_model', too_late)
    with pytest.raises(ValueError, match=message):
        build.build(micro_runs.plain('frozen_lake', **changes))


def test_a_field_that_a_config_file_mistypes_is_refused():
    cfg = micro_runs.plain('frozen_lake')
    cfg.optim.lrr = 1e-3
    with pytest.raises(ValueError, match='has no field optim.lrr; did you mean optim.lr'):
        read_config(cfg, None)


def test_only_train_takes_several_worlds():
    cfg = micro_runs.config('frozen_lake', **HALVES)
    with pytest.raises(ValueError, match='is for train alone: set it to .* frozen_lake, sokob'):
        parts.build_environment(read_config(cfg), 'validation')
    with pytest.raises(ValueError, match='is for train alone: set it to .* frozen_lake, sokob'):
        programs.shapes(cfg, None)


def test_worlds_with_different_small_tokenizers_need_one_that_is_named():
    def source(*shares, **changes):
        cfg = micro_runs.config('frozen_lake', **mixed(*shares) | changes)
        return parts.tokenizer_source(read_config(cfg, None))

    lake, maze = ('frozen_lake', 0.5), ('babyai', 0.5)
    assert source(lake, ('sokoban', 0.5)) == parts.BUNDLED_TOKENIZER
    assert source(('babyai', 1.0)).name == 'babyai.model'
    with pytest.raises(ValueError, match=r'\(babyai.model, demo.model\): name one in model.token'):
        source(maze, lake)
    named = str(parts.BUNDLED_TOKENIZER)
    assert str(source(maze, lake, **{'model.tokenizer': named})) == named
