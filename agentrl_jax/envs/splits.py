"""Which levels are trained on, and which are held out: of worlds on devices and on hosts."""

import hashlib

SPLITS = ('train', 'validation', 'test')


def check_split(split: str | None) -> None:
    """None stands for all levels whatever their split; only reference tables use it."""
    if split is not None and split not in SPLITS:
        raise ValueError(f'split={split!r} is not one of {SPLITS}')


def level_split(key: bytes) -> str:
    """Split of a level from a hash of its bytes: eight tenths train, one validation, one test.

    Whatever seeds two pools are drawn with, those of different splits cannot share a level.
    """
    digit = int.from_bytes(hashlib.sha256(key).digest()[:8], 'big') % 10
    return SPLITS[max(0, digit - 7)]
