"""Elo of the checkpoints of runs, and of random play and the expert, in a game of two players.

  python -m agentrl_jax.extras.self_play.elo --workdir=runs/self_play [--against=runs/other,...] \\
      [--steps=0,100,200] [--games=256]

Everybody plays everybody on the test deals of --workdir's game, each deal twice, with seats
swapped. Players are the checkpoints of --workdir (those of --steps, or all that were kept) and the
newest one of each run in --against, which sample as in their own validation. Prints ratings with
95 % intervals, random play = 0, and writes elo.json; of Leduc also chips a game (reward) and the
exploitability. Turns and actions are those of both players, in prompts that count them and in the
budgets of a run, which must hold a whole game. A rating is of games won, not of what they paid: in
poker who folds much wins seldom and may still lose little.

A policy's actions are drawn from their exact probabilities (choices.py says
what that needs of a config), so that policies, random play and the expert, whose moves are made on
the host, play in one way; a policy's program is compiled once for all of its checkpoints.
"""

from absl import flags, logging

from agentrl_jax.run import command, usage

if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of a run; its game is played.')
    flags.DEFINE_list('against', [], 'Folders of other runs, whose newest policies play too.')
    flags.DEFINE_list('steps', [], 'Checkpoints of --workdir; default: all.')
    flags.DEFINE_integer('games', 256, 'Games of each pair, an even number.')
    flags.DEFINE_integer('seed', 0, 'Of the moves.')
    flags.DEFINE_string('out', '', 'Folder for elo.json; default: the workdir.')
    command.begin(__doc__, needs=('workdir',), says='agentrl_jax.extras.self_play.elo: loading')

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.self_play import choices, exploitability, ratings
from agentrl_jax.extras.self_play.section import build_choices
from agentrl_jax.machine import checkpoint, files, sharding
from agentrl_jax.run import parts
from agentrl_jax.run.config import Config
from agentrl_jax.text import task as text
from agentrl_jax.text.task import TextTask

CHUNK = 64  # states that a policy is asked about at once


@dataclasses.dataclass(frozen=True)
class Player:
    """Somebody who plays a game."""

    name: str
    chances: Callable  # (states [n, ...], actions so far) -> float [n, A]
    exploitability: float | None = None  # in chips, where it is known


@dataclasses.dataclass(frozen=True)
class Game:
    """Both seats of a world's deals."""

    world: Any
    params: Any
    most: int  # actions of a game; one that goes on is a draw

    @functools.cached_property
    def programs(self) -> tuple[Callable, ...]:
        """(reset, look, step) of rows of states, jitted; look: (seat, over)."""
        world, params = self.world, self.params

        def look(state):
            return world.seat(state), world.is_terminated(state, params)

        def step(state, action):  # a deal holds all luck that there is
            _, after, reward, _, _ = world.step_env(jax.random.key(0), state, action, params)
            return after, reward

        reset = jax.vmap(lambda level: world.reset_level(level, params))
        return tuple(map(jax.jit, (reset, jax.vmap(look), jax.vmap(step))))


def play(game: Game, first: Player, second: Player, deals: int, seed: int) -> np.ndarray:
    """float [2, deals]: what `first` earned of each deal in seat 0, and in seat 1."""
    reset, look, step = game.programs
    states = jax.device_get(reset(jnp.tile(jnp.arange(deals, dtype=jnp.int32), 2)))
    earned, rng = np.zeros(2 * deals), np.random.default_rng(seed)
    mine = np.repeat([0, 1], deals)  # seat of `first`
    for used in range(game.most):
        seat, over = jax.device_get(look(states))
        if over.all():
            break
        action, luck = np.full(2 * deals, -1), rng.random(2 * deals)
        for player, moves in ((first, seat == mine), (second, seat != mine)):
            rows = np.flatnonzero(moves & ~over)
            if len(rows):
                asked = jax.tree.map(lambda x, at=rows: x[at], states)
                action[rows] = draw(player.chances(asked, used), luck[rows])
        states, reward = jax.device_get(step(states, jnp.asarray(action, jnp.int32)))
        earned += np.where(over, 0, reward)
    return (earned * (1 - 2 * mine)).reshape(2, deals)


def draw(chances: np.ndarray, luck: np.ndarray) -> np.ndarray:
    """int [n]: an action of each row of chances [n, A], by luck [n] in [0, 1)."""
    edges = np.cumsum(chances, 1)
    return (edges <= (luck * edges[:, -1])[:, None]).sum(1)


def at_random(game: Game) -> Player:
    """Any action on offer, all alike."""

    def chances(states, used):
        offered = np.asarray(states.game.legal_action_mask, np.float64)
        return offered / offered.sum(1, keepdims=True)

    return Player('random', chances)


def expert(game: Game) -> Player:
    """The player of the world's demonstrations."""

    def chances(states, used):
        plans = game.world.plans(states, np.full(len(states.time), used), game.most, game.params)
        return np.eye(game.world.num_actions)[[plan[0] for plan in plans]]

    return Player('expert', chances)


def policies(path: str, steps: Sequence[int | None]) -> list[Player]:
    """The policy of each checkpoint of a run, with one program."""
    cfg = in_self_play(parts.config_of_run(files.local_path(path)))
    tokenizer = parts.build_tokenizer(cfg)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    task = parts.build_text_task(cfg, tokenizer, 'test', mesh)
    found, asked = [], None
    for step in steps:
        config, params = parts.load_run(files.local_path(path), mesh=mesh, step=step)
        asked = asked or build_choices(cfg, config, task, tokenizer)
        folder = checkpoint.find_step(path, step=step)
        chips = None
        if cfg.env.name == 'leduc':
            chips = exploitability.exploitability_of(asked, params, task)
        chances = functools.partial(chances_of, asked, params, task)
        found.append(Player(f'{Path(path).name} {folder.name}', chances, chips))
    return found


def chances_of(asked: Callable, params: Any, task: TextTask, states: Any, used: int) -> np.ndarray:
    """float [n, A]: what a policy would do in n states after `used` actions, a chunk at a time."""
    count, found = len(states.time), []
    for begin in range(0, count, CHUNK):
        rows = np.minimum(np.arange(begin, begin + CHUNK), count - 1)
        number = jnp.full(CHUNK, used, jnp.int32)
        worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.zeros(CHUNK, jnp.int32))
        worlds = worlds.replace(
            state=jax.tree.map(lambda x, at=rows: x[at], states), turn=number, used=number
        )
        found.append(np.asarray(asked(params, task, worlds), np.float64))
    return np.concatenate(found)[:count]


def in_self_play(cfg: Config) -> Config:
    """The config with both seats in the hands of the players; ValueError where that cannot be."""
    (world,) = cfg.worlds if len(cfg.worlds) == 1 else (None,)
    if not hasattr(world, 'seat'):
        raise ValueError(f'env.name={cfg.env.name!r} is no game of two players')
    if needed := choices.unknown(cfg):
        raise ValueError(f'the probabilities of actions are only known with {needed}')
    return dataclasses.replace(cfg, worlds=(dataclasses.replace(world, opponent='self'),))


def elo(
    workdir: str, against: Sequence[str], steps: Sequence[int], *, games: int, seed: int, out: str
) -> list[dict[str, Any]]:
    """A record of each player, the best one first; also written to elo.json."""
    if games < 2 or games % 2:
        raise ValueError(f'--games={games} must be an even number from 2 on')
    cfg, deals = in_self_play(parts.config_of_run(files.local_path(workdir))), games // 2
    folder = files.check_workdir(out or workdir)  # before the games, which take long
    pool = dataclasses.replace(cfg, env=dataclasses.replace(cfg.env, eval_levels=deals))
    game = Game(*parts.build_environment(pool, 'test'), most=cfg.env.max_turns)
    kept = checkpoint.steps(files.local_path(workdir) / checkpoint.FOLDER)
    players = [at_random(game), expert(game), *policies(workdir, steps or kept)]
    for path in against:
        other = in_self_play(parts.config_of_run(files.local_path(path)))
        if other.env.name != cfg.env.name:
            raise ValueError(f'{path} plays {other.env.name}, and {workdir} {cfg.env.name}')
        players += policies(path, [None])
    number = len(players)
    earned = np.full((number, number, deals, 2), np.nan)
    for i, j in itertools.combinations(range(number), 2):
        paid = play(game, players[i], players[j], deals, seed + number * i + j).T
        earned[i, j], earned[j, i] = paid, -paid[:, ::-1]
    points = np.where(np.isnan(earned), np.nan, (np.sign(earned) + 1) / 2)
    rated = ratings.intervals(points, seed=seed)
    records = [
        {
            'player': player.name,
            'elo': float(rating),
            'low': float(low),
            'high': float(high),
            'score': float(np.nanmean(points[i])),
            'reward': float(np.nanmean(earned[i])),
            'exploitability': player.exploitability,
        }
        for i, (player, rating, low, high) in enumerate(zip(players, *rated, strict=True))
    ]
    records.sort(key=lambda one: -one['elo'])
    files.write_atomic(folder / 'elo.json', json.dumps(records, indent=2) + '\n')
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records in columns."""
    wide = max(len(one['player']) for one in records)
    rows = [f'{"player":{wide}}   Elo      95 %        score   reward   exploitability']
    for one in records:
        chips = one['exploitability']
        rows.append(
            f'{one["player"]:{wide}} {one["elo"]:+5.0f} [{one["low"]:+5.0f}, {one["high"]:+5.0f}] '
            f'{100 * one["score"]:6.1f} % {one["reward"]:+8.3f}'
            + ('' if chips is None else f'   {chips:.3f}')
        )
    return '\n'.join(rows)


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    command.check_backend()
    given = flags.FLAGS
    try:
        with usage.checked():
            if not all(step.isdigit() for step in given.steps):
                raise ValueError('--steps must be numbers, such as --steps=0,100')
            steps = [int(step) for step in given.steps]
            how = dict(games=given.games, seed=given.seed, out=given.out)
            print(table(elo(given.workdir, given.against, steps, **how)))
    except (ValueError, OSError) as error:
        usage.end(files.in_words(error), error)


if __name__ == '__main__':
    main()
