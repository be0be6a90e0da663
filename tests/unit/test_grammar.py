"""Constrained policies: only legal answers are sampled, and the trainer uses the same tokens."""

import functools
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import qwen_vocabulary as qwen
import tiny_agents as tiny

from agentrl_jax import train
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import chosen, decision_tokens, trained
from agentrl_jax.text import agents
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

KEY = jax.random.key(5)
LAKE = ['Left', 'Down', 'Right', 'Up']
CASES = [  # environment, spelling, forced opening, temperature
    ('frozen_lake', 'own', '<answer>', 1.0),
    ('frozen_lake', 'own', '<think>', 1.3),
    ('bandit', 'any', 'Thought:', 0.7),
]
LONGEST = {'<answer>': 12, '<think>': 30, 'Thought:': 30}


def build(names, spelling='any', longest=12, max_actions=2, opening='<answer>', **more):
    return grammars.build_grammar(
        tiny.tokenizer(),
        names,
        max_actions=max_actions,
        opening=opening,
        longest=longest,
        spelling=spelling,
        **more,
    )


def legal(grammar, first, offered=None):
    """Return all token sequences from a state to the end, by brute force."""
    after, columns = np.asarray(grammar.after), np.asarray(grammar.columns)
    places = np.asarray(grammar.column(columns))
    sequences, queue = [], [(first, ())]
    while queue:
        state, ids = queue.pop()
        if state == 0:
            sequences.append(ids)
            continue
        for u, token in zip(places, columns, strict=True):
            if after[state, u] < 0:
                continue
            if offered is not None:
                names = np.asarray(grammar.through)[state, u]
                bits = sum(int(word) << 32 * i for i, word in enumerate(names))
                if not any(bits >> name & 1 for name in offered):
                    continue
            queue.append((int(after[state, u]), (*ids, int(token))))
    return sequences


def texts(sequences):
    """Return the texts of answers without the end of the turn."""
    end = tiny.tokenizer().eos_ids[0]
    assert all(ids[-1] == end and end not in ids[:-1] for ids in sequences)
    return [tiny.tokenizer().decode_bytes(list(ids[:-1])).decode() for ids in sequences]


@functools.cache
def task(name, spelling, opening):
    more = {'max_actions_per_turn': 1} if name == 'bandit' else {}  # the restricted action
    return tiny.task(
        name, constrain=spelling, generation_prefix=opening, max_response=LONGEST[opening], **more
    )


@functools.cache
def rollout_of(name, spelling, opening, temperature):
    """Collect a rollout with random weights."""
    return tiny.play(
        name,
        tiny.untrained(),
        KEY,
        task_=task(name, spelling, opening),
        temperature=temperature,
        max_response=LONGEST[opening],
        max_tokens=400,
    )


# ---- the language --------------------------------------------------------------------------------


@pytest.mark.parametrize('spelling', ['own', 'any'])
def test_the_grammar_contains_exactly_the_legal_answers(spelling):
    grammar = build(LAKE, spelling)
    generated = texts(legal(grammar, grammar.first))
    want = [
        ' || '.join(names) + '</answer>'
        for k in (1, 2)
        for names in itertools.product(LAKE, repeat=k)
    ]
    assert set(generated) == set(want) and len(want) == 20
    assert spelling == 'any' or len(generated) == 20 and grammar.answers == (20, 20)
    for text in generated:
        matched, parts = answers.parse_answer(
            text.encode(), LAKE, max_actions=2, opening='<answer>'
        )
        assert matched and min(p for p in parts if p != answers.ABSENT) >= 0


@pytest.mark.parametrize('opening', ['<answer>', '<think>', 'Thought:'])
def test_the_pattern_matches_the_texts_that_are_parsed_as_answers(opening):
    pattern = re.compile(grammars.pattern(LAKE, max_actions=2, opening=opening))
    react = opening == 'Thought:'
    before = {'<answer>': '', '<think>': 'so</think><answer>', 'Thought:': ' so\nAction: '}[opening]
    after = '' if react else '</answer>'
    for actions, right in (
        ('Left', True),
        ('Up || Down', True),
        ('Up || Down || Up', False),
        ('Fly', False),
        ('', False),
    ):
        assert bool(pattern.fullmatch(before + actions + after)) == right
        response = (before + actions + after).encode() + (answers.END if react else b'')
        matched, parts = answers.parse_answer(response, LAKE, max_actions=3, opening=opening)
        legal = matched and answers.ABSENT != parts[0] and answers.UNKNOWN not in parts
        assert (legal and parts[2] == answers.ABSENT) == right


def test_a_token_that_ends_an_answer_identifies_its_name():
    """With names a and aa, and aa on offer, a</answer> was legal if </answer> is one token."""
    grammar = build(['a', 'aa'], 'any', max_actions=1, longest=20, offers=True)
    generated = set(texts(legal(grammar, grammar.first, {1})))
    assert generated == {'aa</answer>'}
    assert set(texts(legal(grammar, grammar.first, {0}))) == {'a</answer>'}


@pytest.mark.parametrize(
    ('names', 'settings', 'field'),
    [
        (LAKE, {'longest': 2}, 'rollout.max_response'),
        (LAKE, {'opening': '<think>', 'longest': 6}, 'rollout.max_response'),
        ([f'a{i}' for i in range(50)], {'spelling': 'own', 'max_actions': 3}, 'rollout.constrain'),
    ],
)
def test_grammars_that_cannot_be_built_are_rejected(names, settings, field):
    with pytest.raises(ValueError, match=field):
        build(names, **settings)


def test_worlds_that_share_columns_keep_their_answers():
    lake, other = build(LAKE), build(['pull Pilot', 'name A 1'], 'own')
    think_state = build(LAKE, opening='<think>', longest=30)
    for group in ((lake, other), (lake, other, think_state)):
        shared = grammars.share_columns(group)
        assert len({(x.columns.shape, x.after.shape[1]) for x in shared}) == 1
        assert all(x.free == any(g is think_state for g in group) for x in shared)
        for before, after in zip(group, shared, strict=True):
            assert sorted(legal(after, after.first)) == sorted(legal(before, before.first))
    every = np.arange(tiny.tokenizer().vocab_size)
    free = np.asarray(shared[2].after)[shared[2].think_state, np.asarray(shared[2].column(every))]
    ends = np.isin(every, tiny.tokenizer().eos_ids)
    assert (free[ends] == -1).all() and (free[~ends] >= 0).all()


def test_unpack_inverts_pack():
    bits = np.random.default_rng(0).random((3, 5, 40)) < 0.5
    packed = grammars.pack(jnp.asarray(bits))
    assert packed.dtype == jnp.uint32 and packed.shape == (3, 5, 2)
    assert (np.asarray(grammars.unpack(packed, 40)) == bits).all()
    assert int(packed[0, 0, 1]) == sum(1 << i for i in range(8) if bits[0, 0, 32 + i])


# ---- the sampler and the trainer -----------------------------------------------------------------


each_case = pytest.mark.parametrize(
    'case', [CASES[0], pytest.param(CASES[1], marks=pytest.mark.soak), CASES[2]], ids=str
)


@each_case
def test_every_answer_is_legal_and_ends_with_eos(case):
    name, spelling, opening, _ = case
    out, counters = rollout_of(*case)
    assert counters['overflow'] == counters['nonfinite'] == counters['no_legal_token'] == 0
    env = task(name, spelling, opening).env
    for b, k in np.argwhere(np.arange(out.valid.shape[1]) < out.num_turns[:, None]):
        ids = out.tokens[b][out.action_mask[b] & (out.turn[b] == k)]
        assert out.valid[b, k] and out.turn_stop[b, k] == TurnStop.EOS
        response = tiny.tokenizer().decode_bytes(ids[:-1].tolist())
        response += answers.END if opening == 'Thought:' else b''
        matched, parts = answers.parse_answer(
            response, env.ACTION_NAMES, max_actions=3, opening=opening
        )
        assert matched and parts[0] >= 0 and answers.UNKNOWN not in parts
    assert not out.penalties.any()


@each_case
def test_the_trainer_reproduces_the_probabilities_of_the_sampler(case):
    name, spelling, opening, temperature = case
    out, _ = rollout_of(*case)
    grammar = task(name, spelling, opening).grammar
    assert grammar.free == (opening != '<answer>')
    score = tiny.scored(grammar.bits, temperature)
    logprobs, entropy = score(tiny.untrained(), out.tokens, out.attention_mask, out.allowed)
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert np.abs(gap).max() <= 1e-5
    count = np.unpackbits(out.allowed.view(np.uint8), axis=-1).sum(-1)
    forced = out.action_mask & (count == 1)
    assert forced.any() and np.abs(np.where(forced, logprobs, 0.0)).max() == 0.0
    if not grammar.free:
        bound = np.log(np.maximum(count, 1)) + 1e-5
        assert (np.asarray(entropy)[out.action_mask] <= bound[out.action_mask]).all()
    assert not out.allowed[~out.action_mask].any()


def test_logits_of_the_columns_equal_those_of_the_masked_vocabulary():
    out, _ = rollout_of(*CASES[0])
    grammar = task('frozen_lake', 'own', '<answer>').grammar
    rows = (tiny.untrained(), out.tokens, out.attention_mask)
    few, few_entropy = tiny.scored(grammar.bits, 1.0)(*rows, out.allowed)
    every = np.arange(tiny.tokenizer().vocab_size)
    classes = np.asarray(grammars.column_of(grammar.columns, every), np.int32)
    full = grammars.Bits(classes=classes.tobytes())
    many, many_entropy = tiny.scored(full, 1.0)(*rows, out.allowed)
    for one, other in ((few, many), (few_entropy, many_entropy)):
        np.testing.assert_allclose(one[out.action_mask], other[out.action_mask], atol=1e-6)


def test_probabilities_of_all_legal_answers_sum_to_one():
    grammar = build(LAKE, 'any', longest=6)
    sequences = legal(grammar, grammar.first)
    prompt = tiny.tokenizer().encode('P___\n____\n')
    width = len(prompt) + 6
    tokens = np.zeros((len(sequences), width), np.int32)
    allowed = np.zeros((len(sequences), width, 1), np.uint32)
    live = np.zeros(tokens.shape, bool)
    after, columns = np.asarray(grammar.after), np.asarray(grammar.columns)
    for row, ids in enumerate(sequences):
        tokens[row, : len(prompt)], state = prompt, grammar.first
        for place, token in enumerate(ids, len(prompt)):
            tokens[row, place], live[row, place] = token, True
            allowed[row, place] = np.asarray(grammars.pack(jnp.asarray(after[state] >= 0)))
            state = after[state, np.searchsorted(columns, token)]
    attention = np.arange(width) < len(prompt) + live.sum(1, keepdims=True)
    score = tiny.scored(grammar.bits, 1.0)
    logprobs, _ = score(tiny.untrained(), tokens, attention, allowed)
    total = np.exp(np.where(live, logprobs, 0.0).astype(np.float64).sum(1)).sum()
    assert math.isclose(total, 1.0, abs_tol=1e-5) and len(sequences) > 20


def test_gradients_equal_those_of_the_masked_softmax():
    hidden = jax.random.normal(KEY, (1, 5, 8))
    head = jax.random.normal(jax.random.key(6), (8, 9))
    tokens = jnp.array([[0, 2, 5, 7, 2]])
    sets = [(), (2, 5), (5,), (2, 5, 7), (2, 7)]
    allowed = np.array([[[sum(1 << (2, 5, 7).index(t) for t in s)] for s in sets]], np.uint32)

    def ours(hidden, head):
        logprobs = losses.token_logprobs(
            hidden,
            head,
            tokens,
            losses.HeadSettings(chunk_size=2, bits=grammars.Bits(ids=(2, 5, 7))),
            allowed=jnp.asarray(allowed),
        )[0]
        return logprobs[0, 1:].sum()

    def plain(hidden, head):
        total = 0.0
        for t in range(1, 5):
            some = (hidden[0, t - 1] @ head)[jnp.array(sets[t])]
            total += (hidden[0, t - 1] @ head)[tokens[0, t]] - jax.nn.logsumexp(some)
        return total

    mine, theirs = (jax.jit(jax.grad(f, (0, 1)))(hidden, head) for f in (ours, plain))
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_thoughts_are_free_until_only_an_answer_fits():
    out, _ = rollout_of('frozen_lake', 'own', '<think>', 1.3)
    grammar = task('frozen_lake', 'own', '<think>').grammar
    other = grammar.columns.shape[0]  # column of all remaining tokens
    place = other // 32, other % 32
    free = out.action_mask & (out.allowed[..., place[0]] >> np.uint32(place[1]) & 1 > 0)
    turns = [(b, k) for b in range(16) for k in range(int(out.num_turns[b]))]
    lengths = [int((free[b] & (out.turn[b] == k)).sum()) for b, k in turns]
    assert (
        max(lengths) == LONGEST['<think>'] - grammar.reserve[grammar.think_state]
    )  # random weights do not stop
    assert not np.isin(out.tokens[free], tiny.tokenizer().eos_ids).any()


@pytest.mark.soak
def test_no_qwen_token_ends_thoughts_and_starts_an_action():
    """The tokenizer spells '<answer>Left' with '>L', after which any token was allowed."""
    tokenizer = qwen.qwen_tokenizer()
    ends = answers.with_ends(tokenizer.token_bytes(), tokenizer.eos_ids)
    table = answers.build_answer_table(ends, LAKE, max_actions=2, opening='<think>')
    tokens_across_tag = np.flatnonzero(answers.tokens_across_tag(table))
    texts = [tokenizer.decode_bytes([i]) for i in tokens_across_tag]
    assert {b'>L', b'><', b'></'} <= {*texts} and b'>' not in texts and b'>\n' not in texts
    assert all(text[:1] == b'>' for text in texts)
    grammar = grammars.build_grammar(
        tokenizer,
        LAKE,
        max_actions=2,
        opening='<think>',
        longest=40,
        spelling='own',
        tokens_across_tag=tokens_across_tag,
    )
    place = grammars.begin(grammar, jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.uint32))
    parser = answers.init_answer(table, 1)
    live, left = jnp.ones(1, bool), jnp.full(1, 39)

    def legal_now(token):
        return bool(grammars.allowed(grammar, place)[0, int(grammar.column(jnp.int32(token)))])

    texts_of = tokenizer.token_bytes()
    spilt = texts_of.index(b'>L')
    assert legal_now(spilt)  # in the middle of a thought
    for token in tokenizer.encode('I go</think><answer'):
        assert legal_now(token)
        parser = answers.advance(table, parser, jnp.array([token]), live)
        after = grammars.advance(grammar, place, jnp.array([token]), live, left)
        place = grammars.open_actions(grammar, place, after, table, parser)
    assert not legal_now(spilt) and not legal_now(texts_of.index(b'><'))
    (closing,) = tokenizer.encode('>')
    assert legal_now(closing)
    parser = answers.advance(table, parser, jnp.array([closing]), live)
    after = grammars.advance(grammar, place, jnp.array([closing]), live, left)
    place = grammars.open_actions(grammar, place, after, table, parser)
    assert int(place.state[0]) == grammar.first


# ---- training ------------------------------------------------------------------------------------


def test_forced_tokens_count_in_means_only_in_turns_without_a_choice():
    """Two turns: 'choice forced forced', 'forced forced'."""
    out = Rollout.empty(
        jnp.zeros(1, jnp.int32),
        jnp.zeros(1, jnp.int32),
        pad_id=0,
        max_tokens=8,
        max_turns=2,
        max_actions=1,
        words=1,
    )
    bits = jnp.array([0, 3, 1, 2, 0, 4, 1, 0], jnp.uint32)[None, :, None]
    out = out.replace(
        allowed=bits,
        action_mask=jnp.array([[0, 1, 1, 1, 0, 1, 1, 0]], bool),
        turn=jnp.array([[0, 0, 0, 0, 1, 1, 1, -1]]),
        num_turns=jnp.array([2]),
        episode_stop=jnp.array([EpisodeStop.TERMINATED]),
    )
    assert decision_tokens(out)[0].tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    rows, mask = trained(out, None)
    assert rows.all() and (mask == decision_tokens(out)).all()
    assert trained(out.replace(allowed=None), None)[1].sum() == 5
    assert not trained(out, jnp.array([False]))[1].any()
    continued = jax.tree.map(lambda x: jnp.stack([x, x], 1), out)  # [B, F, ...], like continuations
    assert (chosen(continued) == decision_tokens(out)[:, None].repeat(2, 1)).all()


def test_sampled_tokens_without_a_legal_choice_are_counted():
    sizes = dict(pad_id=0, max_tokens=4, max_turns=1, max_actions=1)
    out = Rollout.empty(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), words=2, **sizes)
    sampled = jnp.array([[False, True, True, True]])
    bits = jnp.array([[0, 0], [0, 4], [0, 0], [1, 0]], jnp.uint32)[None]
    out = out.replace(action_mask=sampled, allowed=bits)
    assert out.no_legal_token.tolist() == [[False, False, True, False]]
    assert not out.replace(allowed=None).no_legal_token.any()


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_a_run_on_a_mesh_trains_on_its_samples(tmp_path):
    settings = {
        'mesh.data': 2,
        'mesh.tensor': 2,
        'model.num_kv_heads': 2,
        'env.think': False,
        'rollout.constrain': 'own',
        'rollout.max_response': 8,
        'rollout.max_tokens': 240,
        'loss.sampler_correction': 'tis',
        'eval.every': 3,
        'checkpoint.every': 3,
    }
    cfg = micro_runs.plain('frozen_lake', **settings)
    assert train.train(cfg, str(tmp_path)) == 0
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    steps = [row for row in rows if 'rollout/success' in row]
    assert len(steps) == 3 and {row['rollout/valid_format'] for row in steps} == {1.0}
    assert max(row['sampler/logprob_gap'] for row in steps) <= 1e-5
    assert all(np.isfinite(row['policy/loss']) for row in steps)


def test_written_turns_allow_every_token():
    grammar = build(LAKE, longest=12, writes=True)
    place = grammars.begin(grammar, jnp.array([0, 1]), jnp.ones((2, 1), jnp.uint32))
    legal = np.asarray(grammars.allowed(grammar, place))
    assert np.delete(legal[1], -2).all() and not legal[1, -2]  # not the padding of the head
    assert not legal[0].all() and grammar.free
    assert agents.ACT == 0
