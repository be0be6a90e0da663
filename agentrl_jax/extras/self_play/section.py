"""Settings of self-play, and how a run plays both seats of a game."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from agentrl_jax.envs import GAMES
from agentrl_jax.extras.self_play import choices, exploitability
from agentrl_jax.extras.self_play.player import Pair, Seated, WithOpponent
from agentrl_jax.extras.self_play.rae import RAE
from agentrl_jax.models.base import Model
from agentrl_jax.models.functions import policy_of
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.hooks import Extension, Parts
from agentrl_jax.run.streams import OPPONENT, Streams
from agentrl_jax.settings.marks import ONE, ZERO
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params, TrainState

TWO_PLAYERS = tuple(name for name, world in GAMES.items() if hasattr(world, 'seat'))
SNAPSHOTS = 'snapshots'  # in TrainState.extra: earlier policies, the oldest first


@dataclasses.dataclass(frozen=True)
class SelfPlay(Extension):
    """Games whose both seats are the policy (connect_four.opponent, leduc.opponent)."""

    snapshots: Annotated[int, ZERO] = 0  # earlier policies that are kept; each step one of them has
    # the other seat, which costs a second model while playing; 0: the policy plays both seats
    every: Annotated[int, ONE] = 25  # steps from one snapshot to the next

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        """What would show a seat the other one's cards, or count both seats as one player."""
        del shards
        given = f'algorithm={run.algorithm_name!r}'
        if not any(getattr(world, 'opponent', 'random') == 'self' for world in run.worlds):
            if run.algorithm.CREDITS_SEATS:
                yield (
                    f'{given} credits both seats of a game: set opponent=self of one of '
                    f'{", ".join(TWO_PLAYERS)}, or take another algorithm'
                )
            if self.snapshots:
                yield (
                    f'self_play.snapshots={self.snapshots} has no effect without a game in '
                    'self-play: set it to 0'
                )
            return
        asked = 'opponent=self'
        if not run.algorithm.CREDITS_SEATS:
            yield (
                f'{asked} pays one seat what the other one loses, and {given} credits one player: '
                'take rae'
            )
        if run.env.mix:
            yield f'{asked} does not go with several worlds (env.mix={run.env.mix!r}): set it to ()'
        if run.context.window != 1 or run.context.summary:
            yield (
                f'{asked} needs context.window=1 and context.summary=0, by which a seat does not '
                'see what the other one saw and answered'
            )
        if run.env.max_actions_per_turn != 1:
            yield (
                f'{asked} plays one action of a seat a turn: set env.max_actions_per_turn='
                f'{run.env.max_actions_per_turn} to 1'
            )
        if run.agent.name == 'plan' or run.agent.trials > 1:
            yield (
                f'{asked} plays one game of turns that act: set agent.name to act or react and '
                'agent.trials to 1'
            )
        if run.reward.function:
            yield (
                f'{asked} needs what a game pays, to give the other seat minus that: '
                f'reward.function={run.reward.function!r} must be left empty'
            )
        if run.clone.demonstrates:
            yield (
                f'{asked} has no demonstrations, which are of whole episodes: set clone.episodes '
                "to 0 and clone.file to '', and name a run cloned before in model.path"
            )
        if self.snapshots and run.alarm.mi_every:
            yield (
                f'alarm.mi_every={run.alarm.mi_every} measures answers of the policy, and '
                f'self_play.snapshots={self.snapshots} has others play too: set it to 0'
            )
        if self.snapshots and (run.rollout.group_size < 4 or run.rollout.group_size % 2):
            yield (
                f'self_play.snapshots={self.snapshots} gives the policy either seat in half of the '
                f'episodes of a group: set rollout.group_size={run.rollout.group_size} to an even '
                'number from 4 on'
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
        if not self.snapshots or not (first or due):  # the first step compiles it
            return state
        snapshots = push(state.params, state.extra[SNAPSHOTS])
        return state.replace(extra=state.extra | {SNAPSHOTS: snapshots}) if due else state

    def actor(
        self, policy: Params, state: TrainState, base: Params, streams: Streams, step: int
    ) -> Params | Pair:
        if not self.snapshots:
            return policy
        number = streams.draw(OPPONENT, step, self.snapshots)
        return Pair(policy, policy_of(state.extra[SNAPSHOTS][number], base))

    def eval_probes(self, parts: Parts) -> dict[str, Callable[[Params], float]]:
        if parts.cfg.env.name != 'leduc' or choices.unknown(parts.cfg):
            return {}
        env = dataclasses.replace(parts.task.env, opponent='self')  # of the same texts
        task = parts.task.replace(env=env)
        probabilities = build_choices(parts.cfg, parts.model, task, parts.tokenizer)
        measure = functools.partial(exploitability.exploitability_of, probabilities, task=task)
        return {'eval/exploitability': measure}


@jax.jit
def push(params: Params, snapshots: tuple[Params, ...]) -> tuple[Params, ...]:
    """The snapshots with the parameters as the newest and without the oldest."""
    return (*snapshots[1:], jax.tree.map(jnp.copy, params))


def build_choices(cfg: Any, model: Model, task: Task, tokenizer: Tokenizer) -> Callable:
    """Jitted (params, task, worlds) -> choices.action_probabilities, as validation samples."""
    answers = choices.spelled(task, tokenizer)
    probabilities = functools.partial(
        choices.action_probabilities,
        answers=answers,
        hidden_fn=model.forward,
        head_fn=model.head_kernel,
        bits=task.grammar.bits,
        temperature=cfg.eval.temperature,
    )
    return jax.jit(probabilities)
