"""Library: rules by hand, tables, chance level, the best player, texts and metrics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.envs import Library
from agentrl_jax.envs.library.levels import EMPTY, PEOPLE
from agentrl_jax.envs.library.world import EnvParams, EnvState
from agentrl_jax.envs.reference import reference_curves
from agentrl_jax.measure import metrics, validation
from agentrl_jax.text import answer as answers
from agentrl_jax.text import task as text
from agentrl_jax.text.agents import Progress
from agentrl_jax.types import EpisodeStop

NURSE, PILOT, DENTIST, ARTIST = map(PEOPLE.index, ('Nurse', 'Pilot', 'Dentist', 'Artist'))
C3 = 1 * 4 + 2  # second of the letters A, C, E, F; third number
BOX = len(PEOPLE)  # card or action of box 0
BUDGETS = dict(max_turns=6, max_actions_per_turn=1, max_actions_per_episode=6)


def by_hand():
    """Build one level: Nurse -> Pilot -> C 3, and Dentist -> A 1."""
    cards = np.full((1, len(PEOPLE)), EMPTY)
    cards[0, [NURSE, PILOT, DENTIST]] = PILOT, BOX + C3, BOX
    columns = dict(cards=cards, start=[NURSE], answer=[C3], hops=[2])
    return EnvParams(**{name: jnp.asarray(x, jnp.int32) for name, x in columns.items()})


def play_answer(task, episode, words):
    """Return (episode, outcome) of an answer given as text."""
    parser = answers.init_answer(task.answer, 1)
    for token in tiny.tokenizer().encode(f'</think><answer>{words}</answer>'):
        parser = advance(task.answer, parser, np.array([token]), np.array([True]))
    matched = answers.matched(task.answer, parser)[0]
    return play_turn(task, jax.random.key(0), episode, parser.parts[0], matched)


def prompt_ids(task, episode):
    """Return the prompt ids of the episode's turn, after a turn with a sampled end."""
    tokens, count = turn_tokens(task, episode, jnp.bool_(True))
    return tokens[: int(count)].tolist()


advance, play_turn, turn_tokens = map(jax.jit, (answers.advance, text.play_turn, text.turn_tokens))

# ---- rules -------------------------------------------------------------------------------------

EPISODE = (  # answer, reward, valid, next observation
    ('pull Nurse', 0.2, True, 'Nurse: see Pilot.\n5 left\n'),
    ('pull Artist', 0.0, True, 'Artist: empty.\n4 left\n'),
    ('pull Baker', 0.0, False, 'Artist: empty.\nInvalid.\n4 left\n'),
    ('Pull PILOT', 0.7, True, 'Pilot: box C 3.\n3 left\n'),  # .2 for the card, .5 for the answer
    ('pull Pilot', 0.0, True, 'Pilot: box C 3.\n2 left\n'),  # repeated lookup
    ('name C 3', 1.5, True, None),
)


def test_an_episode_by_hand():
    task = text.build_task(Library(), by_hand(), tiny.tokenizer(), style='brief', **BUDGETS)
    episode = text.begin(task, jnp.int32(0))
    end = '<|im_end|>\n<|im_start|>assistant\n<think>'
    assert prompt_ids(task, episode) == tiny.spelled(f'Name the box of the Nurse.\n6 left\n{end}')
    for words, reward, valid, after in EPISODE:
        episode, outcome = play_answer(task, episode, words)
        assert float(outcome.reward) == pytest.approx(reward), words
        assert bool(outcome.valid) == valid
        assert float(outcome.penalty) == pytest.approx(0.0 if valid else -0.1)
        if after is not None:
            assert prompt_ids(task, episode) == tiny.spelled(f'\n<|im_start|>user\n{after}{end}')
            assert int(outcome.stop) == EpisodeStop.NONE and not outcome.success
    assert int(outcome.stop) == EpisodeStop.TERMINATED and bool(outcome.success)


@pytest.mark.parametrize(
    'settings, actions, rewards',
    [
        # letter right, number right, both, neither: half of 1.5 for one of two words
        (dict(graded=True), [BOX + C3 - 1], [0.75]),
        (dict(graded=True), [BOX + 2], [0.75]),
        (dict(graded=True), [BOX + C3], [1.5]),
        (dict(graded=True), [BOX], [0.0]),
        ({}, [BOX + C3 - 1], [0.0]),
        ({}, [BOX + C3], [1.5]),  # a guess earns the same as a lookup
        # .2 - .1 x 1; empty card, - .1 x 2; .2 + .5 - .1 x 3; named: no cost
        (dict(lookup_cost=0.1), [NURSE, ARTIST, PILOT, BOX + C3], [0.1, -0.2, 0.4, 1.5]),
        (dict(tool_reward=0.0, presence_reward=1.0), [PILOT, PILOT, NURSE], [1.0, 0.0, 0.0]),
    ],
)
def test_rewards_by_hand(settings, actions, rewards):
    env, params = Library(**settings), by_hand()
    state, got = env.reset_level(0, params), []
    for action in actions:
        _, state, reward, over, info = env.step_env(jax.random.key(0), state, action, params)
        got.append(float(reward))
        assert bool(over) == (action >= BOX)
        assert bool(info['success']) == (action == BOX + C3)
    np.testing.assert_allclose(got, rewards, atol=1e-6)


@pytest.mark.parametrize('side', [2, 4])
def test_the_graded_score_is_the_f1_of_the_words(side):
    """As in SQuAD: 2 P R / (P + R) over the words that two names share."""
    env = Library(side=side)
    for i, guess in enumerate(env.boxes):
        for j, truth in enumerate(env.boxes):
            a, b = guess.split(), truth.split()
            common = sum(min(a.count(w), b.count(w)) for w in set(a))
            precision, recall = common / len(a), common / len(b)
            f1 = 2 * precision * recall / (precision + recall) if common else 0.0
            assert float(env.word_f1(jnp.int32(i), jnp.int32(j))) == pytest.approx(f1)


# ---- tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize('cards, min_hops, max_hops', [(8, 1, 3), (16, 4, 4), (3, 2, 2)])
def test_every_table_has_one_path_from_its_question_to_its_answer(cards, min_hops, max_hops):
    env = Library(cards=cards, min_hops=min_hops, max_hops=max_hops)
    params = jax.device_get(env.make_params('validation', num_levels=64))
    assert set(params.hops.tolist()) == set(range(min_hops, max_hops + 1))
    for table, start, answer, hops in zip(
        params.cards, params.start, params.answer, params.hops, strict=True
    ):
        assert (table != EMPTY).sum() == cards and (table == BOX + answer).sum() == 1
        chain = [start]
        while table[chain[-1]] < BOX:
            chain.append(table[chain[-1]])
        assert len(chain) == hops and table[chain[-1]] == BOX + answer
        for who in np.flatnonzero(table != EMPTY):  # no card leads in circles or to a missing card
            for _ in range(cards):
                who = table[who] if 0 <= table[who] < BOX else who
            assert table[who] >= BOX


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_without_a_lookup_an_answer_is_right_only_by_chance(split):
    """Any answer to a question is right for exactly one table in 16, with a mean F1 of .25.

    The number is right for 4 of 16 boxes, and so is the letter: .5 x .25 + .5 x .25.
    """
    env = Library(graded=True)
    params = env.make_params(split, num_levels=512, seed=3)
    states = jax.vmap(env.reset_level, in_axes=(0, None))(jnp.arange(512), params)
    keys = jax.random.split(jax.random.key(0), 512)
    step = jax.jit(jax.vmap(env.step_env, in_axes=(0, 0, None, None)))
    for box in range(env.num_boxes):
        _, _, reward, over, info = step(keys, states, BOX + box, params)
        assert np.asarray(over).all()
        for person in range(len(PEOPLE)):
            same_question = np.asarray(params.start) == person
            assert np.asarray(info['success'])[same_question].mean() == 1 / 16
            assert np.asarray(reward)[same_question].mean() == pytest.approx(1.5 * 0.25)


# ---- best and random play ----------------------------------------------------------------------


def test_the_best_player_solves_every_level_with_minimal_lookups():
    env = Library(max_hops=4)
    params = env.make_params('test', num_levels=200)
    states = jax.vmap(env.reset_level, in_axes=(0, None))(jnp.arange(200), params)
    step = jax.jit(jax.vmap(env.step_env, in_axes=(0, 0, 0, None)))
    keys, used, returns = jax.random.split(jax.random.key(0), 200), np.zeros(200, int), 0.0
    for turn in range(5):
        plans = env.plans(jax.device_get(states), np.full(200, turn), 5, params)
        assert all(len(plan) == 1 for plan in plans)
        over = np.asarray(states.named) >= 0
        used += ~over
        actions = jnp.asarray([plan[0] for plan in plans])
        _, states, reward, _, info = step(keys, states, actions, params)
        returns = returns + np.asarray(reward)
    assert np.asarray(info['success']).all()
    np.testing.assert_array_equal(used, params.hops + 1)
    # Every lookup finds a new card; the last card is the answer.
    np.testing.assert_allclose(returns, 0.2 * np.asarray(params.hops) + 0.5 + 1.5, atol=1e-5)
    oracle = reference_curves(env, params, [1, 2, 3, 4, 5])['oracle']
    by_hops = np.bincount(params.hops, minlength=5) / 200
    np.testing.assert_allclose(oracle, np.cumsum(by_hops))


# ---- texts -------------------------------------------------------------------------------------


def random_states(rng, rows, env):
    """Draw states of all kinds, including unreachable states."""
    people = len(PEOPLE)
    return EnvState(
        time=np.zeros(rows, np.int32),
        cards=rng.integers(EMPTY, people + env.num_boxes, (rows, people), dtype=np.int32),
        start=rng.integers(people, size=rows, dtype=np.int32),
        answer=rng.integers(env.num_boxes, size=rows, dtype=np.int32),
        last=rng.integers(-1, people, size=rows, dtype=np.int32),
        seen=rng.random((rows, people)) < 0.5,
        lookups=np.zeros(rows, np.int32),
        named=rng.integers(-1, env.num_boxes, size=rows, dtype=np.int32),
    )


@pytest.mark.parametrize('style, rows', [('brief', 4_000), ('tools', 500), ('ragen', 500)])
def test_tables_match_the_tokenizers_text_for_random_states(style, rows):
    env, words, rng = Library(), text.STYLES[style], np.random.default_rng(0)
    task = text.build_task(env, by_hand(), tiny.tokenizer(), style=style, **BUDGETS)
    states = random_states(rng, rows, env)
    turn, used = rng.integers(6, size=(2, rows), dtype=np.int32)
    none = np.zeros(rows, np.int32)
    quanta = rng.integers(0, 31, size=rows)
    warn, sampled_end = rng.random((2, rows)) < 0.5
    worlds = text.Episode(
        state=states,
        turn=turn,
        used=used,
        reward=np.float32(0.05 * quanta),
        warn=warn,
        past=None,
        level=none,
        agent=Progress(part=none, trial=none, turns=turn, stepped=turn > 0),
    )
    show = jax.jit(jax.vmap(text.turn_tokens, in_axes=(None, 0, 0)))
    tokens, count = jax.device_get(show(task, worlds, sampled_end))
    assert (count <= task.width).all()
    specials = {tiny.tokenizer().special(name) for name in tiny.SPECIALS}
    encode, spelled = functools.cache(tiny.tokenizer().encode), functools.cache(tiny.spelled)
    for i in range(rows):
        state = jax.tree.map(lambda x, i=i: x[i], states)
        message = words.header.format(turn=turn[i] + 1) + env.observation_text(state)
        message += words.warning * bool(warn[i])
        message += words.tail.format(left=6 - used[i], max_words=100)
        ids = encode(message)
        assert not specials & set(ids)
        if turn[i] > 0:
            reward = words.reward.format(reward=f'{quanta[i] / 20:.2f}')
            opening = ('' if sampled_end[i] else '<|im_end|>') + '\n<|im_start|>user\n'
            ids = [*spelled(opening + reward), *ids]
        closing = spelled('<|im_end|>\n<|im_start|>assistant\n<think>')
        assert tokens[i, : count[i]].tolist() == [*ids, *closing]


# ---- metrics ------------------------------------------------------------------------------------


def counted_by_hand(env, params, level, actions):
    """Compute the metrics of one episode, word by word, from its list of actions."""
    table, answer = np.asarray(params.cards[level]), int(params.answer[level])
    pulls = [a for a in actions if a < BOX]
    names = [env.ACTION_NAMES[a].removeprefix('name ').split() for a in actions if a >= BOX]
    truth = env.boxes[answer].split()
    return {
        'tool_calls': len(pulls),
        'tool_success': np.mean([table[a] != EMPTY for a in pulls]) if pulls else 0.0,
        'answer_presence': float(BOX + answer in [table[a] for a in pulls]),
        'answered': float(bool(names)),
        'answer_f1': np.mean([x == y for x, y in zip(*names, truth, strict=True)]) if names else 0,
    }


def random_episodes(env, params, rows, turns, per_turn):
    """Draw actions [rows, turns, per_turn] that name a box once, at the end."""
    rng = np.random.default_rng(0)
    actions = np.full((rows, turns, per_turn), -1)
    lists = []
    for row in actions.reshape(rows, -1):
        pulls = rng.integers(BOX, size=rng.integers(turns))
        ends = rng.integers(BOX, BOX + env.num_boxes, size=int(rng.random() < 0.7))
        lists.append([*pulls, *ends])
        places = np.sort(rng.choice(len(row), len(lists[-1]), replace=False))  # gaps are invalid
        row[places] = lists[-1]
    return jnp.asarray(actions, jnp.int32), lists


def test_tool_use_metrics_match_counts_by_hand():
    env = Library()
    params = env.make_params('train', num_levels=40)
    actions, lists = random_episodes(env, params, 120, 4, 2)
    level = jnp.arange(120) % 40
    got = jax.device_get(jax.jit(env.episode_metrics)(actions, level, params))
    for i, episode in enumerate(lists):
        expected = counted_by_hand(env, params, i % 40, episode)
        assert {name: float(x[i]) for name, x in got.items()} == pytest.approx(expected)


@dataclasses.dataclass
class _FakeRollout:
    actions: jax.Array
    level: jax.Array
    healthy: jax.Array
    acts: jax.Array
    trial: jax.Array
    played: jax.Array
    figures: None = None


def test_environment_metrics_are_means_over_healthy_episodes_with_its_prefix():
    """Calls are 2 and 1, and 3 in a faulty episode: the mean is 1.5."""
    task = text.build_task(Library(), by_hand(), tiny.tokenizer(), style='brief', **BUDGETS)
    actions = jnp.array([[NURSE, PILOT, BOX + C3], [ARTIST, BOX, -1], [NURSE, NURSE, NURSE]])
    healthy, first = jnp.array([True, True, False]), jnp.zeros((3, 3), jnp.int32)
    turns = jnp.arange(3)[None] < jnp.array([3, 2, 3])[:, None]
    rollout = _FakeRollout(actions[..., None], first[:, 0], healthy, first == 0, first, turns)
    got = metrics.environment_metrics(rollout, task)
    assert {name: float(x) for name, x in got.items()} == {
        'library/tool_calls': 1.5,
        'library/tool_success': 0.5,
        'library/answer_presence': 0.5,
        'library/answered': 1.0,
        'library/answer_f1': 0.5,
    }
    assert {*got, *(f'eval/{name.split("/")[1]}' for name in got)} <= set(metrics.METRICS)
    sums = dict.fromkeys('lost successes returns turns valid unjudged'.split(), 0)
    sums |= {'episodes': 4, 'own': {'tool_calls': jnp.float32(6.0)}}
    sums |= {'samples': 1, 'of_levels': {'tries': np.ones(4, int), 'solved': np.zeros(4, int)}}
    assert validation.summarise(sums)['eval/tool_calls'] == 1.5
