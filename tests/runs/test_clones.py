"""Cloned policies are kept for other runs, and only where these would clone the same."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.imitation import demonstrations
from agentrl_jax.imitation import kept as clones
from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.rl.learning import Optim
from agentrl_jax.run import cloning
from agentrl_jax.run import state as start
from agentrl_jax.run.build import build
from agentrl_jax.run.config import as_json
from agentrl_jax.run.streams import Streams

CLONES = {'clone.episodes': 16, 'clone.steps': 2, 'clone.batch': 8, 'clone.keep_in': '../clones'}


def opened(workdir, env='frozen_lake', **changes):
    """The parameters with which a run starts."""
    run = build(micro_runs.config(env, **(CLONES | changes)))
    checkpoints = train.checkpoint.open_checkpoints(workdir, keep=1)
    state = start.open_state(run, checkpoints, Streams(run.config.seed)).state
    train.checkpoint.close(checkpoints)
    return jax.device_get(state.params)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.soak
def test_another_algorithm_starts_from_the_clone_that_is_there(tmp_path, monkeypatch):
    alone = opened(tmp_path / 'alone', **{'clone.keep_in': ''})
    first = opened(tmp_path / 'first')
    monkeypatch.setattr(start, 'cloned_policy', lambda *_: pytest.fail('cloned again'))
    second = opened(tmp_path / 'second', algorithm='grpo', **{'optim.lr': 1e-2, 'steps': 7})
    (kept,) = (tmp_path / 'clones').iterdir()
    assert_same(first, alone)
    assert_same({name: second[name] for name in second}, {name: first[name] for name in second})
    assert len(kept.name) == 16


@pytest.mark.parametrize(
    'change',
    [
        {'seed': 1},
        {'clone.oracle': 0.4},
        {'optim.beta2': 0.9},
        {'env.max_turns': 3},
        {'model.dtype': 'bfloat16'},
    ],
)
def test_what_cloning_reads_asks_for_another_clone(change):
    one, other = (
        clones.key(as_json(micro_runs.config('frozen_lake', **(CLONES | more))))
        for more in ({}, change)
    )
    assert one != other


def test_only_the_betas_of_the_optimiser_ask_for_another_clone():
    """Arms with another schedule or weight decay cloned once more, to the same weights."""
    read = {field.name for field in dataclasses.fields(Optim)} - set(clones.UNREAD['optim'])
    assert read == {'beta1', 'beta2'}
    schedule = {'optim.schedule': 'cosine', 'optim.schedule_steps': 9, 'optim.final_lr': 0.1}
    one, other = (
        clones.key(as_json(micro_runs.config('frozen_lake', **(CLONES | more))))
        for more in ({}, schedule | {'optim.weight_decay': 0.0, 'optim.max_grad_norm': 2.0})
    )
    assert one == other


def test_weights_that_have_changed_ask_for_another_clone(tmp_path):
    """The path alone was in the key, and a run that goes on stays at its path."""
    assert clones.weights_of('') == ''
    (tmp_path / 'model.gguf').write_bytes(b'a')
    file = clones.weights_of(str(tmp_path / 'model.gguf'))
    folder = clones.weights_of(str(tmp_path))
    (tmp_path / 'model.gguf').write_bytes(b'ab')
    assert clones.weights_of(str(tmp_path / 'model.gguf')) != file
    assert clones.weights_of(str(tmp_path)) != folder
    found = []
    for step in (1, 2):
        kept = checkpoint.open_checkpoints(tmp_path / 'run', keep=2)
        checkpoint.save(kept, step, {'params': jnp.full(2, step)}, {})
        checkpoint.close(kept)
        found.append(clones.weights_of(str(tmp_path / 'run')))
    assert [name for name, _ in found] == ['1', '2'] and found[0][1] != found[1][1]


def test_what_a_demonstration_earns_is_not_cloned(tmp_path):
    """Arms with other rewards start from one clone."""
    other = {f'library.{name}_reward': 0.1 for name in ('tool', 'presence', 'answer')}
    other |= {'library.lookup_cost': 0.3, 'library.graded': True}
    first = opened(tmp_path / 'first', 'library')
    assert_same(opened(tmp_path / 'alone', 'library', **other, **{'clone.keep_in': ''}), first)
    (kept,) = (tmp_path / 'clones').iterdir()
    cfg = micro_runs.config('library', **(CLONES | other))
    assert clones.key(as_json(cfg)) == kept.name
    keys = []
    for changes in ({}, other):  # prompts that say what was earned are read by a clone
        keys.append(clones.key(as_json(micro_runs.config('library', **(CLONES | changes)))))
        told = micro_runs.config('library', **(CLONES | changes | {'env.prompt': 'ragen'}))
        keys.append(clones.key(as_json(told)))
    assert keys[0] == keys[2] and len(set(keys)) == 3


def test_arms_whose_episodes_differ_start_from_one_clone(tmp_path, monkeypatch):
    limits = {
        'clone.max_turns': 2,
        'clone.max_actions_per_turn': 3,
        'clone.max_tokens': 96,
        'clone.max_actions_per_episode': 6,
    }
    own = {name.replace('clone', 'env'): value for name, value in limits.items()}
    own['rollout.max_tokens'] = own.pop('env.max_tokens')
    of_its_own = opened(tmp_path / 'a', **own)
    monkeypatch.setattr(start, 'cloned_policy', lambda *_: pytest.fail('cloned again'))
    short = {'env.max_turns': 3, 'env.max_actions_per_turn': 1, 'rollout.max_tokens': 128}
    assert_same(opened(tmp_path / 'b', **(limits | short)), of_its_own)


def test_demonstrations_have_the_limits_of_the_clone(capsys):
    limits = {'clone.max_turns': 1, 'clone.max_actions_per_turn': 4, 'rollout.max_response': 12}
    run = build(micro_runs.config('frozen_lake', **(CLONES | limits)))
    longest = int(cloning.find_demonstrations(run).mask.sum(axis=1).max())
    texts = [
        len(demonstrations.answer_tokens(run.training.tasks[0], run.tokenizer, [0] * n)) + 1
        for n in range(5)
    ]
    assert longest == texts[4] < 2 * texts[2]  # one turn of four actions, not two of two
    # That turns have no room for them was said nowhere: what was cloned could never be finished
    said = f'answers have up to {longest} tokens, which rollout.max_response='
    assert (longest > 12) == (f'{said}12' in capsys.readouterr().err)
    rollout = dataclasses.replace(run.config.rollout, max_response=longest - 1)
    cfg = dataclasses.replace(run.config, rollout=rollout)
    cloning.find_demonstrations(types.SimpleNamespace(**vars(run) | {'config': cfg}))
    assert f'{said}{longest - 1} cuts' in capsys.readouterr().err


def test_lengths_of_answers_by_hand():
    mask = np.array([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0] * 5], bool)
    assert demonstrations.answer_lengths(mask).tolist() == [2, 1, 1]


def test_a_file_of_trajectories_is_known_by_what_is_in_it(tmp_path):
    file, keys = tmp_path / 'shown.json', set()
    for text in ('[]', '[1]', '[]'):
        file.write_text(text)
        cfg = micro_runs.config('frozen_lake', **{'clone.file': str(file)})
        keys.add(clones.key(as_json(cfg)))
    assert len(keys) == 2


def test_of_two_runs_that_clone_at_once_one_keeps_its_clone(tmp_path):
    config = as_json(micro_runs.config('frozen_lake', **CLONES))
    params, workdir = {'x': np.arange(3.0, dtype=np.float32)}, tmp_path / 'run'
    abstract = sharding.abstract_of(jax.device_put(params))

    def while_another_does():
        clones.kept(config, workdir, abstract, lambda: jax.device_put(params))
        return jax.device_put({'x': params['x'] + 1})

    assert clones.kept(config, workdir, abstract, while_another_does)['x'][0] == 1
    assert_same(clones.kept(config, workdir, abstract, None), params)
    assert [path.name for path in (tmp_path / 'clones').iterdir()] == [clones.key(config)]
