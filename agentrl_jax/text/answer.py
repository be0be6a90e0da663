"""The answer of a turn, parsed on the device while its tokens are sampled.

A response follows a forced '<think>' (or '<answer>'). It matches where Python's
  re.search(rb'<think>(.*?)</think>\\s*<answer>(.*?)</answer>', prefix + response, re.DOTALL)
does. What is between the answer tags loses the marks in MARKS in one pass (in RAGEN, one pass
a mark), is split at '||' and stripped; each part that is not empty is looked up among
the names of the actions, whatever its case. After a forced 'Thought:' (ReAct) the actions are
between 'Action:' and the end of the turn.

Two automata over bytes, one after the other: the first finds the tags and hands on what lies
between them, the second splits that into parts and recognises names. Each is lifted to tokens: a
token moves the first (state, class of the token) -> (state, action) and the second (state, action)
-> (state, finished parts). So one step costs two gathers, and the tables stay small because tokens
that act alike in every state share a class (most of a vocabulary is one class: other text).

The answer of a written turn (agents.py) matches where it holds its closing tag: a third kind of
states of the first automaton, with a first state for each of those tags. What precedes the tag
is split and looked up in the same way: a plan may name actions.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

MOST_BEGINNINGS = 8000  # of action names; each makes at most four states
UNKNOWN, ABSENT = -1, -2  # a part that names no action; no part
SEPARATOR = b'||'
END = b'\x03'  # the token that ends a turn
MARKS = (b'<think>', b'</think>', b'<answer>', b'<|im_start|>', b'<|im_end|>')
SPACE = b' \t\n\r\x0b\x0c'  # what bytes.strip() and \s of a bytes pattern take for white space
REASONING, TAG, ANSWERING = 0, 1, 2  # text; perhaps within </think><answer>; after it
LAST_TAG = 3  # as TAG, and some tokens hold the rest of the tags and more


@dataclasses.dataclass(frozen=True)
class Form:
    """How an answer that acts is written after its forced opening."""

    pattern: bytes  # the regular expression of a match; its last group holds the actions
    before: bytes | None  # opens the actions after the reasoning; None: there is no reasoning
    closing: bytes
    marks: tuple[bytes, ...]  # that the actions lose
    text: str  # {think} {actions}: what a demonstration writes


FORMS = {  # by what is forced in front of an answer
    '<think>': Form(
        pattern=rb'<think>(.*?)</think>\s*<answer>(.*?)</answer>',
        before=b'</think><answer>',  # with any white space between the two tags
        closing=b'</answer>',
        marks=MARKS,
        text='{think}</think><answer>{actions}</answer>',
    ),
    '<answer>': Form(
        pattern=rb'<answer>(.*?)</answer>',
        before=None,
        closing=b'</answer>',
        marks=MARKS,
        text='{actions}</answer>',
    ),
    'Thought:': Form(
        pattern=rb'Thought:(.*?)Action:(.*?)\x03',
        before=b'Action:',
        closing=END,
        marks=(),
        text='{think}\nAction: {actions}',
    ),
}
OTHER = b'\0'  # text that occurs in no mark and no name


@struct.dataclass
class AnswerTable:
    """Both automata over tokens: Q and P states, C token classes, U actions, M parts a token."""

    token_class: jax.Array  # int32 [V]
    next_tag: jax.Array  # int16 [Q, C]
    action: jax.Array  # int16 [Q, C]
    next_part: jax.Array  # int16 [P, U]
    emitted: jax.Array  # int16 [P, U, M]  parts finished by the token, in order; ABSENT = none
    stage: jax.Array  # int8 [Q]  REASONING, TAG, LAST_TAG or ANSWERING
    first_tag: int = struct.field(pytree_node=False)
    first_written: tuple[int, ...] = struct.field(pytree_node=False)  # of each written part
    actions_tag: int = struct.field(pytree_node=False)  # what opens the actions was read, no more
    last_tag: int = struct.field(pytree_node=False)  # </answer> was read
    idle_class: int = struct.field(pytree_node=False)  # of tokens without bytes
    max_actions: int = struct.field(pytree_node=False)


@struct.dataclass
class AnswerState:
    """Parsers of S rows."""

    tag: jax.Array  # int32 [S]
    part: jax.Array  # int32 [S]
    parts: jax.Array  # int32 [S, A]  name index, UNKNOWN or ABSENT; counts only where matched
    count: jax.Array  # int32 [S]


def init_answer(table: AnswerTable, rows: int, part: jax.Array | None = None) -> AnswerState:
    """Parsers in front of the first sampled token; part int32 [rows]: kind of turn, None: acts."""
    tag = jnp.full(rows, table.first_tag, jnp.int32)
    if part is not None and table.first_written:
        tag = jnp.asarray([table.first_tag, *table.first_written], jnp.int32)[part]
    return AnswerState(
        tag=tag,
        part=jnp.zeros(rows, jnp.int32),
        parts=jnp.full((rows, table.max_actions), ABSENT, jnp.int32),
        count=jnp.zeros(rows, jnp.int32),
    )


def advance(
    table: AnswerTable, state: AnswerState, tokens: jax.Array, live: jax.Array
) -> AnswerState:
    """Reads one token (int32 [S]) in each row where live (bool [S])."""
    # A model may have more embedding rows than its tokenizer has tokens: those say nothing.
    kind = table.token_class.at[tokens].get(mode='fill', fill_value=table.idle_class)
    kind = jnp.where(live, kind, table.idle_class)
    action = table.action[state.tag, kind]
    emitted = table.emitted[state.part, action].astype(jnp.int32)
    slot = jnp.arange(table.max_actions)
    parts, count = state.parts, state.count
    for m in range(emitted.shape[1]):
        found = emitted[:, m] != ABSENT
        here = found[:, None] & (slot[None] == count[:, None])
        parts = jnp.where(here, emitted[:, m, None], parts)
        count = jnp.minimum(count + found, table.max_actions)
    return AnswerState(
        tag=table.next_tag[state.tag, kind].astype(jnp.int32),
        part=table.next_part[state.part, action].astype(jnp.int32),
        parts=parts,
        count=count,
    )


def reasoning_length(table: AnswerTable, tokens: jax.Array, live: jax.Array) -> jax.Array:
    """Tokens of each response in front of the </think> that the pattern matches, int32 [S].

    tokens int32, live bool [S, R] (a prefix of each row). A token that shares bytes with the tag is
    not counted. Without the tags all of the response is reasoning; without <think> nothing is.
    """
    kind = table.token_class.at[tokens].get(mode='fill', fill_value=table.idle_class)
    kind = jnp.where(live, kind, table.idle_class)

    def read(tag, kind):
        tag = table.next_tag[tag, kind].astype(jnp.int32)
        return tag, table.stage[tag]

    first = jnp.full(tokens.shape[0], table.first_tag, jnp.int32)
    stage = jax.lax.scan(read, first, kind.T)[1].T  # [S, R] after each token
    text = live & (stage == REASONING)
    place = jnp.arange(1, tokens.shape[1] + 1)[None]
    before_tag = jnp.max(jnp.where(text, place, 0), axis=1)  # ANSWERING is never left
    ended = jnp.any(stage == ANSWERING, axis=1) | (table.stage[table.first_tag] == ANSWERING)
    return jnp.where(ended, before_tag, live.sum(1)).astype(jnp.int32)


def spilling(table: AnswerTable) -> np.ndarray:
    """bool [V]: tokens that may end what opens the actions and hold some of what follows it.

    That is text of an action, the start of a mark, or what closes the answer.
    """
    return _spills(table).any(0)[np.asarray(table.token_class)]


def _spills(table: AnswerTable) -> np.ndarray:
    """bool [Q, C]: whether tokens of a class spill from a state."""
    stage, action = np.asarray(table.stage), np.asarray(table.action)
    after = np.asarray(table.next_tag)
    more = after != table.actions_tag
    more |= np.asarray(table.next_part)[0, action] != 0
    more |= (np.asarray(table.emitted)[0, action] != ABSENT).any(-1)
    return (stage != ANSWERING)[:, None] & (stage[after] == ANSWERING) & more


def _with_last_tags(table: AnswerTable) -> AnswerTable:
    """With LAST_TAG where tokens spill that do not spill from the first state."""
    spills, stage = _spills(table), np.asarray(table.stage)
    last = (stage == TAG) & (spills > spills[table.first_tag]).any(1)
    return table.replace(stage=jnp.asarray(np.where(last, LAST_TAG, stage), jnp.int8))


def matched(table: AnswerTable, state: AnswerState) -> jax.Array:
    """bool [S]: the pattern has matched; nothing that follows changes the parts."""
    return state.tag == table.last_tag


def parse_answer(
    response: bytes, names: list[str], *, max_actions: int, opening: str
) -> tuple[bool, list[int]]:
    """(matched, parts [max_actions]) of a whole response, on the host with regular expressions.

    END is where the policy ended the turn.
    """
    form = FORMS[opening]
    found = re.search(form.pattern, opening.encode() + response, re.DOTALL)
    if found is None:
        return False, [ABSENT] * max_actions
    marks = b'|'.join(map(re.escape, form.marks))
    content = re.sub(marks, b'', found.groups()[-1]) if marks else found.groups()[-1]
    lowered = [name.encode().lower() for name in names]
    texts = [text.strip().lower() for text in content.split(b'||')]
    parts = [lowered.index(text) if text in lowered else UNKNOWN for text in texts if text]
    return True, (parts + [ABSENT] * max_actions)[:max_actions]


def build_answer_table(
    token_bytes: list[bytes],
    names: list[str],
    *,
    max_actions: int,
    opening: str,
    closings: tuple[str, ...] = (),
) -> AnswerTable:
    """Tables for the tokens of a tokenizer (bytes of each id) and the names of the actions.

    opening: a key of FORMS; tokens that end a turn have the bytes END. closings: of the answers
    that are text, by the number of their part, from 1 on.
    """
    form, ends = FORMS[opening], [text.encode() for text in closings]
    lowered = _check_names(names)
    tags, parts = _tag_automaton(form, ends), _part_automaton(lowered)
    marks = (*form.marks, *([form.before] if form.before else []), form.closing, *ends)
    simplify = _Simplifier(lowered, marks)
    kind_of = {}  # representative bytes -> index; every token acts like its representative
    kind = [kind_of.setdefault(simplify.token(token), len(kind_of)) for token in token_bytes]
    idle = kind_of.setdefault(b'', len(kind_of))
    action_of = {}  # what the second automaton is given -> index
    next_tag = np.zeros((len(kind_of), len(tags.rows)), np.int16)
    action = np.zeros_like(next_tag, dtype=np.int32)
    for text, row in kind_of.items():
        for state in range(len(tags.rows)):
            after, content = tags.run(state, text)
            closed = after == tags.last and state != tags.last
            given = simplify.content(content, closed)
            next_tag[row, state] = after
            action[row, state] = action_of.setdefault(given, len(action_of))
    effects, number = _unique_rows(parts.effects(list(action_of)))
    action = number[action]
    columns, row_class = _unique_rows(np.stack([next_tag, action], 2).astype(np.int16))
    most = max(1, int((effects[..., 1:] != ABSENT).sum(2).max()))
    table = AnswerTable(
        token_class=jnp.asarray(row_class[np.asarray(kind)], jnp.int32),
        next_tag=jnp.asarray(columns[..., 0].T),
        action=jnp.asarray(columns[..., 1].T),
        next_part=jnp.asarray(effects[..., 0].T),
        emitted=jnp.asarray(effects[..., 1 : 1 + most].transpose(1, 0, 2)),
        stage=jnp.asarray(tags.stage, jnp.int8),
        first_tag=0,
        first_written=tuple(range(1, 1 + len(ends))),
        actions_tag=tags.actions,
        last_tag=tags.last,
        idle_class=int(row_class[idle]),
        max_actions=max_actions,
    )
    return _with_last_tags(table)


def with_ends(token_bytes: list[bytes], eos_ids: list[int]) -> list[bytes]:
    """The bytes of each token, END for those that end a turn."""
    ends = set(eos_ids)
    return [END if i in ends else text for i, text in enumerate(token_bytes)]


def parse_written(response: bytes, closing: str) -> bool:
    """Whether the answer of a written turn holds what closes it, on the host."""
    return closing.encode() in response


def _unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different entries of the first axis, and the number each entry has among them."""
    number_of = {}
    number = [number_of.setdefault(row.tobytes(), len(number_of)) for row in rows]
    first = np.unique(number, return_index=True)[1]
    return rows[first], np.array(number)


def _check_names(names: list[str]) -> list[bytes]:
    """The names as lower-case bytes."""
    lowered = [name.encode().lower() for name in names]
    for name, low in zip(names, lowered, strict=True):
        if not low or low != low.strip() or SEPARATOR in low or OTHER in low or b'<' in low:
            raise ValueError(f'the action name {name!r} cannot be parsed from an answer')
    begins = {name[:end] for name in lowered for end in range(1, len(name) + 1)}
    if len(begins) > MOST_BEGINNINGS:
        raise ValueError(
            f'the action names have {len(begins)} different beginnings, but the automaton counts '
            f'its states in 16 bits, which is enough for {MOST_BEGINNINGS}'
        )
    if len(set(lowered)) < len(lowered):
        raise ValueError(f'action names must differ in more than case: {sorted(names)}')
    return lowered


def _explore(
    firsts: Iterable[Hashable], step: Callable, symbols: Sequence
) -> tuple[dict[Hashable, int], list[list[tuple[int, Any]]]]:
    """(number of each state in reach, (state after, output) by state and symbol).

    step(state, symbol) -> (state after, output).
    """
    index, rows = {state: number for number, state in enumerate(firsts)}, []
    for state in (queue := list(index)):
        results = [step(state, symbol) for symbol in symbols]
        for after, _ in results:
            if after not in index:
                index[after] = len(index)
                queue.append(after)
        rows.append([(index[after], output) for after, output in results])
    return index, rows


@dataclasses.dataclass(frozen=True)
class _TagAutomaton:
    """Finds the tags. State 0 is the first."""

    rows: list[list[tuple[int, bytes]]]  # by state and byte: the next state, and what it hands on
    stage: list[int]
    actions: int
    last: int

    def run(self, state: int, text: bytes) -> tuple[int, bytes]:
        """(state after the text, bytes handed on)."""
        content = b''
        for byte in text:
            state, part = self.rows[state][byte]
            content += part
        return state, content


def _seek(held: bytes, byte: bytes, wanted: bytes) -> bytes:
    """Progress towards what is wanted: the longest end of the text read that can begin it."""
    if held == b'</think>' and byte in SPACE:
        return held
    text = held + byte
    while not wanted.startswith(text):
        text = text[1:]
    return text


def _tag_step(
    state: tuple[str | bytes, bytes], byte: bytes, form: Form
) -> tuple[tuple[str | bytes, bytes], bytes]:
    """(next state, bytes handed on) of the first automaton; a state is (phase, text held back).

    The phase of an answer that is text is what closes it.
    """
    phase, held = state
    if phase == 'closed':
        return state, b''
    if isinstance(phase, bytes):
        text, held = held + byte, _seek(held, byte, phase)
        return (('closed', b''), b'') if held == phase else ((phase, held), text.removesuffix(held))
    if phase == 'before':
        held = _seek(held, byte, form.before)
        return (('within', b'') if held == form.before else (phase, held)), b''
    text = held + byte
    if text == form.closing:
        return ('closed', b''), b''
    if text in form.marks:
        return (phase, b''), b''
    if any(mark.startswith(text) for mark in (*form.marks, form.closing)):
        return (phase, text), b''
    # A mark has its only '<' in front, so text held back that fails cannot hold a later start.
    return ((phase, b'<'), held) if byte == b'<' and form.marks else ((phase, b''), text)


def _tag_automaton(form: Form, closings: list[bytes]) -> _TagAutomaton:
    firsts = ['before' if form.before else 'within', *closings]
    index, rows = _explore(
        [(phase, b'') for phase in firsts],
        lambda state, byte: _tag_step(state, bytes([byte]), form),
        range(256),
    )
    stage = [
        ANSWERING if phase != 'before' else TAG if held else REASONING for phase, held in index
    ]
    return _TagAutomaton(rows, stage, index['within', b''], index['closed', b''])


@dataclasses.dataclass(frozen=True)
class _PartAutomaton:
    """Splits content into parts; the last column of both tables is the end of the answer."""

    step: np.ndarray  # int16 [P, 257]
    emitted: np.ndarray  # int16 [P, 257]

    def effects(self, texts: list[tuple[bytes, bool]]) -> np.ndarray:
        """int16 [len(texts), P, 1 + M]: from every state, the next one and the finished parts.

        A text comes with whether the answer ends after it.
        """
        # With a bar in front of the text, which a state may hold, it has one separator more
        parts = max((text.count(b'|') + 1) // 2 + closed for text, closed in texts)
        result = np.full((len(texts), len(self.step), 1 + parts), ABSENT, np.int16)
        for effect, (text, closed) in zip(result, texts, strict=True):
            state, count = np.arange(len(self.step)), np.ones(len(self.step), int)
            for byte in [*text, 256][: len(text) + closed]:
                found = self.emitted[state, byte]
                rows = np.flatnonzero(found != ABSENT)
                effect[rows, count[rows]] = found[rows]
                count[rows] += 1
                state = self.step[state, byte]
            effect[:, 0] = state
        return result


def _part_automaton(names: list[bytes]) -> _PartAutomaton:
    """States (bar, node, meaning): a '|' is pending; place in the tree of names; value if it ended.

    Node 0 means that only white space was read, -1 that no name begins like this.
    """
    child, name_at, size = {}, {}, 1
    for index, name in enumerate(names):
        node = 0
        for byte in name:
            if (node, byte) not in child:
                child[node, byte] = size
                size += 1
            node = child[node, byte]
        name_at[node] = index

    def push(part, byte):
        node, meaning = part
        if byte in SPACE and node == 0:
            return part
        node = child[node, byte] if (node, byte) in child else -1
        if node in name_at:
            return node, name_at[node]
        return node, meaning if byte in SPACE else UNKNOWN

    def step(state, byte):
        bar, part = state
        if byte == ord('|') and not bar:
            return (True, part), ABSENT
        if byte == ord('|'):
            return (False, (0, ABSENT)), part[1]
        part = push(part, ord('|')) if bar else part
        return (
            ((False, (0, ABSENT)), part[1]) if byte == 256 else ((False, push(part, byte)), ABSENT)
        )

    symbols = [*bytes(range(256)).lower(), 256]  # of every byte its lower case, then the end
    _, rows = _explore([(False, (0, ABSENT))], step, symbols)
    return _PartAutomaton(*np.array(rows, np.int16).transpose(2, 0, 1))


class _Simplifier:
    """Maps bytes to shorter bytes that both automata cannot tell apart.

    Nearly every token is text that continues no mark and occurs in no name; it then ends whatever
    is in progress, like OTHER. Property tests over all tokens of a vocabulary hold this to it.
    """

    def __init__(self, names: list[bytes], marks: tuple[bytes, ...]):
        self._names = b'\x01'.join(names)
        self._marks = b'\x01'.join(marks)
        self._words = [mark for mark in marks if mark[:1] not in (b'<', END)]  # begin anywhere
        self._borders = b'[<>|:\x03]' if self._words else b'[<>|\x03]'
        known = set(self._names + self._names.upper() + self._marks + SPACE + SEPARATOR)
        self._fold = bytes(byte if byte in known else OTHER[0] for byte in range(256))

    def token(self, text: bytes) -> bytes:
        """A representative of a token."""
        text = re.sub(b'\0+', OTHER, text.translate(self._fold))
        if re.search(self._borders, text) or text in self._marks or self._in_a_name(text):
            return text
        if any(text.endswith(word[:end]) for word in self._words for end in range(1, len(word))):
            return text
        end = 0
        while text[: end + 1] in self._marks:
            end += 1
        return text[:end] + OTHER

    def content(self, text: bytes, closed: bool) -> tuple[bytes, bool]:
        """A representative of what the second automaton is given."""
        spans = text.lower().split(b'|')
        return b'|'.join(s if self._in_a_name(s) else OTHER for s in spans), closed

    def _in_a_name(self, text: bytes) -> bool:
        return text.lower().strip(SPACE) in self._names
