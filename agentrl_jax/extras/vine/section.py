"""Settings of continuations and their hooks into a run."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.extras.vine import critic_error
from agentrl_jax.extras.vine.forks import CONTINUATIONS, Forked, with_forks
from agentrl_jax.extras.vine.vine import Vine
from agentrl_jax.models.functions import on_base
from agentrl_jax.rl.algorithm import KL_IN_LOSS
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.hooks import Extension, Moment, Parts, Probe
from agentrl_jax.run.rules import ON_DEVICE
from agentrl_jax.run.streams import COLLECT, LEVELS
from agentrl_jax.settings.marks import ZERO, ConfigName, In
from agentrl_jax.settings.rules import Must, Rule, exclude
from agentrl_jax.types import Episodes, Rollout


@dataclasses.dataclass(frozen=True)
class Forks(Extension):
    """Measurement of the critic: the episodes of a step are played again with continuations."""

    value_every: Annotated[int, ConfigName('fork.value_every'), ZERO] = 0  # ppo: steps between
    # measurements of the critic (value/vine_error) with two continuations per turn after the first;
    # 0 = off

    FREE_ON_RESUME = ('fork.value_every',)
    RULES = (
        *exclude(
            {'fork.value_every': 0},
            {
                **ON_DEVICE,
                'algorithm': Must('one with a critic', lambda run: run.algorithm.USES_CRITIC),
                'env.max_turns': In(low=2),
                'env.mix': (),
                'reward.function': '',
                'loss.estimator': {'token', 'bi_level'},
                'loss.gamma': 1,
                'turn_credit.turn_gamma': 1,
                'loss.reward_normalization': 'identity',
                'loss.bootstrap_truncated': False,
            },
            'the critic is compared with returns of replayed turns',
        ),
        Rule({'fork.value_every': 0} | KL_IN_LOSS, 'the critic is compared with returns'),
    )

    def settings(self, settings: RolloutSettings, cfg: Any) -> RolloutSettings:
        return forked(settings) if isinstance(cfg.algorithm, Vine) else settings

    def draw(self, episodes: Episodes, cfg: Any) -> Episodes:
        if not isinstance(cfg.algorithm, Vine):
            return episodes
        how, turns = cfg.algorithm, cfg.env.max_turns
        return with_forks(episodes, continuations=how.forks, max_turns=turns)

    def metrics(self, rollout: Rollout) -> dict[str, jax.Array]:
        if CONTINUATIONS not in rollout.extra:
            return {}
        continuations = rollout.extra[CONTINUATIONS]
        forks, sampled = continuations.turn > 0, continuations.rollout.action_mask
        counts = {'fork/played': forks.sum(1), 'fork/tokens': sampled.sum((1, 2))}
        some = rollout.healthy.any()
        return {
            name: jnp.where(some, masked_mean(x, rollout.healthy), jnp.nan).astype(jnp.float32)
            for name, x in counts.items()
        }

    def probes(self, parts: Parts) -> Iterator[Probe]:
        """Yield the probe of the critic's error on the episodes of a step, with continuations.

        These episodes are not trained on.
        """
        if not self.value_every:
            return
        # Compiler options are only valid for the outer jit.
        collect, turns = parts.collect(forked).__wrapped__, parts.config.env.max_turns
        options = parts.model.compiler_options
        full_return = parts.learning.algorithm.reward_on == 'episode'
        replicated = NamedSharding(parts.mesh, PartitionSpec())

        @functools.partial(jax.jit, out_shardings=replicated, compiler_options=options)
        def measure_critic(state, frozen, policy, task, step, levels, key):
            episodes = with_forks(parts.draw(levels, step), continuations=2, max_turns=turns)
            rollout, counters = collect(policy, task, episodes, key)
            fns = on_base(parts.fns, frozen.model)
            values = parts.score(state.params, state.critic_params, rollout, fns).values
            return critic_error.critic_error(values, rollout, whole=full_return), counters

        def measure(moment: Moment):
            step, streams = moment.step, moment.streams
            trained = moment.state, moment.frozen, moment.policy, moment.tasks[0]
            keys = streams.key(LEVELS), streams.key(COLLECT, step)
            metrics, counters = measure_critic(*trained, step, *keys)
            return metrics, [counters]

        yield Probe('the critic error', self.value_every, measure)


def forked(settings: RolloutSettings) -> RolloutSettings:
    """Return settings of rollouts with continuations."""
    # With a window, the cache holds only the last turns, which are prefilled again
    schedule = Forked(settings.schedule, copies=not settings.window)
    return dataclasses.replace(settings, schedule=schedule)
