"""agentrl_jax: reinforcement learning of language models that act over several turns, in JAX.

A step of training is five pure functions over four frozen pytrees. Shapes are at every field
(agentrl_jax/types.py). run/ binds these functions to their settings and jits them.

  Rollout     episodes as the sampler wrote them: tokens, log-probabilities, masks, turns, rewards
  Scores      what critic and reference say of each token
  Batch       what a loss needs: tokens, mask, advantages, targets
  TrainState  parameters, optimisers, step

  collect(params, task, episodes, key)            -> Rollout    plays episodes, all on the device
  Filter.select(rollout)                          -> Rollout    keeps the groups that train
  score(params, critic, reference, rollout)       -> Scores
  ALGORITHMS[name]().make_batch(rollout, scores)  -> Batch      advantages; .loss is its surrogate
  update_step(state, batch)                       -> TrainState, metrics

What they act on: a world of ENVIRONMENTS, which build_task turns into a conversation in token ids
(TextTask), and the Episodes of it to play. TurnStop and EpisodeStop say why a turn and an episode
ended.
The loop around them is agentrl_jax/train.py; every command is `python -m agentrl_jax.<command>`:
train, evaluate, elo, export, play, serve, serve_policy, view, plan, sweep, tables.
`python -m agentrl_jax` lists them.

Names are looked up when they are first used: importing the package alone imports nothing heavy, so
a command can read its flags before JAX starts.
"""

import importlib

__version__ = '0.1.0'

# Public name -> the module that defines it.
_MODULES = {
    'Rollout': 'types',
    'Scores': 'types',
    'Batch': 'types',
    'TrainState': 'types',
    'TurnStop': 'types',
    'EpisodeStop': 'types',
    'TextTask': 'text.task',
    'build_task': 'text.task',
    'Episodes': 'rollout.episodes',
    'collect': 'rollout.device',
    'Filter': 'rl.filtering',
    'score': 'rl.score',
    'update_step': 'rl.update',
    'ALGORITHMS': 'algorithms',
    'ENVIRONMENTS': 'envs.environments',
}
__all__ = tuple(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
