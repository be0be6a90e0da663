"""Levels of BabyAI as arrays: exported once by `minigrid`, kept in files, read without it.

A level is named by AgentGym's data_idx: LEVELS[data_idx % 40], drawn by minigrid with the seed
data_idx // 40. levels.npz holds the first seeds of each level; further ones are exported on demand
and kept in the user's cache folder, block by block.

  python -m agentrl_jax.envs.babyai.pool      exports levels.npz again
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl_jax.envs.babyai.export import MINIGRID, export_levels
from agentrl_jax.envs.splits import check_split, level_split

LEVELS = tuple(
    (
        'GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 '
        'GoToImpUnlock GoToSeqS5R2 GoToRedBlueBall GoToDoor GoToObjDoor Open OpenRedDoor '
        'OpenDoorLoc OpenRedBlueDoorsDebug OpenDoorsOrderN4Debug Pickup UnblockPickup PickupLoc '
        'PickupDistDebug PickupAbove PutNextLocalS6N4 PutNextS7N4Carrying Unlock UnlockLocalDist '
        'KeyInBox UnlockPickupDist BlockedUnlockPickup UnlockToUnlock ActionObjDoor FindObjS7 '
        'KeyCorridorS6R3 OneRoomS20 MoveTwoAcrossS8N9 SynthS5R2 SynthLoc SynthSeq MiniBossLevel '
        'BossLevel BossLevelNoUnlock'
    ).split()
)
FIRST_SEEDS, BLOCK_SEEDS, MOST_BLOCKS = 250, 256, 20
MORE_SEEDS = {'GoToLocalS8N7': 1500, 'PickupLoc': 1500}  # first seeds of the demo's levels
FIRST_FILE = Path(__file__).with_name('levels.npz')


@functools.cache
def first_levels() -> dict[str, np.ndarray]:
    """Return the levels of levels.npz, name by name."""
    with np.load(FIRST_FILE) as stored:
        return {key: stored[key] for key in stored.files}


def cache_folder() -> Path:
    """Return the folder of exported blocks."""
    root = os.environ.get('XDG_CACHE_HOME', '~/.cache')
    return Path(root).expanduser() / 'agentrl_jax' / f'babyai-minigrid-{MINIGRID}'


@functools.cache
def block(name: str, index: int) -> dict[str, np.ndarray]:
    """Levels of a block of seeds: the first ones, which come with the package, then others."""
    if name not in LEVELS:
        raise ValueError(f'levels: {name!r} is not one of {", ".join(LEVELS)}')
    if index == 0:
        before = LEVELS[: LEVELS.index(name)]
        start = sum(len(block_seeds(other, 0)) for other in before)
        rows = slice(start, start + len(block_seeds(name, 0)))
        return {key: values[rows] for key, values in first_levels().items()}
    path = cache_folder() / f'{name}-{index}.npz'
    if not path.exists():
        write(path, export_levels(name, block_seeds(name, index)))
    with np.load(path) as stored:
        return {key: stored[key] for key in stored.files}


def block_seeds(name: str, index: int) -> range:
    """minigrid's seeds of a block."""
    first = MORE_SEEDS.get(name, FIRST_SEEDS)
    if index == 0:
        return range(first)
    start = first + (index - 1) * BLOCK_SEEDS
    return range(start, start + BLOCK_SEEDS)


def write(path: Path, levels: dict[str, np.ndarray]) -> None:
    """Complete or not at all: several processes may export the same block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix='.part', delete=False) as part:
        np.savez_compressed(part, **levels)
    os.replace(part.name, path)


def draw(
    split: str | None, num_levels: int, names: Sequence[str], *, seed: int
) -> dict[str, np.ndarray]:
    """Different levels of a split: the arrays of export.empty_levels, and data_idx [num_levels].

    The names alternate and have equal shares; the seed chooses among the exported levels.
    Small maps run out: GoToObjS6 has a few hundred levels.
    """
    check_split(split)
    quota = [num_levels // len(names) + (i < num_levels % len(names)) for i in range(len(names))]
    parts = [
        share(name, split, count, seed=seed)
        for name, count in zip(names, quota, strict=True)
        if count
    ]
    place = np.concatenate([np.arange(len(part['agent'])) for part in parts])
    order = np.argsort(place, kind='stable')
    return {key: np.concatenate([part[key] for part in parts])[order] for key in parts[0]}


def share(name: str, split: str | None, count: int, *, seed: int) -> dict[str, np.ndarray]:
    """Return `count` levels of one name; reads further blocks until there are enough."""
    found, blocks, known = [], 0, set()
    while len(found) < count:
        if blocks == MOST_BLOCKS:
            raise ValueError(
                f'num_levels: {name} has {len(found)} different levels of split {split} among '
                f'{blocks} blocks of seeds, not {count}: use fewer levels'
            )
        for row, key in enumerate(block_keys(name, blocks)):
            fits = split is None or level_split(key) == split
            if fits and key not in known:
                found.append((blocks, row))
                known.add(key)
        blocks += 1
    chosen = np.random.default_rng(seed).permutation(len(found))[:count]
    picked = [found[i] for i in sorted(chosen)]
    first = block(name, 0)
    part = {key: np.stack([block(name, b)[key][row] for b, row in picked]) for key in first}
    seeds = [block_seeds(name, b)[row] for b, row in picked]
    return part | {'data_idx': np.array(seeds, np.int32) * len(LEVELS) + LEVELS.index(name)}


def numbered(ids: Sequence[int]) -> dict[str, np.ndarray]:
    """The levels of AgentGym's numbers, in their order: arrays as of draw."""
    rows = []
    for number in ids:
        seed, index = divmod(number, len(LEVELS))
        name = LEVELS[index]
        later = seed - len(block_seeds(name, 0))
        place = 0 if later < 0 else 1 + later // BLOCK_SEEDS
        levels, row = block(name, place), seed - block_seeds(name, place).start
        rows.append({key: values[row] for key, values in levels.items()})
    arrays = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return arrays | {'data_idx': np.array(ids, np.int32)}


def ids_of(text: str) -> list[int]:
    """Numbers of levels: '0:3,7' is 0, 1, 2 and 7."""
    found = []
    for part in text.split(','):
        first, _, end = part.partition(':')
        if not first.isdigit() or not (end or first).isdigit():
            raise ValueError(f'{part!r} in {text!r} is neither a number nor a range such as 0:810')
        found += range(int(first), int(end or int(first) + 1))
    return found


def agentgym_split(
    split: str | None, num_levels: int, train_ids: str, test_ids: str
) -> dict[str, np.ndarray]:
    """The first `num_levels` of the numbers of one list: train_ids, or test_ids for other splits.

    The lists share no number; whether two numbers are the same map is up to who wrote them.
    """
    check_split(split)
    lists = {'train_ids': ids_of(train_ids), 'test_ids': ids_of(test_ids)}
    shared = set(lists['train_ids']) & set(lists['test_ids'])
    if shared:
        raise ValueError(f'train_ids and test_ids share the number {min(shared)}')
    field = 'train_ids' if split == 'train' else 'test_ids'
    if len(lists[field]) < num_levels:
        raise ValueError(
            f'{field} names {len(lists[field])} levels, not {num_levels}: set '
            f'env.{"train" if split == "train" else "eval"}_levels to at most that'
        )
    return numbered(lists[field][:num_levels])


@functools.cache
def block_keys(name: str, index: int) -> list[bytes]:
    """Hash the map and pose of each level of a block, without the instruction."""
    levels = block(name, index)
    parts = ('walls', 'cell', 'name', 'door', 'content', 'agent', 'direction', 'held')
    rows = zip(*(levels[part] for part in parts), strict=True)
    return [hashlib.sha256(b''.join(x.tobytes() for x in row)).digest() for row in rows]


def main() -> None:
    parts = [export_levels(name, block_seeds(name, 0)) for name in LEVELS]
    levels = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    write(FIRST_FILE, levels)
    solved = int((levels['length'] >= 0).sum())
    print(f'{FIRST_FILE}: {len(levels["length"])} levels, of which the expert solves {solved}')


if __name__ == '__main__':
    main()
