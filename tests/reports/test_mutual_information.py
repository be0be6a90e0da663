"""Mutual information of answers and prompts: by hand, by a slow reference, on toy models."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny
import toy_rollouts as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.measure import mutual_information as information
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.text import answer as answers

GROUPS, GROUP_SIZE, LENGTH = 5, 4, 12
SETTINGS = information.Settings(
    group_size=GROUP_SIZE,
    pairs=GROUPS * GROUP_SIZE,
    text='answer',
    microbatch_rows=5,
    head=losses.HeadSettings(1.0, chunk_size=64, row_tokens=4),
)
reduced = jax.jit(information.reduce_matrix)


def reduce(matrix, prompt_of, *, lengths=None, used=None, prompt_used=None, same=None):
    rows, columns = np.shape(matrix)
    pairs = information.Pairs(
        row=None,
        start=None,
        length=jnp.ones(rows, jnp.int32) if lengths is None else jnp.asarray(lengths),
        own=jnp.asarray(prompt_of),
        used=jnp.ones(rows, bool) if used is None else jnp.asarray(used),
        prompt_row=None,
        prompt_length=None,
        prompt_used=jnp.ones(columns, bool) if prompt_used is None else jnp.asarray(prompt_used),
    )
    same = jnp.eye(columns, dtype=bool) if same is None else jnp.asarray(same)
    metrics = reduced(jnp.asarray(matrix, jnp.float32), pairs, same)
    return {name.removeprefix('collapse/'): float(x) for name, x in metrics.items()}


def test_two_answers_and_two_prompts_by_hand():
    # p = [[1/2, 1/4], [1/8, 1/2]]: mixtures 3/8 and 5/16, ratios 4/3 and 8/5
    out = reduce(np.log([[1 / 2, 1 / 4], [1 / 8, 1 / 2]]), [0, 1])
    gains = [math.log(4 / 3), math.log(8 / 5)]  # .28768, .47000
    assert out['mi'] == pytest.approx(sum(gains) / 2, abs=1e-6)
    assert out['mi_share'] == pytest.approx(sum(gains) / 2 / math.log(2), abs=1e-6)
    assert out['conditional_entropy'] == pytest.approx(math.log(2), abs=1e-6)
    assert out['marginal_entropy'] == pytest.approx(-math.log(15 / 128) / 2, abs=1e-6)
    std = (math.log(3 / 8) - math.log(5 / 16)) / 2  # of two numbers: half their distance
    assert out['marginal_std'] == pytest.approx(std, abs=1e-6)
    assert out['mi_z'] == pytest.approx(sum(gains) / 2 / (std + 1e-3), rel=1e-4)
    assert out['retrieval_accuracy'] == 1 and out['retrieval_chance'] == 0.5
    assert out['quadrant'] == 0  # entropy .69, share .55: diverse


def test_the_four_regimes_and_the_bound_log_n():
    out = reduce(np.where(np.eye(4, dtype=bool), -1.0, -200.0), np.arange(4))
    assert out['mi'] == pytest.approx(math.log(4), abs=1e-6)
    assert out['mi_share'] == pytest.approx(1, abs=1e-6)
    assert out['quadrant'] == 0
    certain = reduce(np.where(np.eye(4, dtype=bool), -0.01, -200.0), np.arange(4))
    assert certain['quadrant'] == 2  # compressed
    assert reduce(np.full((4, 4), -3.0), np.arange(4))['quadrant'] == 1  # template collapse
    assert reduce(np.full((4, 4), -0.01), np.arange(4))['quadrant'] == 3  # low-entropy collapse


def test_equal_prompts_do_not_lower_the_share():
    """Four columns of two prompts can hold log 2; previously their share was at most a half."""
    equal = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))
    out = reduce(np.where(equal, -1.0, -200.0), np.arange(4), same=equal)
    assert out['mi'] == pytest.approx(math.log(2), abs=1e-6)
    assert out['mi_share'] == pytest.approx(1, abs=1e-6)


def test_without_two_different_prompts_the_information_is_nan():
    everything = np.ones((2, 2), bool)
    assert math.isnan(reduce(np.zeros((2, 2)), [0, 1], same=everything)['mi'])
    assert math.isnan(reduce(np.zeros((2, 2)), [0, 1], prompt_used=[True, False])['mi'])
    assert math.isnan(reduce(np.zeros((2, 2)), [0, 1], used=[False, False])['mi'])


def slow_reference(matrix, lengths, prompt_of, used, prompt_used, same):
    """Float64, one number at a time."""
    columns = [j for j, ok in enumerate(prompt_used) if ok]
    out = {'mi': [], 'mi_token': [], 'marginal': [], 'hit': [], 'hit_2': [], 'chance': []}
    for i, row in enumerate(matrix):
        if not used[i]:
            continue
        for name, values in (('mi', row), ('mi_token', row / max(lengths[i], 1))):
            mixture = sum(math.exp(values[j]) for j in columns) / len(columns)
            out[name].append(values[prompt_of[i]] - math.log(mixture))
        out['marginal'].append(math.log(mixture))
        ranked = sorted(columns, key=lambda j: -row[j])
        out['hit'].append(same[prompt_of[i]][ranked[0]])
        out['hit_2'].append(any(same[prompt_of[i]][j] for j in ranked[:2]))
        out['chance'].append(sum(same[prompt_of[i]][j] for j in columns) / len(columns))
    means = {name: np.mean(values) for name, values in out.items() if name != 'marginal'}
    return means | {'z': means['mi_token'] / (np.std(out['marginal']) + 1e-3)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_reduction_matches_a_slow_reference(seed):
    rows, columns, rng = 6, 4, np.random.default_rng(seed)
    matrix = -rng.permutation(rows * columns).reshape(rows, columns) / 4  # no ties
    lengths, prompt_of = rng.integers(1, 9, rows), rng.integers(columns, size=rows)
    prompt_used = rng.random(columns) < 0.8
    prompt_used[:2] = True
    kind = rng.integers(columns, size=columns)  # equal numbers: equal prompts
    kind[:2] = 0, 1
    same = kind[:, None] == kind[None]
    used = (rng.random(rows) < 0.8) & prompt_used[prompt_of]
    if not used.any():
        return
    slow = slow_reference(matrix, lengths, prompt_of, used, prompt_used, same)
    fast = reduce(matrix, prompt_of, lengths=lengths, used=used, prompt_used=prompt_used, same=same)
    assert fast['mi'] == pytest.approx(slow['mi'], abs=1e-5)
    assert fast['mi_token'] == pytest.approx(slow['mi_token'], abs=1e-5)
    assert fast['mi_z'] == pytest.approx(slow['z'], rel=1e-3, abs=1e-4)
    assert fast['retrieval_accuracy'] == pytest.approx(slow['hit'])
    assert fast['retrieval_accuracy_2'] == pytest.approx(slow['hit_2'])
    assert fast['retrieval_chance'] == pytest.approx(slow['chance'])


# ---- toy models: prompts of two tokens, answers of one to three, groups of four ------------------


def toy_rollout(seed=0, faulty=()):
    rng = np.random.default_rng(seed)
    layouts = [[(2, int(rng.integers(1, 4))), (2, 2)] for _ in range(GROUPS * GROUP_SIZE)]
    rollout = toy.rollout_of(layouts, np.zeros((len(layouts), 2)), length=LENGTH, faulty=faulty)
    prompt = jnp.repeat(jnp.arange(GROUPS), GROUP_SIZE)
    tokens = rollout.tokens.at[:, 0].set(prompt).at[:, 1].set(6)
    return rollout.replace(tokens=tokens.astype(jnp.int32))


@functools.cache
def program(hidden_fn, pairs):
    """Jitted (key, head, rollout) -> (pairs, matrix, metrics) of full answers."""
    settings = dataclasses.replace(SETTINGS, pairs=pairs)

    def run(key, head, rollout):
        chosen = information.choose_pairs(key, rollout, None, None, settings)
        sums = information.cross_logprobs(
            head, rollout, chosen, LENGTH, settings, ModelFns(hidden_fn, lambda p: p)
        )
        same = information.equal_prompts(rollout, chosen, LENGTH)
        return chosen, sums, information.reduce_matrix(sums, chosen, same)

    return jax.jit(run, compiler_options=tiny.QUICK)


def cross(rollout, hidden_fn, head, *, pairs=GROUPS * GROUP_SIZE, key=0):
    run = program(hidden_fn, pairs)
    chosen, sums, metrics = jax.device_get(run(jax.random.key(key), head, rollout))
    return chosen, sums, {name.removeprefix('collapse/'): x for name, x in metrics.items()}


def ignores(params, tokens, positions, attention_mask):
    return jnp.broadcast_to(jnp.array([1.0, -1.0]), (*tokens.shape, 2))


MODEL = toy.toy_params(3)


def toy_model(params, tokens, positions, attention_mask):
    return toy.toy_hidden(MODEL, tokens, positions, attention_mask)


def test_an_entry_scores_the_answer_after_the_other_prompt():
    rollout = toy_rollout()
    tokens = np.asarray(rollout.tokens)
    embed, mix, head = (np.asarray(MODEL[name], np.float64) for name in ('embed', 'mix', 'head'))

    def slow(prompt, answer):
        """sum of log p, one token at a time: toy.toy_hidden is a running mean."""
        total, text = 0.0, list(prompt)
        for token in answer:
            logits = np.tanh(np.mean(embed[text], axis=0) @ mix) @ head
            total += logits[token] - np.log(np.exp(logits).sum())
            text.append(token)
        return total

    chosen, sums, _ = cross(rollout, toy_model, MODEL['head'])
    for i, j in [(0, 0), (0, 3), (7, 1), (16, 4)]:
        prompt = tokens[chosen.prompt_row[j], : chosen.prompt_length[j]]
        answer = tokens[chosen.row[i], chosen.start[i] : chosen.start[i] + chosen.length[i]]
        assert sums[i, j] == pytest.approx(slow(prompt, answer), abs=1e-5)


def test_answers_are_chosen_evenly_and_never_from_faulty_or_empty_episodes():
    rollout = toy_rollout(faulty=(0, 1, 2, 3, 5))
    chosen, _, out = cross(rollout, ignores, jnp.ones((2, toy.VOCAB)), pairs=12)
    assert chosen.row.shape == (10,)  # five groups, two of each
    assert not np.asarray(chosen.used)[:2].any() and np.asarray(chosen.used)[2:].all()
    assert np.asarray(chosen.prompt_used).tolist() == [False, True, True, True, True]
    assert (np.asarray(chosen.row) // GROUP_SIZE == np.repeat(range(5), 2)).all()
    assert len(set(np.asarray(chosen.row).tolist())) == 10 and 5 not in np.asarray(chosen.row)
    assert out['retrieval_chance'] == pytest.approx(1 / 4)
    few, _, _ = cross(rollout, ignores, jnp.ones((2, toy.VOCAB)), pairs=3)
    assert few.row.shape == (3,) and len(set((np.asarray(few.row) // GROUP_SIZE).tolist())) == 3
    drawn = {
        tuple(np.asarray(cross(rollout, ignores, jnp.ones((2, 7)), key=k)[0].row)) for k in range(3)
    }
    assert len(drawn) == 3


# ---- real text ----------------------------------------------------------------------------------


@functools.cache
def table():
    return tiny.task('frozen_lake').answer


@pytest.mark.parametrize(
    ('response', 'reasoning'),
    [
        ('go up</think><answer>Up</answer>', 'go up'),
        ('go up</think>\n<answer>Up</answer>', 'go up'),
        ('a</think>b</think><answer>Up', 'a</think>b'),  # as the regular expression reads it
        ('a < b</think> <answer>', 'a < b'),
        ('</think><answer>Up</answer>', ''),
        ('no end at all', 'no end at all'),
        ('no end </thi', 'no end </thi'),
    ],
)
def test_reasoning_ends_where_the_tags_start(response, reasoning):
    ids = tiny.tokenizer().encode(response)
    tokens, live = jnp.array([ids + [0] * 3]), jnp.arange(len(ids) + 3)[None] < len(ids)
    length = int(answers.reasoning_length(table(), tokens, live)[0])
    assert tiny.tokenizer().decode(ids[:length]).strip() == reasoning


def test_an_answer_after_its_prompt_has_the_sampler_s_log_probabilities():
    out, _ = tiny.played('frozen_lake')
    task = tiny.task('frozen_lake')
    settings = dataclasses.replace(
        SETTINGS,
        pairs=8,
        microbatch_rows=8,
        head=losses.HeadSettings(tiny.TEMPERATURES['frozen_lake'], 512, tiny.MAX_RESPONSE),
    )

    def run(params, out):
        chosen = information.choose_pairs(tiny.KEY, out, task.answer, task.eos_ids, settings)
        width, fns = out.tokens.shape[1], ModelFns(tiny.hidden, tiny.head)
        return chosen, information.cross_logprobs(params, out, chosen, width, settings, fns)

    run = jax.jit(run, compiler_options=tiny.QUICK)
    chosen, sums = jax.device_get(run(tiny.cloned('frozen_lake')[0], out))
    sampled = np.where(out.action_mask, out.logprobs, 0.0)
    for i, (row, start) in enumerate(zip(chosen.row, chosen.start, strict=True)):
        turn = out.turn[row] == out.turn[row, start]
        assert sums[i, chosen.own[i]] == pytest.approx(sampled[row][turn].sum(), abs=2e-4)
        assert chosen.length[i] == (out.action_mask[row] & turn).sum()
