"""Training, validation and test splits of levels, for environments on devices and on hosts."""

import hashlib

SPLITS = ('train', 'validation', 'test')


def check_split(split: str | None) -> None:
    """Raise ValueError for unknown splits; None, used by reference tables, means all levels."""
    if split is not None and split not in SPLITS:
        raise ValueError(f'split={split!r} is not one of {SPLITS}')


def level_split(key: bytes) -> str:
    """Return the split of a level by a hash of its bytes: 80 % train, 10 % validation, 10 % test.

    Pools of different splits therefore never share a level, for any seeds.
    """
    digit = int.from_bytes(hashlib.sha256(key).digest()[:8], 'big') % 10
    return SPLITS[max(0, digit - 7)]
