"""Parser of a turn's answer, which runs on the device while tokens are sampled.

A response follows a forced '<think>' (or '<answer>'). It matches exactly if Python's
  re.search(rb'<think>(.*?)</think>\\s*<answer>(.*?)</answer>', prefix + response, re.DOTALL)
does. The content of the answer tags is stripped of all MARKS in one pass (RAGEN: one pass per
mark), split at '||' and stripped of white space. Each non-empty part is looked up among the action
names, ignoring case. After a forced 'Thought:' (ReAct), the actions are between 'Action:' and the
end of the turn.

There are two consecutive automata over bytes. The first finds the tags and outputs the content
between them; the second splits the content into parts and recognises names. Both are lifted to
tokens: the first maps (state, token class) -> (state, action), the second (state, action) ->
(state, finished parts). A step costs two gathers. The tables are small because tokens with the same
transitions in every state share a class (most of a vocabulary is one class: other text).

The answer of a written turn (agents.py) matches if it contains its closing tag. The first automaton
has a third kind of states for it, with an initial state per closing tag. The text before the tag
is split and looked up in the same way, because a plan may name actions.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

MAX_NAME_PREFIXES = 8000  # limit on prefixes of action names; each adds up to four states
UNKNOWN, ABSENT = -1, -2  # a part that names no action; no part
SEPARATOR = b'||'
END = b'\x03'  # the token that ends a turn
MARKS = (b'<think>', b'</think>', b'<answer>', b'<|im_start|>', b'<|im_end|>')
SPACE = b' \t\n\r\x0b\x0c'  # white space of bytes.strip() and of \s in a bytes pattern
REASONING, TAG, ANSWERING = 0, 1, 2  # text; possibly within </think><answer>; after it
LAST_TAG = 3  # as TAG, and some tokens contain the rest of the tags and more text


@dataclasses.dataclass(frozen=True)
class Form:
    """Format of an answer that acts, after its forced opening."""

    pattern: bytes  # regular expression of an answer; its last group contains the actions
    before: bytes | None  # separates reasoning and actions; None: there is no reasoning
    closing: bytes
    marks: tuple[bytes, ...]  # removed from the actions
    text: str  # {think} {actions}: format of demonstrations


FORMS = {  # by forced opening
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
OTHER = b'\0'  # stands for text that is not part of a mark or name


@struct.dataclass
class AnswerTable:
    """Both automata over tokens: Q and P states, C token classes, U actions, M parts per token."""

    token_class: jax.Array  # int32 [V]
    next_tag: jax.Array  # int16 [Q, C]
    action: jax.Array  # int16 [Q, C]
    next_part: jax.Array  # int16 [P, U]
    emitted: jax.Array  # int16 [P, U, M]  parts finished by the token, in order; ABSENT = none
    stage: jax.Array  # int8 [Q]  REASONING, TAG, LAST_TAG or ANSWERING
    first_tag: int = struct.field(pytree_node=False)
    first_written: tuple[int, ...] = struct.field(pytree_node=False)  # of each written part
    actions_tag: int = struct.field(pytree_node=False)  # state just after the tags before actions
    last_tag: int = struct.field(pytree_node=False)  # state after </answer>
    idle_class: int = struct.field(pytree_node=False)  # of tokens without bytes
    max_actions: int = struct.field(pytree_node=False)


@struct.dataclass
class AnswerState:
    """Parsers of S rows."""

    tag: jax.Array  # int32 [S]
    part: jax.Array  # int32 [S]
    parts: jax.Array  # int32 [S, A]  name index, UNKNOWN or ABSENT; only valid if matched
    count: jax.Array  # int32 [S]


def init_answer(table: AnswerTable, rows: int, part: jax.Array | None = None) -> AnswerState:
    """Return parsers before the first token; part int32 [rows]: kind of the turn, None: acts."""
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
    """Read one token (int32 [S]) in each live row (bool [S])."""
    # A model may have more embedding rows than its tokenizer has tokens: these have no text.
    kind = table.token_class.at[tokens].get(mode='fill', fill_value=table.idle_class)
    kind = jnp.where(live, kind, table.idle_class)
    action = table.action[state.tag, kind]
    emitted = table.emitted[state.part, action].astype(jnp.int32)
    slot = jnp.arange(table.max_actions)
    parts, count = state.parts, state.count
    for m in range(emitted.shape[1]):
        present = emitted[:, m] != ABSENT
        here = present[:, None] & (slot[None] == count[:, None])
        parts = jnp.where(here, emitted[:, m, None], parts)
        count = jnp.minimum(count + present, table.max_actions)
    return AnswerState(
        tag=table.next_tag[state.tag, kind].astype(jnp.int32),
        part=table.next_part[state.part, action].astype(jnp.int32),
        parts=parts,
        count=count,
    )


def reasoning_length(table: AnswerTable, tokens: jax.Array, live: jax.Array) -> jax.Array:
    """Return the number of tokens before the matched </think> of each response, int32 [S].

    tokens int32, live bool [S, R] (a prefix of each row). Tokens that share bytes with the tag are
    not counted. A response without tags is all reasoning; without <think>, there is no reasoning.
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


def tokens_across_tag(table: AnswerTable) -> np.ndarray:
    """Return tokens that may span the opening tag of the actions and the text after it, bool [V].

    That text is part of an action, the start of a mark, or the closing tag.
    """
    return _spills(table).any(0)[np.asarray(table.token_class)]


def _spills(table: AnswerTable) -> np.ndarray:
    """Return whether tokens of a class spill from a state, bool [Q, C]."""
    stage, action = np.asarray(table.stage), np.asarray(table.action)
    after = np.asarray(table.next_tag)
    more = after != table.actions_tag
    more |= np.asarray(table.next_part)[0, action] != 0
    more |= (np.asarray(table.emitted)[0, action] != ABSENT).any(-1)
    return (stage != ANSWERING)[:, None] & (stage[after] == ANSWERING) & more


def matched(table: AnswerTable, state: AnswerState) -> jax.Array:
    """Return whether the pattern has matched, bool [S]; later tokens do not change the parts."""
    return state.tag == table.last_tag


def parse_answer(
    response: bytes, names: list[str], *, max_actions: int, opening: str
) -> tuple[bool, list[int]]:
    """Return (matched, parts [max_actions]) of a response, on the host with regular expressions.

    The response contains END if the policy ended the turn.
    """
    form = FORMS[opening]
    match = re.search(form.pattern, opening.encode() + response, re.DOTALL)
    if match is None:
        return False, [ABSENT] * max_actions
    marks = b'|'.join(map(re.escape, form.marks))
    content = re.sub(marks, b'', match.groups()[-1]) if marks else match.groups()[-1]
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
    """Build the tables for the tokens of a tokenizer (bytes of each id) and the action names.

    opening: a key of FORMS. Tokens that end a turn must have the bytes END. closings: closing tags
    of written answers, by part, starting at 1.
    """
    form, ends = FORMS[opening], [text.encode() for text in closings]
    lowered = _check_names(names)
    tags = _tag_automaton(form, ends)
    marks = (*form.marks, *([form.before] if form.before else []), form.closing, *ends)
    simplify = _Simplifier(lowered, marks)
    kind_of = {}  # representative bytes -> index; every token acts like its representative
    kind = [kind_of.setdefault(simplify.token(token), len(kind_of)) for token in token_bytes]
    idle = kind_of.setdefault(b'', len(kind_of))
    action_of = {}  # output of the first automaton -> index
    next_tag = np.zeros((len(kind_of), len(tags.steps)), np.int16)
    action = np.zeros_like(next_tag, dtype=np.int32)
    for text, row in kind_of.items():
        for state in range(len(tags.steps)):
            after, content = tags.run(state, text)
            closed = after == tags.last and state != tags.last
            output = simplify.content(content, closed)
            next_tag[row, state] = after
            action[row, state] = action_of.setdefault(output, len(action_of))
    effects, number = _unique_rows(_part_effects(lowered, list(action_of)))
    action = number[action]
    columns, row_class = _unique_rows(np.stack([next_tag, action], 2).astype(np.int16))
    max_parts = max(1, int((effects[..., 1:] != ABSENT).sum(2).max()))
    table = AnswerTable(
        token_class=jnp.asarray(row_class[np.asarray(kind)], jnp.int32),
        next_tag=jnp.asarray(columns[..., 0].T),
        action=jnp.asarray(columns[..., 1].T),
        next_part=jnp.asarray(effects[..., 0].T),
        emitted=jnp.asarray(effects[..., 1 : 1 + max_parts].transpose(1, 0, 2)),
        stage=jnp.asarray(tags.stage, jnp.int8),
        first_tag=0,
        first_written=tuple(range(1, 1 + len(ends))),
        actions_tag=tags.actions,
        last_tag=tags.last,
        idle_class=int(row_class[idle]),
        max_actions=max_actions,
    )
    # LAST_TAG: tokens spill from the state that do not spill from the first state.
    spills, stage = _spills(table), np.asarray(table.stage)
    last = (stage == TAG) & (spills > spills[table.first_tag]).any(1)
    return table.replace(stage=jnp.asarray(np.where(last, LAST_TAG, stage), jnp.int8))


def with_ends(token_bytes: list[bytes], eos_ids: list[int]) -> list[bytes]:
    """Replace the bytes of tokens that end a turn by END."""
    ends = set(eos_ids)
    return [END if i in ends else text for i, text in enumerate(token_bytes)]


def _unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct entries of the first axis, and the index of each entry among them."""
    number_of = {}
    number = [number_of.setdefault(row.tobytes(), len(number_of)) for row in rows]
    first = np.unique(number, return_index=True)[1]
    return rows[first], np.array(number)


def _check_names(names: list[str]) -> list[bytes]:
    """Return the names as lower-case bytes; ValueError if they cannot be parsed."""
    lowered = [name.encode().lower() for name in names]
    for name, low in zip(names, lowered, strict=True):
        if not low or low != low.strip() or SEPARATOR in low or OTHER in low or b'<' in low:
            raise ValueError(f'the action name {name!r} cannot be parsed from an answer')
    prefixes = {name[:end] for name in lowered for end in range(1, len(name) + 1)}
    if len(prefixes) > MAX_NAME_PREFIXES:
        raise ValueError(
            f'the action names have {len(prefixes)} distinct prefixes, more than the limit of '
            f'{MAX_NAME_PREFIXES} for an automaton with 16-bit states'
        )
    if len(set(lowered)) < len(lowered):
        raise ValueError(f'action names must differ in more than case: {sorted(names)}')
    return lowered


def _explore(
    firsts: Iterable[Hashable], step: Callable, symbols: Sequence
) -> tuple[dict[Hashable, int], list[list[tuple[int, Any]]]]:
    """Return (number of each reachable state, (next state, output) by state and symbol).

    step(state, symbol) -> (next state, output).
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
    """Finds the tags. State 0 is initial."""

    steps: list[list[tuple[int, bytes]]]  # by state and byte: (next state, output)
    stage: list[int]
    actions: int
    last: int

    def run(self, state: int, text: bytes) -> tuple[int, bytes]:
        """Return (state after the text, output)."""
        content = b''
        for byte in text:
            state, part = self.steps[state][byte]
            content += part
        return state, content


def _seek(held: bytes, byte: bytes, wanted: bytes) -> bytes:
    """Return the longest suffix of the text read so far that is a prefix of `wanted`."""
    if held == b'</think>' and byte in SPACE:
        return held
    text = held + byte
    while not wanted.startswith(text):
        text = text[1:]
    return text


def _tag_step(
    state: tuple[str | bytes, bytes], byte: bytes, form: Form
) -> tuple[tuple[str | bytes, bytes], bytes]:
    """Return (next state, output) of the first automaton; a state is (phase, pending text).

    The phase of a written answer is its closing tag.
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
    # A mark has a single '<', its first byte, so failed pending text contains no other start.
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


def _part_automaton(names: list[bytes]) -> np.ndarray:
    """Return the next state and the finished part by state and byte, int16 [P, 257, 2].

    Byte 256 is the end of the answer. States: (pending '|', (node of the name tree, value at the
    end)). Node 0: only white space was read; -1: not the start of a name.
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

    symbols = [*bytes(range(256)).lower(), 256]  # lower-case bytes, then the end
    _, rows = _explore([(False, (0, ABSENT))], step, symbols)
    return np.array(rows, np.int16)


def _part_effects(names: list[bytes], texts: list[tuple[bytes, bool]]) -> np.ndarray:
    """Return the next state and the finished parts per state, int16 [len(texts), P, 1 + M].

    texts: (text, whether the answer ends after it).
    """
    steps = _part_automaton(names)
    # A pending bar of the state may form another separator with the text.
    parts = max((text.count(b'|') + 1) // 2 + closed for text, closed in texts)
    result = np.full((len(texts), len(steps), 1 + parts), ABSENT, np.int16)
    for effect, (text, closed) in zip(result, texts, strict=True):
        state, count = np.arange(len(steps)), np.ones(len(steps), int)
        for byte in [*text, 256][: len(text) + closed]:
            state, emitted = steps[state, byte].T
            rows = np.flatnonzero(emitted != ABSENT)
            effect[rows, count[rows]] = emitted[rows]
            count[rows] += 1
        effect[:, 0] = state
    return result


class _Simplifier:
    """Maps bytes to shorter bytes that are equivalent in both automata.

    Nearly all tokens are text that does not continue a mark and is not part of a name. These reset
    both automata, like OTHER. Property tests check the equivalence for all tokens of a vocabulary.
    """

    def __init__(self, names: list[bytes], marks: tuple[bytes, ...]):
        self._names = b'\x01'.join(names)
        self._marks = b'\x01'.join(marks)
        self._words = [mark for mark in marks if mark[:1] not in (b'<', END)]  # may start anywhere
        self._borders = b'[<>|:\x03]' if self._words else b'[<>|\x03]'
        known = set(self._names + self._names.upper() + self._marks + SPACE + SEPARATOR)
        self._fold = bytes(byte if byte in known else OTHER[0] for byte in range(256))

    def token(self, text: bytes) -> bytes:
        """Return a representative of a token."""
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
        """Return a representative of an input of the second automaton."""
        spans = text.lower().split(b'|')
        return b'|'.join(s if self._in_a_name(s) else OTHER for s in spans), closed

    def _in_a_name(self, text: bytes) -> bool:
        return text.lower().strip(SPACE) in self._names
