"""The smallest complete runs: a config of seconds for each environment."""

import contextlib
import functools
import json
import os
import pathlib

import jax
import numpy as np

from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.run import parts
from agentrl_jax.run import state as start
from agentrl_jax.run.config import effective
from configs import base

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_TOKENS = {'frozen_lake': 96, 'sokoban': 144, 'bandit': 224, 'library': 112}


def config(name, **changes):
    """Return the effective config of a plain one."""
    return effective(plain(name, **changes))


def plain(name, **changes):
    """Reduce base.get_config() to 16 episodes and 3 steps; changes: dotted fields."""
    cfg = base.get_config()
    cfg.steps = 3
    cfg.env.name = name
    cfg.env.prompt = 'brief'
    cfg.env.max_turns = 2
    cfg.env.max_actions_per_turn = 2
    cfg.env.max_actions_per_episode = 4
    cfg.env.train_levels = 32
    cfg.env.eval_levels = 12
    cfg.sokoban.search_depth = 10
    cfg.bandit.pairs = 'v0423'
    cfg.model.hidden_size = 32
    cfg.model.intermediate_size = 64
    cfg.model.num_layers = 1
    cfg.model.num_heads = 2
    cfg.model.num_kv_heads = 1
    cfg.rollout.num_groups = 4
    cfg.rollout.group_size = 4
    cfg.rollout.max_tokens = MAX_TOKENS[name] if name in MAX_TOKENS else 224
    cfg.rollout.max_response = 6
    cfg.rollout.serve_rows = 4
    cfg.optim.lr = 1e-3
    cfg.optim.critic_lr = 1e-3
    cfg.batch.minibatch_rows = 8
    cfg.batch.microbatch_rows = 8
    cfg.batch.head_chunk = 512
    cfg.clone.batch = 16
    cfg.clone.lr = 2e-2
    cfg.eval.every = 2
    cfg.checkpoint.every = 2
    cfg.log.rollouts_every = 2
    cfg.update_from_flattened_dict(changes)
    return cfg


@contextlib.contextmanager
def one_device():
    """Use the first device, or the config's number of devices; the value builds other meshes."""
    make = parts.build_mesh

    def smallest(cfg, devices=None):
        count = max(cfg.mesh.data, 1) * cfg.mesh.fsdp * cfg.mesh.tensor
        return make(cfg, devices or jax.devices()[:count])

    parts.build_mesh = smallest
    try:
        yield make
    finally:
        parts.build_mesh = make


def without_times(rows):
    """Return rows of metrics.jsonl without times and memory."""
    timed = ('time', 'perf/', 'hosts/')  # waiting for worlds depends on time
    return [
        {n: x for n, x in row.items() if n == 'perf/recompiles' or not n.startswith(timed)}
        for row in rows
    ]


def saved_state(cfg, workdir, step=None):
    """Load the TrainState of a checkpoint on the host; by default the newest."""
    opened = checkpoint.open_checkpoints(workdir, keep=100)
    state, _ = checkpoint.restore(opened, abstract_state(cfg.to_json_best_effort()), step=step)
    checkpoint.close(opened)
    return jax.device_get(state)


@functools.cache
def abstract_state(text):
    from agentrl_jax import train  # its build may share parts with the run

    cfg = base.get_config()
    cfg.update(json.loads(text))
    run = train.build(cfg)
    return sharding.abstract_of(start.start_state(run, run.params))


def get_config():
    """Config of the subprocess tests: everything that a checkpoint can hold, in 20 quick steps."""
    return plain(
        'frozen_lake',
        **{
            'steps': 20,
            'eval.every': 6,
            'checkpoint.every': 4,
            'log.rollouts_every': 7,
            'filter.keep': 0.5,
            'loss.kl_coef': 0.05,
            'clone.episodes': 32,
            'clone.steps': 12,
            'curriculum.rounds': (1, 2),
            'curriculum.stage_steps': 8,
        },
    )


def environment(**more):
    """Return the environment of a subprocess that shares programs (see conftest.py)."""
    return dict(os.environ, PYTHONPATH=f'{ROOT}{os.pathsep}{ROOT / "tests"}', **more)


def assert_same(one, other):
    """Compare all arrays of two trees bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, one, other)
