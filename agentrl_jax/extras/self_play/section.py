"""Settings of self-play and their hooks into a run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from agentrl_jax.envs import GAMES
from agentrl_jax.extras.self_play import choices, exploitability
from agentrl_jax.extras.self_play.player import ActorAndOpponent, Seated, WithOpponent
from agentrl_jax.extras.self_play.rae import RAE
from agentrl_jax.models.base import Model
from agentrl_jax.models.functions import ModelFns, policy_of
from agentrl_jax.rl.losses import HeadSettings
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.hooks import Extension, Parts
from agentrl_jax.run.streams import OPPONENT, Streams
from agentrl_jax.settings.marks import ONE, ZERO
from agentrl_jax.settings.rules import Must, Rule, exclude, must
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params, TrainState

TWO_PLAYERS = tuple(name for name, world in GAMES.items() if hasattr(world, 'seat'))
SNAPSHOTS = 'snapshots'  # in TrainState.extra: earlier policies, oldest first


def in_self_play(run: Any) -> bool:
    """Whether the policy plays both seats of a game."""
    return any(getattr(world, 'opponent', 'random') == 'self' for world in run.worlds)


IN_SELF_PLAY = {'opponent': Must(f"'self' of one of {', '.join(TWO_PLAYERS)}", in_self_play)}


@dataclasses.dataclass(frozen=True)
class SelfPlay(Extension):
    """Games in which the policy plays both seats (connect_four.opponent, leduc.opponent)."""

    snapshots: Annotated[int, ZERO] = 0  # number of earlier policies; in each step one of them
    # plays the other seat, which costs a second model in rollouts; 0: the policy plays both seats
    every: Annotated[int, ONE] = 25  # steps between snapshots

    RULES = (
        Rule(IN_SELF_PLAY | {'self_play.snapshots': 0}),
        must(
            'algorithm',
            'an algorithm for one player',
            lambda run: not run.algorithm.CREDITS_SEATS,
            unless=IN_SELF_PLAY,
        ),
        *exclude(
            {'opponent': Must("'random'", lambda run: not in_self_play(run))},
            {
                'algorithm': Must("'rae'", lambda run: run.algorithm.CREDITS_SEATS),
                'env.mix': (),
                'context.window': 1,
                'context.summary': 0,
                'env.max_actions_per_turn': 1,
                'agent.name': {'act', 'react', 'reflect'},
                'agent.trials': 1,
                'reward.function': '',
                'clone.episodes': 0,
                'clone.file': '',
            },
            'the policy plays both seats of the game',
        ),
        Rule({'self_play.snapshots': 0, 'alarm.mi_every': 0}),
        must(
            'rollout.group_size',
            'an even number of at least 4',
            lambda run: run.rollout.group_size >= 4 and run.rollout.group_size % 2 == 0,
            unless={'self_play.snapshots': 0},
        ),
    )

    def settings(self, settings: RolloutSettings, cfg: Any) -> RolloutSettings:
        if not isinstance(cfg.algorithm, RAE):
            return settings
        player = (WithOpponent if self.snapshots else Seated)(settings.player.model)
        return dataclasses.replace(settings, player=player)

    def start_state(self, policy: Params) -> dict[str, Any]:
        if not self.snapshots:
            return {}
        return {SNAPSHOTS: tuple(jax.tree.map(jnp.copy, policy) for _ in range(self.snapshots))}

    def begin_step(self, state: TrainState, step: int, *, first: bool) -> TrainState:
        due = step > 0 and step % self.every == 0
        if not self.snapshots or not (first or due):  # the first step compiles push
            return state
        snapshots = push(state.params, state.extra[SNAPSHOTS])
        return state.replace(extra=state.extra | {SNAPSHOTS: snapshots}) if due else state

    def actor(
        self, policy: Params, state: TrainState, base: Params, streams: Streams, step: int
    ) -> Params | ActorAndOpponent:
        if not self.snapshots:
            return policy
        number = streams.draw(OPPONENT, step, self.snapshots)
        return ActorAndOpponent(policy, policy_of(state.extra[SNAPSHOTS][number], base))

    def eval_probes(self, parts: Parts) -> dict[str, Callable[[Params], float]]:
        if parts.config.env.name != 'leduc' or choices.unknown(parts.config):
            return {}
        env = dataclasses.replace(parts.task.env, opponent='self')  # same texts
        task = parts.task.replace(env=env)
        probabilities = build_choices(parts.config, parts.model, task, parts.tokenizer)
        measure = functools.partial(exploitability.exploitability_of, probabilities, task=task)
        return {'eval/exploitability': measure}


@jax.jit
def push(params: Params, snapshots: tuple[Params, ...]) -> tuple[Params, ...]:
    """Append the parameters to the snapshots and drop the oldest."""
    return (*snapshots[1:], jax.tree.map(jnp.copy, params))


def build_choices(cfg: Any, model: Model, task: Task, tokenizer: Tokenizer) -> Callable:
    """Return a jitted (params, task, worlds) -> action probabilities at eval.temperature."""
    probabilities = functools.partial(
        choices.action_probabilities,
        answers=choices.spelled(task, tokenizer),
        fns=ModelFns(model.forward, model.head_kernel),
        settings=HeadSettings(cfg.eval.temperature, bits=task.grammar.bits),
    )
    return jax.jit(probabilities)
