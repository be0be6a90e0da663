import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen_vocabulary

from agentrl_jax.envs import Bandit
from agentrl_jax.text import answer
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tools import demo_tokenizer

MOVES = ['Up', 'Down', 'Left', 'Right']
SPACED = ['turn left', 'turn', 'turn  left twice', 'go a|b', 'Über']
OPEN = '</think><answer>'

# Pieces of fuzzed responses. Tags appear complete, in halves and doubled; see also _mutate.
FRAGMENTS = [
    *'</think> <answer> </answer> <think> <|im_start|> <|im_end|> <|endoftext|> </ think>'.split(),
    *'ans wer> <|im_ start|> end|> < / > || | ||| |||| \0 é √ # Up UP Down dOWN Left'.split(),
    *'Jump U p Upp'.split(),
    *('</think> \n<answer>', ' || ', ' ', '\n', '\t\x0b\x0c\r', '\u2028'),
    *(' up', ' right ', 'Up Down'),
]


@functools.cache
def tokenizer(name):
    if name == 'qwen':
        return qwen_vocabulary.qwen_tokenizer()
    return load_tokenizer(demo_tokenizer.DEMO_MODEL)


@functools.cache
def table(name, names=tuple(MOVES), max_actions=5, opening='<think>'):
    pieces = tokenizer(name).token_bytes()
    return answer.build_answer_table(pieces, list(names), max_actions=max_actions, opening=opening)


@jax.jit
def parse_rows(automaton, tokens, length):
    """Return (matched [S], parts [S, A]) of rows of tokens [S, L]."""

    def step(state, column):
        token, index = column
        return answer.advance(automaton, state, token, index < length), None

    state = answer.init_answer(automaton, tokens.shape[0])
    columns = (tokens.T, jnp.arange(tokens.shape[1]))
    state, _ = jax.lax.scan(step, state, columns)
    return answer.matched(automaton, state), state.parts


def assert_equal_to_reference(name, rows, names=tuple(MOVES), max_actions=5, opening='<think>'):
    """Assert that automaton and regular expressions agree; return the number of matches."""
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    automaton = table(name, tuple(names), max_actions, opening)
    length = jnp.array([len(row) for row in rows])
    matched, parts = jax.device_get(parse_rows(automaton, tokens, length))
    for i, row in enumerate(rows):
        text = tokenizer(name).decode_bytes(row)
        expected = answer.parse_answer(text, list(names), max_actions=max_actions, opening=opening)
        assert bool(matched[i]) == expected[0], text
        if matched[i]:
            assert parts[i].tolist() == expected[1], text
    return int(matched.sum())


def _mutate(rng, text: bytes) -> bytes:
    """Swap, drop, double or replace a few bytes, which breaks UTF-8 and tags."""
    text = bytearray(text)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            text[at:at] = bytes(
                [rng.choice([0x3C, 0x3E, 0x7C, 0x20, 0xE2, 0xFF, rng.randrange(256)])]
            )
        elif kind == 1:
            del text[at : at + 1]
        else:
            text[at:at] = text[at : at + rng.randrange(1, 9)]
    return bytes(text)


def _split_into_tokens(rng, text: bytes, ids_of: dict) -> list[int]:
    """Return random tokens with these bytes, unlike any split of the tokenizer."""
    ids = []
    while text:
        sizes = [n for n in range(1, min(len(text), 16) + 1) if text[:n] in ids_of]
        size = rng.choice(sizes)
        ids.append(rng.choice(ids_of[text[:size]]))
        text = text[size:]
    return ids


@functools.cache
def fuzzed_rows(name, count, opening, seed) -> list[list[int]]:
    rng = random.Random(seed)
    pieces = tokenizer(name).token_bytes()
    ids_of = {}
    for i, piece in enumerate(pieces):
        if piece:
            ids_of.setdefault(piece, []).append(i)
    rows = []
    for _ in range(count):
        text = ''.join(rng.choices(FRAGMENTS, k=rng.randrange(16)))
        if rng.random() < 0.7:  # most would never reach the answer
            head = rng.choice([OPEN, '</think>\n<answer>', '<</think> <</think><answer>'])
            text = (
                (head if opening == '<think>' else '')
                + text
                + rng.choice(['</answer>', '</answer>x', ''])
            )
        raw = _mutate(rng, text.encode())
        if rng.random() < 0.3:
            ids = tokenizer(name).encode(raw.decode(errors='replace'))
        else:
            ids = _split_into_tokens(rng, raw, ids_of)
        for _ in range(rng.choice([0, 0, 1])):  # any token, including special ones
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(len(pieces)))
        rows.append(ids)
    return rows


@functools.cache
def byte_table(names, max_actions, opening):
    pieces = [bytes([b]) for b in range(256)]
    return answer.build_answer_table(pieces, list(names), max_actions=max_actions, opening=opening)


def parts_of(text, names=MOVES, max_actions=5, opening='<think>'):
    """Parse a response with the reference and, byte by byte, with the automaton."""
    raw = text if isinstance(text, bytes) else text.encode()
    automaton = byte_table(tuple(names), max_actions, opening)
    tokens = np.frombuffer(raw, np.uint8).astype(np.int32)[None]
    matched, parts = parse_rows(automaton, tokens, jnp.array([len(raw)]))
    expected = answer.parse_answer(raw, names, max_actions=max_actions, opening=opening)
    assert bool(matched[0]) == expected[0]
    if expected[0]:
        assert parts[0].tolist() == expected[1]
    return expected[1] if expected[0] else None


def test_answers_by_hand():
    # Up 0, Down 1, Left 2, Right 3; -1 unknown, -2 no part
    assert parts_of(f'I go up{OPEN}Up || left||RIGHT</answer> bye') == [0, 2, 3, -2, -2]
    assert parts_of(f'{OPEN} || Up |||| Down || </answer>') == [0, 1, -2, -2, -2]
    assert parts_of(f'{OPEN}Jump||Up|Down||U p</answer>') == [-1, -1, -1, -2, -2]
    assert parts_of(f'{OPEN}Up|||Down</answer>') == [0, -1, -2, -2, -2]  # the second is '|Down'
    assert parts_of(f'{OPEN}</answer>') == [-2] * 5
    assert parts_of(f'{OPEN}Up</ answer>') is None
    assert parts_of('</think> x <answer>Up</answer>') is None
    assert parts_of('</think><think></think>\n\t<answer>Up</answer>') == [0, -2, -2, -2, -2]
    # Only ASCII white space
    assert parts_of('</think>\x0b\f\r<answer>\tUp\n||\x0bDown\f</answer>') == [0, 1, -2, -2, -2]
    assert parts_of('</think>\u2003<answer>Up</answer>') is None
    assert parts_of(f'{OPEN}\u2003Up</answer>') == [-1, -2, -2, -2, -2]
    assert parts_of('Up||Down</answer>', opening='<answer>') == [0, 1, -2, -2, -2]
    # The first parts are kept, and text after a match does not change them
    assert parts_of(f'{OPEN}Up||Down||Jump||Left</answer>', max_actions=2) == [0, 1]
    more = f'{OPEN}Up</answer>||Down</answer>{OPEN}Left</answer>'
    assert parts_of(more, max_actions=3) == [0, -2, -2]


def test_a_token_may_finish_a_separator_and_contain_another():
    """'| b ||' raised IndexError: after a bar it ends two parts, but only one was counted."""
    pieces = [bytes([byte]) for byte in range(128)] + [b'a |', b'| b ||', b'|||', b'|| ||||']
    names = ['a', 'b', 'a|']
    automaton = answer.build_answer_table(pieces, names, max_actions=4, opening='<answer>')
    for text in ('a || b || a', 'a |||b||a', 'b || |||| a', 'a|| || ||||a|', '||||| b |||| a'):
        response = text.encode() + b'</answer>'
        want = answer.parse_answer(response, names, max_actions=4, opening='<answer>')
        for size in (1, 3, 6):  # the longest tokens of up to this many bytes
            ids, rest = [], response
            while rest:
                some = [p for p in pieces if rest.startswith(p) and len(p) <= size]
                ids.append(pieces.index(max(some, key=len)))
                rest = rest[len(pieces[ids[-1]]) :]
            matched, parts = parse_rows(automaton, jnp.array([ids]), jnp.array([len(ids)]))
            assert (bool(matched[0]), parts[0].tolist()) == want, text


def test_marks_inside_an_answer_are_removed_before_it_is_split():
    # Removing a mark may join bars or letters; the joined text is not searched for marks again.
    assert parts_of(f'{OPEN}U<think>p</answer>') == [0, -2, -2, -2, -2]
    assert parts_of(f'{OPEN}Up|<|im_end|>|Down</answer>') == [0, 1, -2, -2, -2]
    assert parts_of(f'{OPEN}<answer>Up<|im_start|></answer>') == [0, -2, -2, -2, -2]
    assert parts_of(f'{OPEN}<th<think>ink>Up</answer>') == [-1, -2, -2, -2, -2]
    assert parts_of(f'{OPEN}Up<||Down</answer>') == [-1, 1, -2, -2, -2]
    assert parts_of(f'{OPEN}Up</ans<think>wer></answer>') == [-1, -2, -2, -2, -2]


def test_names_may_contain_spaces_bars_and_other_letters():
    text = f'{OPEN}TURN || turn left||turn  left||turn left  ||go A|B||ÜBER||über</answer>'
    # 'turn' 1, 'turn left' 0, two spaces unknown, trailing space is stripped, only ASCII folds
    assert parts_of(text, names=SPACED, max_actions=7) == [1, 0, -1, 0, 3, 4, -1]
    assert parts_of(f'{OPEN}turn  left twice</answer>', names=SPACED) == [2, -2, -2, -2, -2]


@pytest.mark.parametrize(
    'names',
    [['Up', 'UP'], ['a||b'], [' up'], [''], ['<up>'], [f'{n:04}' for n in range(8000)]],
    ids=lambda names: names[0],
)
def test_ambiguous_or_unusable_names_are_rejected(names):
    with pytest.raises(ValueError):
        answer.build_answer_table([b'a'], names, max_actions=1, opening='<think>')


def test_names_with_a_common_prefix_may_be_long_and_many():
    """A hundred names of a hundred letters: 10,000 letters, but 109 nodes in the tree."""
    names = ['toggle and go through ' + 'a' * 76 + f'{n:02}' for n in range(100)]
    pieces = [bytes([byte]) for byte in range(256)]
    table = answer.build_answer_table(pieces, names, max_actions=1, opening='<answer>')
    tokens = np.frombuffer(f'{names[42]}</answer>'.encode(), np.uint8)[None].astype(np.int32)
    matched, parts = parse_rows(table, tokens, jnp.array([tokens.shape[1]]))
    assert bool(matched[0]) and parts.tolist() == [[42]]


@pytest.mark.slow('thousands of responses')
@pytest.mark.parametrize('opening', ['<think>', '<answer>'])
@pytest.mark.parametrize('name', ['demo', 'qwen'])
def test_automaton_equals_the_reference_on_fuzzed_responses(name, opening):
    rows = fuzzed_rows(name, 3000, opening, 0)
    matches = assert_equal_to_reference(name, rows, opening=opening)
    assert 600 < matches < 2700  # both outcomes are tested


@pytest.mark.soak
@pytest.mark.slow('thousands of responses')
@pytest.mark.parametrize('name', ['demo', 'qwen'])
def test_automaton_equals_the_reference_with_many_names(name):
    rows = fuzzed_rows(name, 1000, '<think>', 1)
    assert_equal_to_reference(name, rows, names=SPACED, max_actions=3)
    arms = Bandit().ACTION_NAMES
    rng = random.Random(2)
    texts = []
    for _ in range(1000):
        words = [rng.choice(arms) for _ in range(3)]
        words += [
            words[0][: rng.randrange(1, 9)],
            words[1][1:],
            words[2].upper(),
            '||',
            ' || ',
            '|',
        ]
        texts.append(f'x</think> <answer>{"".join(rng.choices(words, k=4))}</answer>')
    rows = tokenizer(name).encode_batch(texts)
    assert assert_equal_to_reference(name, rows, names=arms, max_actions=2) == 1000


@pytest.mark.soak
@pytest.mark.parametrize('name', ['demo', 'qwen'])
def test_every_token_of_the_vocabulary_acts_like_its_bytes(name):
    """Tokens are grouped by their effect; each is checked in all relevant positions.

    Tokens with a character of a tag or separator are tried in each position, others in one.
    """
    contexts = [
        ('', f'{OPEN}Up</answer>'),
        ('</think>', '<answer>Up</answer>'),
        ('</think><', 'answer>Up</answer>'),
        (OPEN, '||Up</answer>'),
        (f'{OPEN}Up', '</answer>'),
        (f'{OPEN}D', 'own</answer>'),
        (f'{OPEN}Up|', '|Left</answer>'),
        (f'{OPEN}Up<', 'im_end|>||Left</answer>'),
        (f'{OPEN}Up</', '</answer>'),
        (f'{OPEN}<|im_', '|>Right||Up</answer>'),
        (f'{OPEN}Up</answer', ''),
    ]
    pieces = tokenizer(name).token_bytes()
    place = np.random.default_rng(0).integers(len(contexts), size=len(pieces))
    place[[bool(set(piece) & set(b'<|>')) for piece in pieces]] = -1
    for n, (before, after) in enumerate(contexts):
        before, after = tokenizer(name).encode(before), tokenizer(name).encode(after)
        some = np.flatnonzero((place == -1) | (place == n))
        assert_equal_to_reference(name, [[*before, int(i), *after] for i in some])


def test_rows_that_are_not_live_and_tokens_without_bytes_change_nothing():
    automaton = table('demo')
    state = answer.init_answer(automaton, 3)
    first = jnp.array(tokenizer('demo').encode('</think>') * 3)
    state = answer.advance(automaton, state, first, jnp.array([True, False, True]))
    assert int(state.tag[1]) == automaton.first_tag != int(state.tag[0])
    eos = tokenizer('demo').special('<|im_end|>')
    beyond = tokenizer('demo').vocab_size + 7  # a padding row of the model's embedding
    after = answer.advance(automaton, state, jnp.array([eos, eos, beyond]), jnp.ones(3, bool))
    jax.tree.map(np.testing.assert_array_equal, after, state)
