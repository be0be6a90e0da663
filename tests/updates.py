"""Update settings for tests: any optimiser, any split into steps and slices."""

import dataclasses

import jax.numpy as jnp

from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.rl.algorithm import Clip, Weights
from agentrl_jax.rl.learning import BatchSettings, Critic, Optim, UpdateSettings
from agentrl_jax.types import TrainState


@dataclasses.dataclass(frozen=True)
class Given(Optim):
    """The optimiser of a test, for policy and critic."""

    of: object = None

    def tx(self, lr, every=1):
        return self.of


@dataclasses.dataclass(frozen=True)
class Split(UpdateSettings):
    """Update settings with configurable rows per episode and untrained rows."""

    together: int = 1
    leaves_out: bool = False

    @property
    def rows_per_episode(self):
        return self.together

    @property
    def sparse(self):
        return self.leaves_out


def settings(
    rows,
    *,
    tx=None,
    algorithm=None,
    num_minibatches=1,
    num_microbatches=1,
    together=1,
    sparse=False,
    **fields,
):
    """Return update settings for a batch with n rows; section fields by name."""
    algorithm = algorithm or PPO(entropy_coef=0.0)
    clip = {n: fields.pop(f'clip_{n}') for n in ('low', 'high') if f'clip_{n}' in fields}
    if 'dual_clip' in fields:
        clip['dual'] = fields.pop('dual_clip')
    if clip:
        algorithm = dataclasses.replace(algorithm, clip=Clip(**clip))
    kl = {n.removeprefix('kl_'): fields.pop(n) for n in list(fields) if n.startswith('kl_')}
    if kl:
        coef = dict(where='loss', coef=0.1)
        algorithm = dataclasses.replace(
            algorithm, kl=dataclasses.replace(algorithm.kl, **(coef | kl))
        )
    if 'aggregation' in fields:
        weights = Weights(fields.pop('aggregation'), fields.pop('norm_length', None))
        algorithm = dataclasses.replace(algorithm, weights=weights)
    if 'entropy_coef' in fields:
        algorithm = dataclasses.replace(algorithm, entropy_coef=fields.pop('entropy_coef'))
    minibatch = rows // together // num_minibatches
    return Split(
        algorithm=algorithm,
        batch=BatchSettings(
            minibatch_rows=minibatch,
            microbatch_rows=minibatch * together // num_microbatches,
            epochs=fields.pop('epochs', 1),
            head_chunk=fields.pop('head_chunk', 2**20),
            widths=fields.pop('widths', 1),
            prefix_rows=fields.pop('prefix_rows', 1),
        ),
        critic=Critic(
            warmup_steps=fields.pop('critic_warmup', 0),
            updates=fields.pop('critic_updates', 1),
            freeze_attention=fields.pop('freeze_attention', False),
            clip=fields.pop('value_clip', 0.5),
            coef=fields.pop('value_coef', 1.0),
        ),
        optim=Optim() if tx is None else Given(of=tx),
        together=together,
        leaves_out=sparse,
        **fields,
    )


def state(tx, params, critic=None, **fields):
    """Return the TrainState at step 0, or with other fields; one optimiser for both networks."""
    start = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=tx.init(params),
        critic_params=critic,
        critic_opt_state=tx.init(critic) if critic else None,
        skipped=jnp.int32(0),
    )
    return start.replace(**fields)
