"""Allowed tokens against brute force, over random vocabularies and sets of actions on offer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen_vocabulary as qwen

from agentrl_jax.envs import Bandit
from agentrl_jax.text import answer as answers
from agentrl_jax.text import forms as languages
from agentrl_jax.text import grammar as grammars

NAMES = ('Up', 'Upper', 'U p', 'per', 'Down', 'D', 'a|', 'Left')
ROWS = 32


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Random texts and all bytes; token 0 ends a turn. Spelling is greedy, longest token first."""

    texts: tuple[bytes, ...]
    eos_ids = (0,)

    @property
    def vocab_size(self):
        return len(self.texts)

    def token_bytes(self):
        return list(self.texts)

    @functools.cached_property
    def tokens(self):
        return languages.Tokens(self.texts)

    def encode_batch(self, texts):
        return [self.tokens.spelling(text.encode()) for text in texts]


def vocabulary(rng, texts, size=40):
    """Return all bytes of some texts, and pieces of these texts."""
    letters = sorted({bytes([byte]) for text in texts for byte in text.encode()})
    pieces = set()
    while len(pieces) < size:
        text = texts[rng.integers(len(texts))].encode()
        start = rng.integers(len(text))
        pieces.add(text[start : start + rng.integers(2, 9)])
    return Vocabulary((b'', *letters, *sorted(pieces - {*letters})))


def draw_case(seed, opening):
    """Return (vocabulary, names, maximum actions of an answer, offered sets) for a seed."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(NAMES)[: rng.integers(2, 6)].tolist()
    limit = int(rng.integers(1, 3))
    form = answers.FORMS[opening]
    actions = grammars.BETWEEN.join(names)
    texts = [form.text.format(think='a>', actions=actions).replace('\x03', '')]
    texts += [*names, actions + '</answer>', '><think>', '></answer>', '</think></answer>']
    offered = rng.random((ROWS, len(names))) < 0.4
    offered[np.arange(ROWS), rng.integers(len(names), size=ROWS)] = True
    return vocabulary(rng, texts), names, limit, offered


def build(tokenizer, names, opening, spelling, longest, limit, table=None):
    return grammars.build_grammar(
        tokenizer,
        names,
        max_actions=limit,
        opening=opening,
        longest=longest,
        spelling=spelling,
        offers=True,
        tokens_across_tag=() if table is None else np.flatnonzero(answers.tokens_across_tag(table)),
    )


def least_tokens(text, pieces):
    """Return the minimum number of tokens from each byte of a text to its end."""
    need = [0] * (len(text) + 1)
    for at in reversed(range(len(text))):
        need[at] = 1 + min(need[at + len(p)] for p in pieces if text.startswith(p, at))
    return need


def can_follow(tokenizer, texts, read, left, spelling):
    """Return the tokens that may follow, by trying the texts of all legal answers."""
    legal = set()
    if spelling == 'own':
        for ids in ([*ids, 0] for ids in tokenizer.encode_batch(texts)):
            if len(ids) <= left + len(read) and ids[: len(read)] == read:
                legal.add(ids[len(read)])
        return legal
    pieces = {text: i for i, text in enumerate(tokenizer.texts) if text}
    so_far = b''.join(tokenizer.texts[i] for i in read)
    for text in map(str.encode, texts):
        if not text.startswith(so_far):
            continue
        rest = text[len(so_far) :]
        if not rest:
            legal |= {0} if left else set()
            continue
        need = least_tokens(rest, pieces)
        legal |= {i for p, i in pieces.items() if rest.startswith(p) and need[len(p)] + 2 <= left}
    return legal


@pytest.mark.parametrize('spelling', ['own', 'any'])
@pytest.mark.parametrize('seed', range(8))
def test_tokens_are_allowed_if_they_can_still_become_a_legal_answer(seed, spelling):
    tokenizer, names, limit, offered = draw_case(seed, '<answer>')
    rng = np.random.default_rng(seed)
    singles = [name + '</answer>' for name in names]
    if spelling == 'own':
        longest = 1 + max(map(len, tokenizer.encode_batch(singles)))
    else:
        pieces = [text for text in tokenizer.texts if text]
        longest = 1 + max(least_tokens(text.encode(), pieces)[0] for text in singles)
    with pytest.raises(ValueError, match='is too small for some actions'):
        build(tokenizer, names, '<answer>', spelling, longest - 1, limit)
    longest += int(rng.integers(3))
    grammar = build(tokenizer, names, '<answer>', spelling, longest, limit)
    after, through = np.asarray(grammar.after), np.asarray(grammar.through)[..., 0]
    columns = np.asarray(grammar.columns)
    for some in offered[:8]:
        firsts = [name for name, may in zip(names, some, strict=True) if may]
        more = ['', *(grammars.BETWEEN + name for name in names)][: 1 if limit == 1 else None]
        texts = [first + rest + '</answer>' for first in firsts for rest in more]
        bits = np.uint32((some << np.arange(len(some))).sum())
        state, read = grammar.first, []
        while state:
            allowed = (after[state] >= 0) & (through[state] & bits > 0)
            want = can_follow(tokenizer, texts, read, longest - len(read), spelling)
            assert set(columns[allowed].tolist()) == want and want
            read.append(int(rng.choice(sorted(want))))
            state = int(after[state, np.searchsorted(columns, read[-1])])
        assert len(read) <= longest


def sample(tokenizer, grammar, table, offered, longest, rng, weights=None):
    """Return (tokens int [R, longest], steps without an allowed token) of random answers."""
    bits = grammars.pack(jnp.asarray(offered))
    place = grammars.begin(grammar, jnp.zeros(len(offered), jnp.int32), bits)
    parser = answers.init_answer(table, len(offered))
    index = np.asarray(grammar.column(jnp.arange(tokenizer.vocab_size)))
    tokens, live, empty = np.zeros((len(offered), longest), int), np.ones(len(offered), bool), 0

    @jax.jit
    def push(place, parser, token, live, left):
        parser = answers.advance(table, parser, token, live)
        after = grammars.advance(grammar, place, token, live, left)
        return grammars.open_actions(grammar, place, after, table, parser), parser

    for step in range(longest):
        legal = np.asarray(grammars.allowed(grammar, place))
        packed = np.asarray(grammars.pack(jnp.asarray(legal)))
        order = rng.permutation(tokenizer.vocab_size)
        column, place_of = np.unique(index[order], return_index=True)
        token = order[place_of]  # one token per column
        legal = np.pad(legal, ((0, 0), (0, 1)))[:, column]
        empty += (live & ~legal.any(1)).sum()
        assert (legal.any(1) == (packed != 0).any(1)).all()  # as counted by the metric
        scores = rng.gumbel(size=legal.shape) + (0 if weights is None else np.log(weights[token]))
        tokens[:, step] = token[np.where(legal, scores, -np.inf).argmax(1)] * live
        left = jnp.full(len(offered), longest - 1 - step)
        place, parser = push(place, parser, jnp.asarray(tokens[:, step]), jnp.asarray(live), left)
        live &= ~np.isin(tokens[:, step], tokenizer.eos_ids)
    assert not live.any()
    return tokens, empty


def check_answers(tokenizer, tokens, names, offered, opening, limit):
    """Assert that every answer is legal and its first action is on offer."""
    texts = answers.with_ends(tokenizer.token_bytes(), tokenizer.eos_ids)
    for row, some in zip(tokens, offered, strict=True):
        end = next(i for i, token in enumerate(row) if token in tokenizer.eos_ids)
        text = b''.join(texts[i] for i in row[: end + (opening == 'Thought:')])
        matched, parts = answers.parse_answer(text, names, max_actions=limit, opening=opening)
        assert matched and answers.UNKNOWN not in parts and some[parts[0]], (text, parts)


@pytest.mark.parametrize('spelling', ['own', 'any'])
@pytest.mark.parametrize(('seed', 'opening'), [(0, '<think>'), (1, 'Thought:')])
def test_thoughts_leave_room_for_every_action_on_offer(seed, opening, spelling):
    """Tokens that end thoughts and contain more text, such as '><', led to dead ends."""
    tokenizer, names, limit, offered = draw_case(seed, opening)
    rng = np.random.default_rng(seed)
    texts = answers.with_ends(tokenizer.token_bytes(), tokenizer.eos_ids)
    table = answers.build_answer_table(texts, names, max_actions=limit, opening=opening)
    with pytest.raises(ValueError, match='leaves no tokens for thoughts') as error:
        build(tokenizer, names, opening, spelling, 3, limit, table)
    longest = int(str(error.value).split(' take ')[1].split()[0]) + int(rng.integers(1, 12))
    grammar = build(tokenizer, names, opening, spelling, longest, limit, table)
    before = answers.FORMS[opening].before
    weights = np.array([6.0 if text and text in before else 1.0 for text in texts])
    tokens, empty = sample(tokenizer, grammar, table, offered, longest, rng, weights)
    assert empty == 0
    check_answers(tokenizer, tokens, names, offered, opening, limit)


@pytest.mark.soak
@pytest.mark.parametrize(
    'opening, longest',
    [
        ('<think>', 32),
        ('Thought:', 24),
    ],
)
def test_qwen_always_has_a_legal_token_if_some_actions_are_on_offer(opening, longest):
    """62 of 96 episodes of the bandit reached a state that allowed no token."""
    tokenizer = qwen.qwen_tokenizer()
    names = Bandit(pairs='main').ACTION_NAMES
    rng = np.random.default_rng(0)
    offered = np.zeros((96, len(names)), bool)
    for row in offered:
        row[rng.choice(len(names), 2, replace=False)] = True
    texts = answers.with_ends(tokenizer.token_bytes(), tokenizer.eos_ids)
    table = answers.build_answer_table(texts, list(names), max_actions=1, opening=opening)
    grammar = build(tokenizer, names, opening, 'any', longest, 1, table)
    tokens, empty = sample(tokenizer, grammar, table, offered, longest, rng)
    assert empty == 0
    check_answers(tokenizer, tokens, list(names), offered, opening, 1)
