"""Behaviour cloning: contents of demonstrations, trained tokens, and learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_agents as tiny

from agentrl_jax.imitation import clone, demonstrations
from agentrl_jax.machine import sharding
from agentrl_jax.machine.processes import CompileCounter
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rl.microbatches import Slices
from agentrl_jax.text.answer import parse_answer

END = tiny.tokenizer().special('<|im_end|>')
OPENING = tiny.spelled('<|im_start|>assistant\n<think>')
FNS = ModelFns(tiny.hidden, tiny.head)
each_world = pytest.mark.parametrize(
    'name', ['frozen_lake', pytest.param('sokoban', marks=pytest.mark.soak)]
)


@functools.cache
def demonstrate(name, oracle):
    return jax.device_get(tiny.demonstrations(name, oracle=oracle, episodes=24))


def answers_of(row, mask):
    """Return the token ids of each contiguous run of trained tokens."""
    inside = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [row[start:end] for start, end in inside.reshape(-1, 2)]


def number_of_answers(data):
    rows = zip(data.tokens, data.mask, strict=True)
    return np.array([len(answers_of(row, mask)) for row, mask in rows])


def expected_mask(row, used):
    """Mark the trained tokens: after '<|im_start|>assistant\\n<think>' up to '<|im_end|>'."""
    mask, t = np.zeros(len(row), bool), 0
    while t < used:
        if row[t : t + len(OPENING)].tolist() == OPENING:
            t += len(OPENING)
            end = t + int(np.argmax(row[t:used] == END))
            mask[t : end + 1] = True
            t = end
        t += 1
    return mask


@each_world
def test_exactly_the_answers_and_their_ends_are_trained(name):
    data = demonstrate(name, 0.5)
    for row, attention, mask in zip(data.tokens, data.attention_mask, data.mask, strict=True):
        used = attention.sum()
        np.testing.assert_array_equal(attention, np.arange(len(row)) < used)
        np.testing.assert_array_equal(mask, expected_mask(row, used))
        assert mask[used - 1] and row[used - 1] == END  # a demonstration ends with an answer
        assert (row[used:] == tiny.tokenizer().pad_id).all()
        assert 1 <= len(answers_of(row, mask)) <= 3


@each_world
def test_demonstrated_answers_parse_back_into_legal_actions(name):
    data, env = demonstrate(name, 0.5), tiny.environment(name)[0]
    lengths = set()
    for row, mask in zip(data.tokens, data.mask, strict=True):
        for ids in answers_of(row, mask):
            text = tiny.tokenizer().decode_bytes(ids[:-1])
            matched, parts = parse_answer(text, env.ACTION_NAMES, max_actions=9, opening='<think>')
            names = [env.ACTION_NAMES[i] for i in parts if i != -2]
            assert matched and 1 <= len(names) <= 3 and -1 not in parts
            assert text.decode() == f'</think><answer>{" || ".join(names)}</answer>'
            lengths.add(len(names))
    assert lengths == {1, 2, 3}


def oracle_demonstrations(task, seed=0, episodes=24, **changes):

    def expert(states, used):
        return task.env.plans(states, used, task.max_actions_per_episode, task.env_params)

    sizes = dict(seed=seed, episodes=episodes, oracle=1.0, max_tokens=400)
    data = demonstrations.demonstrate(task, tiny.tokenizer(), expert, **sizes | changes)
    return jax.device_get(data)


def test_a_demonstration_ends_before_the_turn_that_does_not_fit():
    """The longest first turn fits, then all turns up to the budget, without changes."""
    task = tiny.task('frozen_lake')

    def random_play(budget):
        def expert(states, used):
            return [[] for _ in used]

        settings = dict(seed=0, episodes=16, oracle=0.0, max_tokens=budget)
        return jax.device_get(
            demonstrations.demonstrate(task, tiny.tokenizer(), expert, **settings)
        )

    free = random_play(400)
    ends = [np.flatnonzero(np.diff(np.append(mask, False).astype(int)) == -1) for mask in free.mask]
    budget = max(int(row[0]) for row in ends) + 1
    tight = random_play(budget)
    assert tight.tokens.shape[1] <= budget
    for b, row in enumerate(ends):
        used = int(row[row < budget][-1]) + 1
        assert tight.attention_mask[b].sum() == used
        np.testing.assert_array_equal(tight.tokens[b, :used], free.tokens[b, :used])
    assert (number_of_answers(tight) < number_of_answers(free)).sum() > 5


def test_thoughts_contain_the_next_actions_of_the_expert():
    task = tiny.task('frozen_lake')

    def turns_of(**changes):
        data = oracle_demonstrations(task, thoughts=True, **changes)
        decode = tiny.tokenizer().decode
        return [
            [decode(ids[:-1].tolist()).split('</think><answer>') for ids in answers_of(row, mask)]
            for row, mask in zip(data.tokens, data.mask, strict=True)
        ]

    best, random = turns_of(), turns_of(oracle=0.0)
    for (thought, answer), *_ in best:
        assert thought and f'{thought}</answer>'.startswith(answer.removesuffix('</answer>'))
    assert [turns[0][0] for turns in random] == [turns[0][0] for turns in best]
    assert [turns[0][1] for turns in random] != [turns[0][1] for turns in best]


def test_plans_are_mixed_turn_by_turn():
    rng = np.random.default_rng(0)
    oracle = [[0, 1, 2, 3, 0]] * 2000
    plans = demonstrations.mixed_plans(rng, oracle, oracle=0.25, per_turn=3, names=4)
    # a random plan equals the oracle's first three with probability 1/3 (length) / 64
    share = np.mean([plan == [0, 1, 2] for plan in plans])
    assert abs(share - (0.25 + 0.75 / 192)) < 4 * np.sqrt(0.25 * 0.75 / 2000)
    assert {len(plan) for plan in plans} == {1, 2, 3}
    stuck = demonstrations.mixed_plans(rng, [[]], oracle=1.0, per_turn=2, names=4)
    assert stuck[0]  # no solution: random play


def test_random_plans_contain_only_offered_actions():
    rng, offered = np.random.default_rng(0), np.array([[True, False, True], [False, True, False]])
    plans = demonstrations.mixed_plans(
        rng, [[1], [0]] * 200, oracle=0.0, per_turn=2, names=3, offered=np.tile(offered, (200, 1))
    )
    assert {name for plan in plans[::2] for name in plan} == {0, 2}
    assert {name for plan in plans[1::2] for name in plan} == {1}


def test_cloning_lowers_the_loss_and_learns_the_format():
    params, measured = tiny.cloned('frozen_lake')
    # Starts at log 576 = 6.36, the loss of a uniform policy over the vocabulary
    assert abs(measured[0] - np.log(tiny.config().vocab_size)) < 0.5
    assert measured[-1] < 1.0 and np.isfinite(measured).all()
    data = tiny.demonstrations('frozen_lake')
    logprobs, _ = tiny.score()(params, data.tokens, data.attention_mask)
    ends = data.mask & (data.tokens == END)
    assert float(jnp.mean(jnp.exp(logprobs), where=ends)) > 0.5


def test_the_loss_is_the_mean_over_answer_tokens_only():
    """Compared with a plain sum; tokens after the end and prompt tokens do not count."""
    data = jax.tree.map(lambda x: x[:4], tiny.demonstrations('frozen_lake'))
    params = tiny.untrained()
    head = losses.HeadSettings(chunk_size=64)
    loss = jax.jit(functools.partial(clone.clone_loss, fns=FNS, head=head))
    logprobs, _ = tiny.score()(params, data.tokens, data.attention_mask)
    total = [logprobs[b, t] for b, t in np.argwhere(np.asarray(data.mask))]
    assert float(loss(params, data)) == pytest.approx(-float(sum(total)) / len(total), rel=1e-5)
    other = jnp.where(data.attention_mask, data.tokens, 7)
    assert float(loss(params, data.replace(tokens=other))) == float(loss(params, data))
    positions = positions_of(data.attention_mask)
    assert int(positions.max()) == int(data.attention_mask.sum(1).max()) - 1


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


def cloned(steps=2, params=None, report=lambda step, loss: None, **settings):
    return clone.clone(
        tiny.untrained() if params is None else params,
        tiny.demonstrations('frozen_lake'),
        jax.random.key(3),
        tx=optax.sgd(0.1, momentum=0.9),
        steps=steps,
        report=report,
        fns=FNS,
        chunk_size=4096,
        batch_size=8,
        **settings,
    )


@pytest.mark.soak
def test_cloning_from_cut_rows_gives_the_same_policy():
    assert_close(cloned(), cloned(slices=Slices(4, None, 4)))


def test_the_head_of_a_clone_is_computed_only_for_answers():
    """It was also computed for every prompt token."""
    rows = jax.tree.map(lambda x: x[:4], tiny.demonstrations('frozen_lake'))
    longest = int(rows.mask.sum(1).max())
    assert longest < rows.tokens.shape[1] / 2

    def loss_and_gradient(row_tokens):
        head = losses.HeadSettings(chunk_size=4096, row_tokens=row_tokens)
        loss = functools.partial(clone.clone_loss, fns=FNS, head=head)
        return jax.jit(jax.value_and_grad(loss))(tiny.untrained(), rows)

    assert_close(loss_and_gradient(None), loss_and_gradient(longest))
    assert not np.isfinite(loss_and_gradient(longest - 1)[0])  # a missing token is detected


@pytest.mark.soak
def test_a_clone_compiles_its_step_once():
    """On a mesh, the first optimiser state had a different layout than after a step."""
    mesh = sharding.make_mesh(2, 2, 2)
    layout = sharding.specs(tiny.untrained(), sharding.TRAIN_RULES, mesh)
    counts = []
    with CompileCounter() as counter:
        params = cloned(
            steps=3,
            params=jax.device_put(tiny.untrained(), layout),
            report=lambda step, loss: counts.append(counter.count),
            slices=Slices(1, sharding.shard_rows(mesh)),
        )
    assert counts[0] == counts[2]
    jax.tree.map(lambda x, at: x.sharding == at or pytest.fail(str(x.sharding)), params, layout)
    assert_close(cloned(steps=3), params)
