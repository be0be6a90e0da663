"""BabyAI's vocabulary: numbers for objects and clauses, and its sentences."""

import numpy as np

KINDS = ('door', 'key', 'ball', 'box')
COLOURS = ('red', 'green', 'blue', 'purple', 'yellow', 'grey')
PLACES = (None, 'front', 'behind', 'left', 'right')
DESCRIBED = ('door', 'key', 'ball', 'box', None)  # None: "object"
DOOR, KEY, BALL, BOX = range(4)
OPEN, CLOSED, LOCKED = range(3)
GO_TO, PICK_UP, OPEN_DOOR, PUT_NEXT = range(4)
VERBS = ('go to', 'pick up', 'open', 'put')  # by clause
SINGLE, BEFORE, AFTER = range(3)
SIDE = 22  # side of the largest map in cells; smaller maps use its top left corner
OBJECTS = 40  # maximum per level: 27 objects, a key and 12 doors
NUMBERS = 9  # maximum number of objects with the same name per level


def description(number: int) -> tuple[str | None, str | None, str | None, bool]:
    """Return (colour, kind, place, whether several objects match) of a description."""
    number, several = divmod(int(number), 2)
    number, place = divmod(number, len(PLACES))
    kind, colour = divmod(number, len(COLOURS) + 1)
    return (*COLOURS, None)[colour], DESCRIBED[kind], PLACES[place], bool(several)


DESCRIPTIONS = len(DESCRIBED) * (len(COLOURS) + 1) * len(PLACES) * 2


def phrase(number: int) -> str:
    """Return a description in words, such as 'a red ball on your left'."""
    colour, kind, place, several = description(number)
    where = {None: '', 'front': ' in front of you', 'behind': ' behind you'}
    tail = where[place] if place in where else f' on your {place}'
    return ' '.join(filter(None, ['a' if several else 'the', colour, kind or 'object'])) + tail


def mission(level: dict[str, np.ndarray]) -> str:
    """Return the instruction of one level in BabyAI's words."""
    texts = [''] * 4  # '': no clause
    for i, (one, other) in enumerate(level['described']):
        if (clause := level['clause'][i]) >= 0:
            target = f' next to {phrase(other)}' if clause == PUT_NEXT else ''
            texts[i] = f'{VERBS[clause]} {phrase(one)}{target}'
    halves = [' and '.join(filter(None, texts[i : i + 2])) for i in (0, 2)]
    between = {SINGLE: '', BEFORE: ', then ', AFTER: ' after you '}
    return between[int(level['order'])].join(filter(None, halves))
