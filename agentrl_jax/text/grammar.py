"""Grammar of legal answers, as an automaton over tokens, for constrained sampling.

A legal answer is 1 to max_actions action names with SEPARATOR between them, the closing tag, and
the end of the turn. If answers think, free text and the tags precede it. The automaton of an answer
is finite and acyclic: every token uses up one of the remaining tokens, states with the same
continuations are merged (so a budget that never binds adds no states), and an end is reachable from
every state. Free text may be any token except an end. Within the tags, tokens that contain their
end and more text (Qwen has '>L' and '><') are excluded. If free text leaves only enough tokens for
the longest answer, the tags and the answer are forced.

The budget prunes by first action. An edge lists the first actions that can still be finished with
the remaining tokens, so the allowed set is never empty.

Only few tokens of a vocabulary can occur in an answer. They are the columns of the table. Without
free text, only their logits are computed, so no array grows with the vocabulary. With free text,
every token has a column, shared by tokens with the same transitions (`classes`). The policy is the
softmax over the allowed tokens. The sampler records them (Rollout.allowed), so the trainer
normalises over the same set and does not need the automaton. A token that was the only allowed one
is not a decision and is excluded from means (rl.algorithm.trained). Answers to host environments
use another grammar (text.forms).

spelling: 'own': an answer is spelled as the tokenizer encodes it; 'any': by any tokens with its
bytes.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.text.answer import ANSWERING, FORMS, LAST_TAG, AnswerState, AnswerTable
from agentrl_jax.text.automata import (
    ANY,
    EVERY,
    WORD,
    Bytes,
    Loose,
    Piece,
    Spellings,
    Table,
    Tokens,
    in_order,
    step_spellings,
    with_choice,
    words,
)
from agentrl_jax.text.prompts import SEPARATOR
from agentrl_jax.tokens.tokenizer import Tokenizer

BETWEEN = f' {SEPARATOR} '  # as in demonstrations
MAX_ANSWERS = 50_000  # limit for 'own', which spells all answers one by one
NEVER = -1e30  # logit of tokens that are not allowed; finite, because 0 * -inf is nan


@struct.dataclass
class Grammar:
    """Q states, C columns; state 0 is the end of the answer."""

    columns: jax.Array  # int32 [U]  ids of tokens with separate columns, ascending
    classes: jax.Array | None  # int32 [V + 1]  column of every token with free text, and of ids
    # beyond the vocabulary; None: only the U tokens are ever allowed
    after: jax.Array  # int16 [Q, C]  next state; -1 = not allowed. With classes, the last column
    # has no token: it is allowed if a column shared by several tokens is (with_choice)
    through: jax.Array | None  # uint32 [Q, C, N / 32]  bits of the first actions that can follow;
    # None: all actions are on offer
    forced: jax.Array | None  # int32 [Q]  next state, the start of an ending, if only `reserve`
    # tokens are left; None: no free text
    reserve: jax.Array | None  # int32 [Q]
    first: int = struct.field(pytree_node=False)  # state before the actions
    think_state: int = struct.field(pytree_node=False)  # state of thoughts; thinks + 1 is the state
    # within the tags that end them; -1: no thoughts
    opened: int = struct.field(pytree_node=False)  # state of a written turn: allows everything
    answers: tuple[int, int] = struct.field(pytree_node=False)  # number of legal answers, and the
    # number with an unlimited budget

    @property
    def free(self) -> bool:
        """Whether the grammar has free text, which needs logits of the full vocabulary."""
        return self.classes is not None

    def column(self, token: jax.Array) -> jax.Array:
        """Return the columns of allowed tokens, int32 [...]."""
        if self.classes is None:
            return column_of(self.columns, token)
        return jnp.asarray(self.classes).at[token].get(mode='clip')

    @property
    def bits(self) -> 'Bits':
        """The meaning of the bits of Rollout.allowed, for the trainer."""
        if self.classes is None:
            return Bits(ids=tuple(np.asarray(self.columns).tolist()))
        return Bits(classes=np.asarray(self.classes, np.int32).tobytes())


@dataclasses.dataclass(frozen=True)
class Bits:
    """Map from tokens to bits of Rollout.allowed; hashable, because it is static in jit."""

    ids: tuple[int, ...] = ()  # token ids in bit order; other tokens are not allowed
    classes: bytes = b''  # int32 [V + 1], bit of every token, instead of ids; ids beyond the
    # vocabulary (padding of a head) use the last bit

    def index(self, vocabulary: int) -> np.ndarray:
        """Return the bit of each token for a head of this size, int32 [V]."""
        known = np.frombuffer(self.classes, np.int32)[:vocabulary]
        return np.pad(known, (0, vocabulary - len(known)), mode='edge')


@struct.dataclass
class GrammarState:
    """Grammar state of S rows."""

    state: jax.Array  # int32 [S]
    offered: jax.Array  # uint32 [S, N / 32]  bits of the actions on offer in the turn

    def put(self, rows: jax.Array, new: 'GrammarState') -> 'GrammarState':
        """Replace the state of rows int32 [w]; rows >= S are dropped."""
        return jax.tree.map(lambda old, x: old.at[rows].set(x, mode='drop'), self, new)


def pattern(names: Sequence[str], *, max_actions: int, opening: str) -> str:
    """Return a regular expression of the answers after their opening, for other samplers."""
    form = FORMS[opening]
    name, bar = '|'.join(map(re.escape, names)), re.escape(BETWEEN)
    actions = f'(?:{name})(?:{bar}(?:{name})){{0,{max_actions - 1}}}'
    if opening == 'Thought:':
        return f'[\\s\\S]*?\\nAction: {actions}'
    before = '' if form.before is None else f'[\\s\\S]*?{re.escape(form.before.decode())}'
    return before + actions + re.escape(form.closing.decode())


# ---- while sampling ------------------------------------------------------------------------------


def begin(grammar: Grammar, part: jax.Array, offered: jax.Array) -> GrammarState:
    """Return the state at the start of answers of kinds part int32 [w], 0 = acts.

    offered uint32 [w, N / 32]: bits of the actions on offer; no bits = all actions.
    """
    acts = grammar.first if grammar.think_state < 0 else grammar.think_state
    some = jnp.where((offered == 0).all(1, keepdims=True), ~jnp.uint32(0), offered)
    return GrammarState(state=jnp.where(part == 0, acts, grammar.opened), offered=some)


def allowed(grammar: Grammar, place: GrammarState) -> jax.Array:
    """Return the columns that may follow, bool [S, C]."""
    legal = jnp.asarray(grammar.after)[place.state] >= 0
    if grammar.through is None:
        return legal
    names = jnp.asarray(grammar.through)[place.state] & place.offered[:, None]
    return legal & (names != 0).any(-1)


def advance(
    grammar: Grammar, place: GrammarState, token: jax.Array, live: jax.Array, left: jax.Array
) -> GrammarState:
    """Advance live rows bool [S] by a token int32 [S]; left int32 [S]: remaining tokens."""
    column = jnp.minimum(grammar.column(token), grammar.after.shape[1] - 1)
    state = jnp.asarray(grammar.after)[place.state, column].astype(jnp.int32)
    if grammar.forced is not None:
        safe = jnp.maximum(state, 0)
        short = (state >= 0) & (left <= jnp.asarray(grammar.reserve)[safe])
        state = jnp.where(short, jnp.asarray(grammar.forced)[safe], state)
    return place.replace(state=jnp.where(live & (state >= 0), state, place.state))


def open_actions(
    grammar: Grammar,
    before: GrammarState,
    after: GrammarState,
    table: AnswerTable,
    parser: AnswerState,
) -> GrammarState:
    """Move rows at the end of their thoughts to the start of their actions.

    before, after: state without and with the last token; parser: state with that token.
    """
    if grammar.think_state < 0:
        return after
    stage = jnp.asarray(table.stage)[parser.tag]

    def thinking(place):
        return (place.state == grammar.think_state) | (place.state == grammar.think_state + 1)

    free = jnp.where(stage == LAST_TAG, grammar.think_state + 1, grammar.think_state)
    state = jnp.where(thinking(after), free, after.state)
    opens = thinking(before) & (stage == ANSWERING)
    return after.replace(state=jnp.where(opens, grammar.first, state))


def constrain(draw: Callable, grammar: Grammar, allowed: jax.Array) -> Callable:
    """Restrict draw(logits, uniform) -> (token, log-probability) to allowed columns bool [S, C]."""

    def constrained(logits, uniform):
        if grammar.free:
            index = grammar.column(jnp.arange(logits.shape[1]))
            return draw(jnp.where(allowed[:, index], logits, NEVER), uniform)
        column, logprob = draw(jnp.where(allowed, logits, NEVER), uniform)
        return jnp.asarray(grammar.columns)[column], logprob

    return constrained


def column_of(columns: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the column of each token, int32 [...]; U if it has none."""
    columns, tokens = jnp.asarray(columns), jnp.asarray(tokens)
    inside = jnp.minimum(jnp.searchsorted(columns, tokens), columns.shape[0] - 1)
    return jnp.where(columns[inside] == tokens, inside, columns.shape[0])


# ---- packed bits of allowed columns --------------------------------------------------------------


def _places(axes: int) -> jax.Array:
    """Return the bit numbers of a word along the last of `axes` axes."""
    return jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * (axes - 1) + (-1,))


def pack(bits: jax.Array) -> jax.Array:
    """Pack bool [..., C] into uint32 [..., words]; entry i is bit i % 32 of word i // 32."""
    rest = words(bits.shape[-1]) * WORD - bits.shape[-1]
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, rest)])
    bits = bits.reshape(*bits.shape[:-1], -1, WORD).astype(jnp.uint32)
    return jnp.sum(bits << _places(bits.ndim), axis=-1, dtype=jnp.uint32)


def unpack(packed: jax.Array, columns: int) -> jax.Array:
    """Unpack uint32 [..., words] to bool [..., columns]."""
    bits = packed[..., None] >> _places(packed.ndim + 1) & 1
    return bits.reshape(*packed.shape[:-1], -1)[..., :columns] > 0


# ---- building ------------------------------------------------------------------------------------


def build_grammar(
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    max_actions: int,
    opening: str,
    longest: int,
    spelling: str,
    offers: bool = False,
    writes: bool = False,
    tokens_across_tag: Sequence[int] | np.ndarray = (),
) -> Grammar:
    """Build the grammar of answers of up to `longest` tokens, including their end.

    opening: a key of FORMS; '': answers are only names. offers: the first action can be restricted
    to the actions on offer. writes: some turns are written and allow everything. spilling: tokens
    that cannot end thoughts (text.answer). Takes seconds for thousands of answers.
    """
    form, ends = FORMS.get(opening), list(tokenizer.eos_ids)
    react, think_state = opening == 'Thought:', form is not None and form.before is not None
    tail = '' if react or form is None else form.closing.decode()
    heads = [' ' if react else '']
    if think_state:
        heads.append('\nAction: ' if react else form.before.decode())
    tokens, table = Tokens(tokenizer.token_bytes()), Table(ends[0])
    if spelling == 'own':
        automata = [
            (step_spellings, spellings(tokenizer, names, max_actions, head, tail, offers))
            for head in heads
        ]
    else:
        automata = [
            tokens.automaton(Bytes(answer_pieces(names, max_actions, head, tail, offers), [0]))
            for head in heads
        ]
    budgets = [longest]
    if think_state and spelling == 'own':
        budgets = [table.longest(*automaton) for automaton in automata]
    elif think_state:  # the tokenizer's own spelling, not the longest one, which is byte by byte
        longest_texts = [
            [head + BETWEEN.join([name] * max_actions) + tail for name in names] for head in heads
        ]
        budgets = [1 + max(map(len, tokenizer.encode_batch(texts))) for texts in longest_texts]
    least = [table.least(*automaton) for automaton in automata]
    if offers and any(len(lengths) < len(names) for lengths in least):
        raise ValueError(
            'the tokenizer has no tokens for some actions: set rollout.constrain to "" or use '
            'another tokenizer'
        )
    if think_state:
        budgets = [max([left, *x.values()]) for left, x in zip(budgets, least, strict=True)]
        if max(budgets) >= longest:
            raise ValueError(
                f'rollout.max_response={longest} leaves no tokens for thoughts: their end and the '
                f'longest answer take {max(budgets)} tokens; increase it, or set env.think=False'
            )
    elif offers and longest < max(least[0].values()):
        raise ValueError(
            f'rollout.max_response={longest} is too small for some actions that may be on offer, '
            f'which take up to {max(least[0].values())} tokens: set it to at least that'
        )
    starts = [table.add(*x, left) for x, left in zip(automata, budgets, strict=True)]
    columns, closed, loose = table.tokens(), [], {}
    if think_state:
        tokens_across_tag = np.asarray(tokens_across_tag, int)
        merged = [i for i in tokens_across_tag if form.before in b''.join(tokens.texts[i].split())]
        closed = [[*ends, *merged], [*ends, *tokens_across_tag]]
    for never in closed:
        some, state = np.delete(np.arange(len(tokens.texts)), never), table.state()
        loose[state] = Loose(some, np.full(len(some), state), None, starts[-1], max(budgets))
    if writes:
        every, opened = np.arange(len(tokens.texts)), table.state()
        loose[opened] = Loose(every, np.full(len(every), opened))
    if loose:
        columns = sorted({*columns, *ends})
    arrays = table.arrays(
        loose, size=len(tokens.texts), apart=columns, kinds=len(names) if offers else 0
    )
    total = sum(len(names) ** k for k in range(1, max_actions + 1))
    legal = total if think_state or spelling != 'own' else _count(arrays['after'], starts[0])
    return Grammar(
        columns=np.array(columns, np.int32),
        **arrays,
        first=starts[0],
        think_state=min(loose) if think_state else -1,
        opened=opened if writes else starts[0],
        answers=(legal, total) if spelling == 'own' else (0, 0),
    )


def spellings(
    tokenizer: Tokenizer, names: Sequence[str], max_actions: int, head: str, tail: str, offers: bool
) -> Spellings:
    """Return all answers as the tokenizer encodes them."""
    count = sum(len(names) ** k for k in range(1, max_actions + 1))
    if count > MAX_ANSWERS:
        raise ValueError(
            f'{count} answers are too many to spell one by one: set rollout.constrain to any, or '
            'lower env.max_actions_per_turn'
        )
    chosen = [
        each
        for k in range(1, max_actions + 1)
        for each in itertools.product(range(len(names)), repeat=k)
    ]
    texts = [head + BETWEEN.join(names[i] for i in each) + tail for each in chosen]
    kinds = {}
    for ids, each in zip(map(tuple, tokenizer.encode_batch(texts)), chosen, strict=True):
        kinds[ids] = kinds.get(ids, 0) | 1 << each[0] if offers else EVERY
    return frozenset(kinds.items())


def answer_pieces(
    names: Sequence[str], max_actions: int, head: str, tail: str, offers: bool
) -> list[Piece]:
    """Return the pieces of answers: head, tail, and a separator and all names for each position.

    With offers, the kind of an answer is its first name.
    """
    size = len(names) + 1
    pieces = [Piece(head.encode(), range(3, 2 + size)), Piece(tail.encode())]
    for place in range(max_actions):
        bar, last = 2 + place * size, place == max_actions - 1
        pieces.append(Piece(BETWEEN.encode(), range(bar + 1, bar + size)))
        for i, name in enumerate(names):
            kind = i if offers and not place else ANY
            pieces.append(Piece(name.encode(), [1] if last else [1, bar + size], kind=kind))
    return pieces


def share_columns(grammars: Sequence[Grammar]) -> list[Grammar]:
    """Extend the grammars of several environments to shared columns, for a single trainer."""
    if len(grammars) == 1:
        return list(grammars)
    columns = np.unique(np.concatenate([np.asarray(g.columns) for g in grammars]))
    tokens, classes = columns, None
    if any(g.free for g in grammars):
        size = max(len(g.classes) for g in grammars if g.free)
        each = np.stack([g.column(np.arange(size)) for g in grammars])
        _, tokens, classes = np.unique(each, axis=1, return_index=True, return_inverse=True)
        classes = classes.reshape(-1).astype(np.int32)
    return [_spread(g, tokens, columns, classes) for g in grammars]


def _spread(
    grammar: Grammar, tokens: np.ndarray, columns: np.ndarray, classes: np.ndarray | None
) -> Grammar:
    """Return the grammar with a column for each of `tokens`, which represent the classes."""
    index = np.asarray(grammar.column(tokens))

    def chosen(table, nothing):
        table = np.asarray(table)
        return np.concatenate([table, np.full_like(table[:, :1], nothing)], 1)[:, index]

    after = chosen(grammar.after, -1)
    through = None if grammar.through is None else chosen(grammar.through, 0)
    if classes is not None:
        after, through = with_choice(after, through, classes)
    return grammar.replace(columns=columns, classes=classes, after=after, through=through)


def _count(after: np.ndarray, first: int) -> int:
    """Return the number of token sequences from a state to the end."""
    targets = [row[row >= 0].tolist() for row in after]
    known = {}
    for state in in_order(first, targets.__getitem__):
        known[state] = sum(known[x] for x in targets[state]) if state else 1
    return known[first]
