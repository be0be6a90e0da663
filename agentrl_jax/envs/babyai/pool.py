"""BabyAI levels as arrays, exported once with minigrid and read from files without it.

A level is named by AgentGym's data_idx: LEVELS[data_idx % 40], drawn by minigrid with the seed
data_idx // 40. levels.npz contains the first seeds of each level. Further seeds are exported on
demand, in blocks, to the user's cache folder.

  python -m agentrl_jax.envs.babyai.pool      exports levels.npz again
"""

import functools
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl_jax.envs.babyai.export import MINIGRID, export_levels
from agentrl_jax.envs.splits import check_split, level_split
from agentrl_jax.machine import files

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
FIRST_SEEDS, BLOCK_SEEDS, MAX_BLOCKS = 250, 256, 20
MORE_SEEDS = {'GoToLocalS8N7': 1500, 'PickupLoc': 1500}  # first seeds of the demo's levels
FIRST_FILE = Path(__file__).with_name('levels.npz')


@functools.cache
def first_levels() -> dict[str, np.ndarray]:
    """Return the levels of levels.npz, ordered by name."""
    with np.load(FIRST_FILE) as stored:
        return {key: stored[key] for key in stored.files}


@functools.cache
def block(name: str, index: int) -> dict[str, np.ndarray]:
    """Return the levels of a block of seeds; block 0 ships with the package."""
    if name not in LEVELS:
        raise ValueError(f'levels: {name!r} is not one of {", ".join(LEVELS)}')
    if index == 0:
        before = LEVELS[: LEVELS.index(name)]
        start = sum(len(block_seeds(other, 0)) for other in before)
        rows = slice(start, start + len(block_seeds(name, 0)))
        return {key: values[rows] for key, values in first_levels().items()}
    cache = Path(os.environ.get('XDG_CACHE_HOME', '~/.cache')).expanduser()
    path = cache / 'agentrl_jax' / f'babyai-minigrid-{MINIGRID}' / f'{name}-{index}.npz'
    if not path.exists():
        write(path, export_levels(name, block_seeds(name, index)))
    with np.load(path) as stored:
        return {key: stored[key] for key in stored.files}


def block_seeds(name: str, index: int) -> range:
    """Return minigrid's seeds of a block."""
    first = MORE_SEEDS.get(name, FIRST_SEEDS)
    if index == 0:
        return range(first)
    start = first + (index - 1) * BLOCK_SEEDS
    return range(start, start + BLOCK_SEEDS)


def write(path: Path, levels: dict[str, np.ndarray]) -> None:
    """Write atomically, because several processes may export the same block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial, open(partial, 'wb') as file:
        np.savez_compressed(file, **levels)


def draw(
    split: str | None, num_levels: int, names: Sequence[str], *, seed: int
) -> dict[str, np.ndarray]:
    """Draw distinct levels of a split; arrays as in `numbered`.

    The names alternate in equal shares; the seed selects among the exported levels. Small maps have
    few distinct levels: GoToObjS6 has a few hundred.
    """
    check_split(split)
    quota = [num_levels // len(names) + (i < num_levels % len(names)) for i in range(len(names))]
    shares = [
        share(name, split, count, seed=seed)
        for name, count in zip(names, quota, strict=True)
        if count
    ]
    rounds = itertools.zip_longest(*shares)
    return numbered([number for one in rounds for number in one if number is not None])


def share(name: str, split: str | None, count: int, *, seed: int) -> list[int]:
    """Return the numbers of `count` levels of one name, reading blocks until there are enough."""
    candidates, blocks, known = [], 0, set()
    while len(candidates) < count:
        if blocks == MAX_BLOCKS:
            raise ValueError(
                f'num_levels: {name} has {len(candidates)} different levels of split {split} among '
                f'{blocks} blocks of seeds, not {count}: use fewer levels'
            )
        seeds, keys = block_seeds(name, blocks), block_keys(name, blocks)
        for level_seed, key in zip(seeds, keys, strict=True):
            if key not in known and split in (None, level_split(key)):
                candidates.append(level_seed * len(LEVELS) + LEVELS.index(name))
                known.add(key)
        blocks += 1
    chosen = np.random.default_rng(seed).permutation(len(candidates))[:count]
    return [candidates[i] for i in sorted(chosen)]


def numbered(ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the levels with AgentGym's numbers: arrays of export.empty_levels, and data_idx."""
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
    """Parse level numbers: '0:3,7' is 0, 1, 2 and 7."""
    ids = []
    for part in text.split(','):
        first, _, end = part.partition(':')
        if not first.isdigit() or not (end or first).isdigit():
            raise ValueError(f'{part!r} in {text!r} is not a number or a range such as 0:810')
        ids += range(int(first), int(end or int(first) + 1))
    return ids


def agentgym_split(
    split: str | None, num_levels: int, train_ids: str, test_ids: str
) -> dict[str, np.ndarray]:
    """Return the first `num_levels` levels of train_ids, or of test_ids for other splits.

    The lists must not share numbers. Different numbers may still be the same map.
    """
    check_split(split)
    lists = {'train_ids': ids_of(train_ids), 'test_ids': ids_of(test_ids)}
    shared = set(lists['train_ids']) & set(lists['test_ids'])
    if shared:
        raise ValueError(f'train_ids and test_ids share the number {min(shared)}')
    field = 'train_ids' if split == 'train' else 'test_ids'
    if len(lists[field]) < num_levels:
        raise ValueError(
            f'{field} has only {len(lists[field])} levels, not {num_levels}. Reduce '
            f'env.{"train" if split == "train" else "eval"}_levels'
        )
    return numbered(lists[field][:num_levels])


@functools.cache
def block_keys(name: str, index: int) -> list[bytes]:
    """Return a hash of the map and pose of each level of a block, without the instruction."""
    levels = block(name, index)
    parts = ('walls', 'cell', 'name', 'door', 'content', 'agent', 'direction', 'held')
    rows = zip(*(levels[part] for part in parts), strict=True)
    return [hashlib.sha256(b''.join(x.tobytes() for x in row)).digest() for row in rows]


def main() -> None:
    parts = [export_levels(name, block_seeds(name, 0)) for name in LEVELS]
    levels = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    write(FIRST_FILE, levels)
    solved = int((levels['length'] >= 0).sum())
    print(f'{FIRST_FILE}: {len(levels["length"])} levels, {solved} solved by the expert')


if __name__ == '__main__':
    main()
