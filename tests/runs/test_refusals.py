"""Invalid configs and settings without effect are rejected before any work is done.

A case has changes and the field that the error must name. Bounds and choices of single fields,
and fields that an algorithm lacks, are tested in test_settings.py.
"""

import micro_runs
import pytest

from agentrl_jax.planning import programs
from agentrl_jax.run import build, loading, parts, usage
from agentrl_jax.run.config import read as read_config

HALVES = {'algorithm': 'grpo', 'env.mix': (('frozen_lake', 0.5), ('sokoban', 0.5))}
EVOL = {'algorithm': 'agent_evol', 'evol.base_rows': 8, 'clone.episodes': 8}
OBJECTS = {'objects.make_object': 'host_worlds:Echo', 'hosts.instruction': 'Say something.'}
STALE = {'env.name': 'objects', 'algorithm': 'grpo', 'rollout.staleness': 2} | OBJECTS
SEVERAL = {'env.name': 'harness', 'harness.run': 'harness_clients:two_turns', 'harness.branches': 4}
BOOTSTRAP = {'algorithm': 'ppo', 'loss.bootstrap_truncated': True}
MAXRL = {'algorithm': 'maxrl', 'env.format_penalty': 0.0}
KL = {'loss.kl_coef': 0.1, 'loss.kl_in': 'reward'}
ALONE = {'rollout.num_groups': 16, 'rollout.group_size': 1}


def mixed(*shares):
    return HALVES | {'env.mix': shares}


REJECTED = (
    # required values, sets and intervals
    ({'filter.rule': 'varied', 'filter.smallest': True}, 'filter.smallest'),
    ({'loss.sampler_low': 0.5}, 'loss.sampler_correction'),
    ({'loss.sampler_correction': 'tis', 'loss.sampler_high': 0.9}, 'loss.sampler_high'),
    # returns, values and KL
    (BOOTSTRAP | {'loss.reward_on': 'episode'}, 'loss.reward_on'),
    (SEVERAL | BOOTSTRAP, 'harness.branches'),
    (SEVERAL | BOOTSTRAP | {'harness.branches': 1}, 'env.name'),
    (KL | {'algorithm': 'agent_evol'}, 'loss.kl_in'),
    (MAXRL | {'env.name': 'sokoban'}, 'env.name'),
    (KL | {'algorithm': 'mt_grpo', 'turn_credit.mode': 'or'}, 'turn_credit.mode'),
    # shapes on 8 data shards
    ({'batch.minibatch_rows': 12}, 'batch.minibatch_rows'),
    ({'batch.microbatch_rows': 3}, 'batch.minibatch_rows'),
    ({'batch.microbatch_rows': 4}, 'batch.microbatch_rows'),
    ({'rollout.slots': 12}, 'rollout.slots'),
    ({'rollout.num_groups': 5, 'batch.minibatch_rows': 4}, 'rollout.num_groups'),
    ({'model.num_heads': 3}, 'model.hidden_size'),
    ({'clone.microbatch_rows': 3}, 'clone.microbatch_rows'),
    ({'algorithm': 'grpo', 'critic.updates': 2}, 'critic.updates'),
    # rollouts that continue across updates
    ({'rollout.staleness': 1}, 'env.name'),
    (STALE | mixed(('objects', 0.5), ('textcraft', 0.5)), 'rollout.staleness'),
    # clones and curricula
    ({'clone.adapters': True, 'lora.rank': 2}, 'clone.episodes'),
    ({'curriculum.rounds': (2, 2)}, 'curriculum.rounds'),
    ({'curriculum.rounds': (1, 3)}, 'env.max_turns'),
    ({'curriculum.rounds': (1.0, 2.0)}, 'curriculum.rounds'),
    ({'algorithm': 'agent_evol', 'evol.base_rows': 8}, 'clone.episodes'),
    (EVOL | {'algorithm': 'ppo'}, 'algorithm'),
    (EVOL | {'evol.base_rows': 4}, 'batch.minibatch_rows'),
    # several environments
    (mixed('frozen_lake', 0.5), 'env.mix'),
    (mixed(('chess', 1.0)), 'env.mix'),
    (mixed(('sokoban', 0.5), ('sokoban', 0.5)), 'env.mix'),
    (mixed(('frozen_lake', 1.5), ('sokoban', -0.5)), 'env.mix'),
    (mixed(('frozen_lake', float('nan'))), 'env.mix'),
    (mixed(('frozen_lake', 0.98), ('sokoban', 0.02)), 'rollout.num_groups'),
    (mixed(('objects', 0.5), ('sokoban', 0.5)) | OBJECTS | {'clone.episodes': 4}, 'clone.episodes'),
    (mixed(('objects', 1.0)) | OBJECTS | {'rollout.stop_at_answer': True}, 'env.name'),
    (HALVES | {'rollout.num_groups': 6}, 'rollout.group_size'),
    # validation
    ({'optim.schedule': 'cosine'}, 'optim.schedule'),
    ({'checkpoint.best': True, 'eval.split': 'test'}, 'eval.split'),
)


@pytest.mark.parametrize('changes, field', REJECTED)
def test_an_invalid_config_is_rejected(changes, field):
    with pytest.raises(usage.WrongUsage) as error:
        read_config(micro_runs.plain('frozen_lake', **changes), 8)
    assert field in (error.value.fields or str(error.value))


@pytest.mark.parametrize(
    'changes, field',
    [
        ({'env.max_turns': 0}, 'env.max_turns'),
        ({'env.name': 'chess'}, 'env.name'),
        ({'env.prompt': 'long'}, 'env.prompt'),
        ({'mesh.data': 3}, 'mesh data=3'),
        ({'mesh.fsdp': 0}, 'fsdp=0'),
        ({'rollout.max_tokens': 20}, 'rollout.max_tokens'),
        ({'model.tokenizer': 'none.model'}, 'none.model'),
    ],
)
def test_an_invalid_run_is_rejected_before_parameters_are_created(changes, field, monkeypatch):
    def too_late(*_):
        raise AssertionError('parameters were made')

    monkeypatch.setattr(loading, 'build_model', too_late)
    with pytest.raises(ValueError, match=field):
        build.build(micro_runs.plain('frozen_lake', **changes))


def test_only_train_accepts_several_worlds():
    cfg = micro_runs.config('frozen_lake', **HALVES)
    with pytest.raises(ValueError, match='env.mix'):
        parts.build_environment(read_config(cfg), 'validation')
    with pytest.raises(ValueError, match='env.mix'):
        programs.shapes(cfg, None)


def test_worlds_with_different_small_tokenizers_need_an_explicit_one():
    def source(*shares, **changes):
        cfg = micro_runs.config('frozen_lake', **mixed(*shares) | changes)
        return loading.tokenizer_source(read_config(cfg, None))

    lake, maze = ('frozen_lake', 0.5), ('babyai', 0.5)
    assert source(lake, ('sokoban', 0.5)) == loading.BUNDLED_TOKENIZER
    assert source(('babyai', 1.0)).name == 'babyai.model'
    with pytest.raises(ValueError, match='model.tokenizer'):
        source(maze, lake)
    named = str(loading.BUNDLED_TOKENIZER)
    assert str(source(maze, lake, **{'model.tokenizer': named})) == named
