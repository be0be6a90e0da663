"""Elo ratings of checkpoints, random play and the expert in a two-player game.

  python -m agentrl_jax.extras.self_play.elo --workdir=runs/self_play [--against=runs/other,...] \\
      [--steps=0,100,200] [--games=256]

Plays a round robin on the test deals of --workdir's game, each deal twice with swapped seats.
Players are the checkpoints of --workdir (all, or those in --steps) and the newest checkpoint of
each run in --against. Each samples as in its validation. Prints ratings with 95 % intervals,
relative to random play = 0, and writes elo.json. For Leduc it also reports chips per game (reward)
and exploitability. Prompts and budgets of a run count the turns and actions of both players, and
the budgets must be large enough for a full game. Ratings count games won, not rewards: in poker a
player who folds often wins few games but may lose few chips.

Actions of a policy are drawn from exact probabilities (choices.py lists the requirements on a
config). Policies, random play and the expert, which moves on the host, are therefore played in the
same way, and the program of a policy is compiled once for all of its checkpoints.
"""

from absl import flags

from agentrl_jax.run import command

if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of a run, which defines the game.')
    flags.DEFINE_list('against', [], 'Folders of other runs; their newest policies also play.')
    flags.DEFINE_list('steps', [], 'Checkpoints of --workdir; default: all.')
    flags.DEFINE_integer('games', 256, 'Games per pair, an even number.')
    flags.DEFINE_integer('seed', 0, 'Seed of the moves.')
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
import pandas as pd

from agentrl_jax.extras.self_play import choices, exploitability, ratings
from agentrl_jax.extras.self_play.section import build_choices
from agentrl_jax.machine import checkpoint, files, sharding
from agentrl_jax.run import loading, parts
from agentrl_jax.run.config import Config
from agentrl_jax.text import task as text
from agentrl_jax.text.task import TextTask

CHUNK = 64  # states per call of a policy


@dataclasses.dataclass(frozen=True)
class Player:
    """A player of a game."""

    name: str
    chances: Callable  # (states [n, ...], actions so far) -> float [n, A]
    exploitability: float | None = None  # in chips; None if unknown


@dataclasses.dataclass(frozen=True)
class Game:
    """A two-player environment with its deals."""

    world: Any
    params: Any
    most: int  # maximum number of actions; a longer game is a draw

    @functools.cached_property
    def programs(self) -> tuple[Callable, ...]:
        """Return jitted (reset, look, step) for rows of states; look: (seat, over)."""
        world, params = self.world, self.params

        def look(state):
            return world.seat(state), world.is_terminated(state, params)

        def step(state, action):  # the deal determines all random outcomes
            _, after, reward, _, _ = world.step_env(jax.random.key(0), state, action, params)
            return after, reward

        reset = jax.vmap(lambda level: world.reset_level(level, params))
        return tuple(map(jax.jit, (reset, jax.vmap(look), jax.vmap(step))))


def play(game: Game, first: Player, second: Player, deals: int, seed: int) -> np.ndarray:
    """Return the rewards of `first` per deal in seat 0 and in seat 1, float [2, deals]."""
    reset, look, step = game.programs
    states = jax.device_get(reset(jnp.tile(jnp.arange(deals, dtype=jnp.int32), 2)))
    earned, rng = np.zeros(2 * deals), np.random.default_rng(seed)
    mine = np.repeat([0, 1], deals)  # seat of `first`
    for used in range(game.most):
        seat, over = jax.device_get(look(states))
        if over.all():
            break
        action, uniforms = np.full(2 * deals, -1), rng.random(2 * deals)
        for player, moves in ((first, seat == mine), (second, seat != mine)):
            rows = np.flatnonzero(moves & ~over)
            if len(rows):
                moving = jax.tree.map(lambda x, at=rows: x[at], states)
                action[rows] = draw(player.chances(moving, used), uniforms[rows])
        states, reward = jax.device_get(step(states, jnp.asarray(action, jnp.int32)))
        earned += np.where(over, 0, reward)
    return (earned * (1 - 2 * mine)).reshape(2, deals)


def draw(chances: np.ndarray, luck: np.ndarray) -> np.ndarray:
    """Draw an action per row of chances [n, A] with random numbers luck [n] in [0, 1); int [n]."""
    edges = np.cumsum(chances, 1)
    return (edges <= (luck * edges[:, -1])[:, None]).sum(1)


def at_random(game: Game) -> Player:
    """Return a player that chooses uniformly among the legal actions."""

    def chances(states, used):
        offered = np.asarray(states.game.legal_action_mask, np.float64)
        return offered / offered.sum(1, keepdims=True)

    return Player('random', chances)


def expert(game: Game) -> Player:
    """Return the expert of the environment's demonstrations."""

    def chances(states, used):
        plans = game.world.plans(states, np.full(len(states.time), used), game.most, game.params)
        return np.eye(game.world.num_actions)[[plan[0] for plan in plans]]

    return Player('expert', chances)


def policies(path: str, game: Game, steps: Sequence[int | None]) -> list[Player]:
    """Return the policy of each checkpoint of a run of the game, with one program for all."""
    cfg = in_self_play(loading.config_of_run(files.local_path(path)))
    if cfg.env.name != game.world.name:
        raise ValueError(f'{path} plays {cfg.env.name}, but --workdir plays {game.world.name}')
    tokenizer = loading.build_tokenizer(cfg)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    task = parts.build_text_task(cfg, tokenizer, 'test', mesh)
    players, probabilities = [], None
    for step in steps:
        config, params = loading.load_run(files.local_path(path), mesh=mesh, step=step)
        probabilities = probabilities or build_choices(cfg, config, task, tokenizer)
        folder = checkpoint.find_step(path, step=step)
        chips = None
        if cfg.env.name == 'leduc':
            chips = exploitability.exploitability_of(probabilities, params, task)
        chances = functools.partial(chances_of, probabilities, params, task)
        players.append(Player(f'{Path(path).name} {folder.name}', chances, chips))
    return players


def chances_of(asked: Callable, params: Any, task: TextTask, states: Any, used: int) -> np.ndarray:
    """Return action probabilities of a policy in n states after `used` actions, float [n, A]."""
    count, chunks = len(states.time), []
    for begin in range(0, count, CHUNK):
        rows = np.minimum(np.arange(begin, begin + CHUNK), count - 1)
        number = jnp.full(CHUNK, used, jnp.int32)
        worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.zeros(CHUNK, jnp.int32))
        worlds = worlds.replace(
            state=jax.tree.map(lambda x, at=rows: x[at], states), turn=number, used=number
        )
        chunks.append(np.asarray(asked(params, task, worlds), np.float64))
    return np.concatenate(chunks)[:count]


def in_self_play(cfg: Config) -> Config:
    """Return the config with self-play; ValueError if the config does not support it."""
    (world,) = cfg.worlds if len(cfg.worlds) == 1 else (None,)
    if not hasattr(world, 'seat'):
        raise ValueError(f'env.name={cfg.env.name!r} is not a two-player game')
    if needed := choices.unknown(cfg):
        raise ValueError(f'action probabilities require {needed}')
    return dataclasses.replace(cfg, worlds=(dataclasses.replace(world, opponent='self'),))


def elo(
    workdir: str, against: Sequence[str], steps: Sequence[int], *, games: int, seed: int, out: str
) -> list[dict[str, Any]]:
    """Return one record per player, best first, and write them to elo.json."""
    if games < 2 or games % 2:
        raise ValueError(f'--games={games} must be an even number of at least 2')
    cfg, deals = in_self_play(loading.config_of_run(files.local_path(workdir))), games // 2
    folder = files.check_workdir(out or workdir)  # fail before the games, which take long
    pool = dataclasses.replace(cfg, env=dataclasses.replace(cfg.env, eval_levels=deals))
    game = Game(*parts.build_environment(pool, 'test'), most=cfg.env.max_turns)
    all_steps = checkpoint.steps(files.local_path(workdir) / checkpoint.FOLDER)
    players = [at_random(game), expert(game), *policies(workdir, game, steps or all_steps)]
    for path in against:
        players += policies(path, game, [None])
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
    """Format the records as a table."""
    show = {name: '{:+.0f}'.format for name in ('elo', 'low', 'high')}
    show |= {'score': '{:.1%}'.format, 'reward': '{:+.3f}'.format}
    frame = pd.DataFrame(records).dropna(axis=1, how='all')
    return frame.to_string(index=False, na_rep='', float_format='%.3f', formatters=show)


def main() -> None:
    options = flags.FLAGS
    with command.running():
        if not all(step.isdigit() for step in options.steps):
            raise ValueError('--steps must be numbers, such as --steps=0,100')
        steps = [int(step) for step in options.steps]
        how = dict(games=options.games, seed=options.seed, out=options.out)
        print(table(elo(options.workdir, options.against, steps, **how)))


if __name__ == '__main__':
    main()
