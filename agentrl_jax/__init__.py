"""agentrl_jax: multi-turn reinforcement learning of LLM agents in JAX.

A training step is five pure functions over four frozen pytrees. agentrl_jax/types.py declares the
shape of every field. run/ binds these functions to their settings and jits them.

  Rollout     episodes as the sampler wrote them: tokens, log-probabilities, masks, turns, rewards
  Scores      values and reference log-probabilities of each token
  Batch       inputs of a loss: tokens, mask, advantages, targets
  TrainState  parameters, optimisers, step

  collect(params, task, episodes, key)            -> Rollout    plays episodes on the device
  Filter.select(rollout)                          -> Rollout    keeps the groups that train
  score(params, critic, reference, rollout)       -> Scores
  ALGORITHMS[name]().make_batch(rollout, scores)  -> Batch      advantages; .loss is its surrogate
  update_step(state, batch)                       -> TrainState, metrics

Their inputs are an environment from ENVIRONMENTS, which build_task turns into a conversation in
token ids (TextTask), and the Episodes to play. TurnStop and EpisodeStop are the reasons why a turn
or an episode ended.

agentrl_jax/train.py is the loop around these functions. Commands are `python -m agentrl_jax.NAME`;
`python -m agentrl_jax` lists them.

Names are imported on first use: importing the package imports nothing heavy, so a command can read
its flags before JAX starts.
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
    'Episodes': 'types',
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
