"""Scouts of a run: training with progress and a file to resume from, and their demonstrations."""

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.imitation import scout
from agentrl_jax.imitation.scout import Game, ScoutSettings, ScoutState
from agentrl_jax.machine import checksums, files
from agentrl_jax.records.progress import Progress
from agentrl_jax.run import parts, usage
from agentrl_jax.run.config import Config

FOLDER = 'scout'  # below the workdir: a file per world
PARTS = 20  # of a training, each followed by a save and a progress line
ABOUT = 'about'  # name in the file of the JSON that identifies the scout


def game_of(cfg: Config) -> Game:
    """Return the world of a run as a scout plays it; ValueError for a world on hosts.

    In a game of self-play the scout plays against the validation opponent.
    """
    if cfg.on_hosts:
        raise ValueError(f'env.name={cfg.env.name}: a scout needs an environment on the device')
    turns = cfg.env.max_turns * cfg.env.max_actions_per_turn
    (world,) = cfg.held_out.worlds
    return Game(world, min(cfg.env.max_actions_per_episode, turns))


def identity(cfg: Config, game: Game, settings: ScoutSettings) -> dict[str, Any]:
    """Return everything that determines a scout, as JSON values."""
    pool = {'train_levels': cfg.env.train_levels, 'pool_seed': cfg.env.pool_seed}
    return dataclasses.asdict(settings) | pool | {'world': repr(game.env), 'budget': game.budget}


def path_of(cfg: Config, workdir: Path) -> Path:
    return workdir / FOLDER / f'{cfg.env.name}.npz'


def save(path: Path, state: ScoutState, about: dict[str, Any]) -> None:
    """Write a scout; at any moment the file has the old or the new contents."""
    path.parent.mkdir(exist_ok=True)
    arrays = {name: np.asarray(x) for name, x in checksums.leaves(state).items()}
    with files.replacing(path) as partial, partial.open('wb') as file:
        np.savez(file, **arrays, **{ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)})


def restore(path: Path, like: ScoutState, about: dict[str, Any]) -> ScoutState:
    """Return a saved scout in the structure of `like`; ValueError if it has another identity."""
    arrays = _arrays(path)
    saved = json.loads(arrays.pop(ABOUT).tobytes())
    different = [name for name in about if saved.get(name) != about[name]]
    if different:
        changes = (f'{name}: {saved.get(name)} there, {about[name]} now' for name in different)
        raise ValueError(
            f'{path} has another scout ({"; ".join(changes)}). Use its config and flags, or delete '
            'the file'
        )
    shapes = {name: x.shape for name, x in checksums.leaves(like).items()}
    if {name: x.shape for name, x in arrays.items()} != shapes:
        raise ValueError(f'{path} is from another version. Delete it to train a new scout')
    leaves = [jnp.asarray(arrays[name]) for name in shapes]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as file:
            return dict(file)
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f'{path} is damaged ({error}). Delete it to train a new scout') from error


def trained_scout(cfg: Config, workdir: Path, steps: int | None = None) -> tuple[Game, Any, Any]:
    """Train or resume the scout of a run with one environment: (game, its network, its pool).

    steps: of the scout; None = those of the saved scout, else the default. Progress lines show
    success on the training levels since the last line, and of greedy play on the held-out levels.
    """
    game, path = game_of(cfg), path_of(cfg, workdir)
    if steps is None:
        saved = json.loads(_arrays(path)[ABOUT].tobytes()) if path.exists() else {}
        steps = saved.get('steps', ScoutSettings.steps)
    settings = ScoutSettings(seed=cfg.seed, steps=steps)
    about = identity(cfg, game, settings)
    pool = parts.build_environment(cfg, 'train')[1]
    fresh = jax.eval_shape(lambda: scout.start(game, pool, settings))
    if path.exists():
        state = restore(path, fresh, about)
    else:
        state = jax.jit(lambda: scout.start(game, pool, settings))()
    done, updates = int(state.update), settings.updates
    if done < updates and jax.process_count() > 1:
        raise ValueError(
            'a scout trains in one process: run python -m agentrl_jax.scout with this workdir first'
        )
    if done == updates:
        return game, state.net, pool
    held_out = parts.build_environment(cfg.held_out, 'validation')[1]
    with Progress(updates, f'scout of {cfg.env.name}', done=done) as progress:
        for part in range(1, PARTS + 1):
            until = updates * part // PARTS
            if until <= done:
                continue
            state, success = scout.train(state, pool, until, game=game, settings=settings)
            shown = dict(
                actions=f'{until * settings.envs * settings.length:,}',
                success=float(success),
                held_out=float(scout.evaluate(state.net, held_out, game=game)),
            )
            save(path, state, about)
            progress.advance(until - done, **shown)
            done = until
    chance = float(game.env.random_success(held_out, [game.budget]).mean())
    if shown['held_out'] <= chance:
        solves = f'the scout of {cfg.env.name} solves {shown["held_out"]:.1%} of held-out levels'
        usage.warn(f'{solves}, random play {chance:.1%}: a clone of it is useless')
    return game, state.net, pool


def expert_of(cfg: Config, workdir: Path) -> Callable[[Any, Any], list[list[int]]]:
    """Return (states, used) -> the scout's next actions per state, as TextEnvironment.plans.

    A plan has up to env.max_actions_per_turn greedy actions. Several are played in a copy of the
    world, which may draw other random events than the episode.
    """
    game, net, pool = trained_scout(cfg, workdir)
    count = cfg.env.max_actions_per_turn

    def plans(states, used):
        used = jnp.asarray(np.minimum(used, game.budget - 1), jnp.int32)
        states = jax.tree.map(jnp.asarray, states)
        names = np.asarray(scout.plan(net, states, used, pool, game=game, count=count))
        return [[int(name) for name in row if name >= 0] for row in names]

    return plans
