"""Self-play games: rules, the seat to move, and hidden information."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.extras.games.connect_four import ConnectFour
from agentrl_jax.extras.games.leduc import Leduc
from agentrl_jax.extras.self_play import choices
from agentrl_jax.extras.self_play.player import ActorAndOpponent, Seated, WithOpponent
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.losses import HeadSettings
from agentrl_jax.rollout import device, windows
from agentrl_jax.rollout.slots import choose
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        importlib.util.find_spec('pgx') is None, reason='pip install -r requirements-test.txt'
    ),
]
WORLDS = {'leduc': Leduc(True, 'self', position=True), 'connect_four': ConnectFour(True, 'self')}
PLIES = {'leduc': 8, 'connect_four': 42}
GAMES, KEY, TOKENS = 8, jax.random.key(0), 12


@functools.cache
def task(name):
    world = WORLDS[name]
    return text.build_task(
        world,
        world.make_params('train', num_levels=GAMES),
        tiny.tokenizer(),
        style='plain',
        generation_prefix='<answer>',
        max_turns=PLIES[name],
        max_actions_per_turn=1,
        max_actions_per_episode=PLIES[name],
        constrain='own',
        max_response=TOKENS,
    )


@functools.cache
def programs(name):
    """Return three functions of rows: start an episode, play a turn, step pgx."""
    turn = jax.jit(jax.vmap(text.play_turn, in_axes=(None, None, 0, 0, 0)))
    return (
        jax.jit(jax.vmap(text.begin, in_axes=(None, 0))),
        turn,
        jax.jit(jax.vmap(WORLDS[name].game().step)),
    )


@pytest.mark.parametrize('name', WORLDS)
def test_a_text_game_equals_pgx_stepped_directly(name):
    """Actions are random and legal; rewards belong to the first player."""
    game, (begin, turn, step) = task(name), programs(name)
    world = begin(game, jnp.arange(GAMES))
    direct, rng = world.state.game, np.random.default_rng(0)
    starts = np.asarray(direct.current_player)
    assert set(starts) == {0, 1}
    earned, paid = np.zeros(GAMES), np.zeros(GAMES)
    for _ in range(PLIES[name]):
        over, legal = np.asarray(direct.terminated), np.asarray(direct.legal_action_mask)
        mover = np.asarray(direct.current_player)
        seat = np.asarray(jax.vmap(WORLDS[name].seat)(world.state))
        np.testing.assert_array_equal(seat[~over], (mover != starts)[~over])
        action = np.where(legal, rng.random(legal.shape), -1).argmax(1)
        world, outcome = turn(game, KEY, world, action[:, None], jnp.ones(GAMES, bool))
        after = step(direct, action)
        direct = choose(jnp.asarray(over), direct, after)
        earned += np.where(over, 0, outcome.reward)
        paid += np.where(over, 0, np.asarray(after.rewards)[np.arange(GAMES), starts])
        jax.tree.map(np.testing.assert_array_equal, world.state.game, direct)
    assert np.asarray(direct.terminated).all()
    np.testing.assert_array_equal(earned, paid)
    np.testing.assert_array_equal(outcome.success, earned > 0)
    assert len(set(earned)) > 1


def test_after_an_invalid_answer_the_same_seat_moves_again():
    game, (begin, turn, _) = task('leduc'), programs('leduc')
    world = begin(game, jnp.arange(GAMES))
    fold = jnp.full((GAMES, 1), 2)  # illegal before a raise
    after, outcome = turn(game, KEY, world, fold, jnp.ones(GAMES, bool))
    assert not outcome.valid.any() and after.warn.all() and (after.turn == 1).all()
    jax.tree.map(np.testing.assert_array_equal, after.state, world.state)


# ---- hidden information ------------------------------------------------------------------------


@functools.cache
def random_rollout():
    """Return (rollout, samples) of a random policy in Leduc."""
    return run(tiny.untrained())


def run(params):
    player = (WithOpponent if isinstance(params, ActorAndOpponent) else Seated)(tiny.config())
    game, rows = task('leduc'), jnp.arange(2 * GAMES, dtype=jnp.int32)
    episodes = Episodes(level=rows // 2, token_stream=rows, world_stream=rows)
    collect = jax.jit(
        functools.partial(
            device.collect,
            settings=tiny.settings(
                player=player,
                slots=2 * GAMES,
                serve_rows=8,
                max_tokens=game.prefix.shape[0] + PLIES['leduc'] * (game.width + TOKENS),
                max_response=TOKENS,
                window=1,
            ),
        )
    )
    rollout, _ = collect(params, game, episodes, KEY)
    context = windows.Context.of(game, 1, TOKENS)
    return jax.device_get((rollout, windows.split_turns(rollout.tokens, context.windows(rollout))))


def replayed(rollout):
    """Return the environments before each turn, [K][B]."""
    game, (begin, turn, _) = task('leduc'), programs('leduc')
    world = begin(game, rollout.level)
    for k in range(PLIES['leduc']):
        yield world
        answer = np.where(rollout.actions[:, k] < 0, -2, rollout.actions[:, k])
        world, _ = turn(game, KEY, world, answer, jnp.ones(len(answer), bool))


def test_prompts_do_not_depend_on_the_opponents_card():
    """The prompt of a turn does not depend on the card of the other seat."""
    rollout, samples = random_rollout()
    show = jax.jit(choices.prompts)
    samples = samples.reshape(*rollout.extra['seats'].shape, -1)
    seats = set()
    for k, world in enumerate(replayed(rollout)):
        live = np.flatnonzero(k < rollout.num_turns)
        tokens, count = jax.device_get(show(task('leduc'), world))
        cards, mover = (
            np.array(x) for x in (world.state.game._cards, world.state.game.current_player)
        )
        for card in range(3):
            other = cards.copy()
            other[np.arange(len(cards)), 1 - mover] = card
            changed = world.state.game.replace(_cards=jnp.asarray(other))
            again = show(task('leduc'), world.replace(state=world.state.replace(game=changed)))
            np.testing.assert_array_equal(again[0], tokens)
        for b in live:
            np.testing.assert_array_equal(samples[b, k, : count[b]], tokens[b, : count[b]])
            first = int(mover[b] != world.state.game._first_player[b])
            assert rollout.extra['seats'][b, k] == first
            seats.add(first)
    assert seats == {0, 1}


@functools.cache
def probabilities():
    """Return a jitted (params, task, worlds) -> action probabilities."""
    game = task('leduc')
    return jax.jit(
        functools.partial(
            choices.action_probabilities,
            answers=choices.spelled(game, tiny.tokenizer()),
            fns=ModelFns(tiny.hidden, tiny.head),
            settings=HeadSettings(bits=game.grammar.bits),
        )
    )


def test_action_probabilities_match_the_sampler():
    """A sampled turn has the log-probability of its action."""
    rollout, _ = random_rollout()
    for k, world in enumerate(replayed(rollout)):
        chances = np.asarray(probabilities()(tiny.untrained(), task('leduc'), world))
        offered = np.asarray(world.state.game.legal_action_mask)
        np.testing.assert_array_equal(chances > 0, offered)
        live = np.flatnonzero(k < rollout.num_turns)
        np.testing.assert_allclose(chances[live].sum(1), 1, atol=1e-5)
        for b in live:
            logprob = rollout.logprobs[b][(rollout.turn[b] == k) & rollout.action_mask[b]].sum()
            action = rollout.actions[b, k, 0]
            assert logprob == pytest.approx(np.log(chances[b, action]), abs=1e-4)


def test_a_snapshot_plays_the_other_seat_and_its_tokens_are_not_actions():
    """Against itself the policy plays as in self-play; each seat uses its model."""
    params = tiny.untrained()
    alone, _ = random_rollout()
    same, _ = run(ActorAndOpponent(params, params))
    other = jax.tree.map(lambda x: x + 0.5 * jax.random.normal(KEY, x.shape), params)
    mixed, _ = run(ActorAndOpponent(params, other))
    for out in (same, mixed):
        np.testing.assert_array_equal(out.extra['learner'], np.arange(2 * GAMES) % 2)
        turn = np.maximum(out.turn, 0)
        mask = np.take_along_axis(out.extra['seats'], turn, 1) == out.extra['learner'][:, None]
        assert not (out.action_mask & ~mask).any() and not out.logprobs[~out.action_mask].any()
    np.testing.assert_array_equal(same.tokens, alone.tokens)
    mask = same.action_mask
    np.testing.assert_allclose(same.logprobs[mask], alone.logprobs[mask], atol=1e-5)
    assert (mixed.tokens != alone.tokens).any()
    # A deterministic snapshot: its turns take its likeliest action, ours need not
    sure = {
        'model': {
            **params['model'],
            'norm': jax.tree.map(lambda x: 1e4 * x, params['model']['norm']),
        }
    }
    out, _ = run(ActorAndOpponent(params, sure))
    likeliest = {True: [], False: []}
    for k, world in enumerate(replayed(out)):
        best = np.asarray(probabilities()(sure, task('leduc'), world)).argmax(1)
        for b in np.flatnonzero(k < out.num_turns):
            theirs = bool(out.extra['seats'][b, k] != out.extra['learner'][b])
            likeliest[theirs].append(out.actions[b, k, 0] == best[b])
    assert all(likeliest[True]) and not all(likeliest[False])
