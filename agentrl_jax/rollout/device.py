"""collect: batched multi-turn episodes in one XLA program.

A fixed number of slots plays a longer list of episodes. The program alternates between
  serve    up to `serve_rows` slots at the end of a turn step their environments, and their next
           observations are written and prefilled as one block, or they take the next episode;
  decode   every generating slot samples a token and runs it through the model, repeatedly, until
           `serve_rows` slots wait or none generates.
Nothing leaves the device, and short turns do not wait for the longest one. Each token is read once,
except with context.window, which reads the turns of the window again.

Tokens, their cache and their random streams are rows (rollout.rows), shared with host rollouts.
Here each row also has an environment, an answer parser and a row of the output (rollout.slots).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import sharding
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout import windows
from agentrl_jax.rollout.slots import (
    COUNTERS,
    GENERATING,
    IDLE,
    WAITING,
    RolloutSettings,
    Slots,
    Turns,
    empty_rollout,
    sample,
)
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import stops
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes, EpisodeStop, Params, Rollout, TurnStop


def decode(
    slots: Slots,
    params: Params,
    task: text.TextTask,
    key: jax.Array,
    *,
    settings: RolloutSettings,
    head: Any = None,
) -> Slots:
    """Sample one token for every generating slot and append it to the cache."""
    live, player = slots.phase == GENERATING, settings.player
    out, length, grammar = slots.out, slots.rows.length, task.grammar
    token, logprob, bits = sample(slots, params, grammar, key, settings=settings, head=head)
    allowed = {} if bits is None else {'allowed': bits}
    token = jnp.where(live, token, task.pad_id)
    row = jnp.where(live, slots.episode, out.tokens.shape[0])
    stop, response, parser = stops.turn_stop(
        token,
        live,
        slots.response,
        slots.answer,
        advance=functools.partial(answers.advance, task.answer),
        matched=lambda parser: answers.matched(task.answer, parser) & settings.stop_at_answer,
        eos_ids=task.eos_ids,
        max_response=settings.max_response,
    )
    turn = slots.world.turn
    sampled, trained = player.sampled(slots.rows, live, tokens=token, logprobs=logprob)
    out = out.put((row, length), **sampled, **allowed, turn=turn).put((row, turn), turn_stop=stop)
    place = slots.place
    if grammar is not None:
        left = settings.max_response - response
        place = grammars.advance(grammar, place, token, live, left)
        place = grammars.open_actions(grammar, slots.place, place, task.answer, parser)
    return slots.replace(
        place=place,
        rows=token_rows.push(slots.rows, params, token, live, player=player),
        phase=jnp.where(live & (stop != TurnStop.NONE), WAITING, slots.phase),
        response=response,
        answer=parser,
        out=out,
        decodes=slots.decodes + 1,
        generated=slots.generated + trained.sum(),
    )


def finish_turn(
    slots: Slots,
    task: text.TextTask,
    episodes: Episodes,
    key: jax.Array,
    which: jax.Array,
    *,
    max_response: int,
) -> tuple[Rollout, Turns, jax.Array]:
    """Step the environments of slots `which` int32 [w] and record the outcome.

    episodes: as in Slots.out. Returns (out, the next turns, over bool [w]: the episode ended).
    """
    out = slots.out
    num_episodes, max_tokens = out.tokens.shape
    world = jax.tree.map(lambda x: x[which], slots.world)
    parser = jax.tree.map(lambda x: x[which], slots.answer)
    episode = slots.episode[which]
    playing = episode < num_episodes
    source = jnp.minimum(episode, num_episodes - 1)
    streams = episodes.world_stream[source]
    env_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, streams)
    matched = answers.matched(task.answer, parser)
    after, outcome = jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0))(
        task, env_keys, world, parser.parts, matched
    )
    turn = world.turn
    row = jnp.where(playing, episode, num_episodes)
    stop = outcome.stop
    sampled_end = out.turn_stop[source, turn] == TurnStop.EOS
    prompt = jax.vmap(text.turn_length, in_axes=(None, 0, 0))(task, after, sampled_end)
    length = slots.rows.length[which]
    fits = length + prompt + max_response <= max_tokens
    stop = jnp.where((stop == EpisodeStop.NONE) & ~fits, EpisodeStop.TOKEN_BUDGET, stop)
    out = out.put(
        (row, turn),
        rewards=outcome.reward,
        penalties=outcome.penalty,
        valid=outcome.valid,
        num_actions=outcome.num_actions,
        actions=outcome.actions,
    )
    out = out.put(row, num_turns=turn + 1, episode_stop=stop, success=outcome.success)
    over = ~playing | (stop != EpisodeStop.NONE)
    return out, Turns(episode, after, length, sampled_end), over


def begin_answers(
    place: grammars.GrammarState | None, task: text.TextTask, which: jax.Array, world: text.Episode
) -> grammars.GrammarState | None:
    """Reset the grammar state of slots `which` int32 [w] to the start of an offered answer."""
    if place is None:
        return None
    offered = grammars.pack(jax.vmap(text.offered, in_axes=(None, 0))(task, world.state))
    return place.put(which, grammars.begin(task.grammar, world.agent.part, offered))


def write_prompts(
    out: Rollout,
    task: text.TextTask,
    turns: Turns,
    playing: jax.Array,
    *,
    player: token_rows.Player,
) -> tuple[Rollout, Turns]:
    """Write the prompt of the next turn of w slots; playing bool [w]: slots that have a turn."""
    num_episodes, max_tokens = out.tokens.shape
    episode, world, length = turns.episode, turns.world, turns.length
    end = turns.sampled_end
    tokens, count = jax.vmap(text.turn_tokens, in_axes=(None, 0, 0))(task, world, end)
    count = jnp.where(playing, count, 0)
    opening = jax.vmap(text.opening_length, in_axes=(None, 0, 0))(task, world, end)
    anchor = jax.vmap(text.anchor, in_axes=(None, 0))(task, world)
    column = jnp.arange(tokens.shape[1])[None]
    used = column < count[:, None]
    position = jnp.where(used, length[:, None] + column, max_tokens)
    row = jnp.where(playing, episode, num_episodes)
    grid = row[:, None]
    out = out.put((grid, position), tokens=tokens, attention_mask=True)
    out = out.put((grid, position), turn=world.turn[:, None])
    out = out.put(
        (row, world.turn),
        begin=length + jnp.where(world.turn > 0, opening, 0),
        part=world.agent.part,
        trial=world.agent.trial,
        anchor=anchor,
    )
    out = player.record(out, (row, world.turn), task, world)
    return out, turns.replace(tokens=jnp.where(used, tokens, task.pad_id), count=count)


def serve(
    slots: Slots,
    params: Params,
    task: text.TextTask,
    episodes: Episodes,
    key: jax.Array,
    *,
    settings: RolloutSettings,
) -> Slots:
    """Advance up to serve_rows waiting slots to the start of their next answer."""
    schedule, player = settings.schedule, settings.player
    num_slots, num_episodes = slots.phase.shape[0], slots.out.tokens.shape[0]
    # Padding rows point past the last slot: gathers clamp, scatters drop.
    which, listed = schedule.served(slots, settings.serve_rows), schedule.listed(episodes)
    longest = settings.max_response
    out, turns, over = finish_turn(slots, task, listed, key, which, max_response=longest)
    over = over | (which == num_slots)
    slots = slots.replace(out=out)
    slots, turns = schedule.next_turns(slots, task, episodes, which, over, turns)
    episode, world, length = turns.episode, turns.world, turns.length
    playing = episode < num_episodes
    out, turns = write_prompts(slots.out, task, turns, playing, player=player)
    slots, count = slots.replace(out=out), turns.count
    slots, follows = schedule.seat(slots, task, which, turns)
    block = turns.tokens, length, jnp.where(follows, 0, count)
    if settings.window:
        context = settings.context(task)
        block = windows.read_again(out, episode, world.turn, context, pad_id=task.pad_id)

    def put(into, value):
        return into.at[which].set(value, mode='drop')

    rows = player.seat(slots.rows, which, task, world, out, episode)
    any_reader = jnp.any(playing & ~follows)
    rows = token_rows.prefill(rows, params, which, block, player=player, wanted=any_reader)
    slots = slots.replace(reads=slots.reads + any_reader, read=slots.read + block[2].sum())
    stream = listed.token_stream[jnp.minimum(episode, num_episodes - 1)]
    slots = slots.replace(
        rows=rows.replace(length=put(rows.length, length + count), stream=put(rows.stream, stream)),
        phase=put(slots.phase, jnp.where(playing, GENERATING, IDLE)),
        response=put(slots.response, jnp.zeros_like(count)),
        answer=jax.tree.map(
            put,
            slots.answer,
            answers.init_answer(task.answer, settings.serve_rows, world.agent.part),
        ),
        world=jax.tree.map(put, slots.world, world),
        place=begin_answers(slots.place, task, which, world),
        serves=slots.serves + 1,
        overflow=slots.overflow + jnp.sum(count > turns.tokens.shape[1]),
    )
    return schedule.after_read(slots, task, which)


def collect(
    params: Params,
    task: text.TextTask,
    episodes: Episodes,
    key: jax.Array,
    head: Any = None,
    *,
    settings: RolloutSettings,
) -> tuple[Rollout, dict[str, jax.Array]]:
    """Play E episodes and return them in their order, with counters int32 [].

    head: a precomputed Player.answer_head of the parameters; None: it is computed here.

    Counters: decodes and serves (iterations), generated (sampled tokens), reads (blocks), read
    (tokens in them), overflow (must be 0), nonfinite (sampled tokens with a non-finite
    log-probability, which are meaningless; must be 0), no_legal_token (sampled tokens at positions
    where the grammar allowed no token; must be 0).
    """
    k_tokens, k_world = jax.random.split(key)
    player = settings.player
    params = jax.tree.map(lambda x: x.astype(player.model.dtype), params)
    head = player.answer_head(params, task) if head is None else head
    state = start(params, task, episodes, settings=settings)
    params, keys = player.transpose(params), (k_tokens, k_world)
    state = play(state, params, task, episodes, keys, settings=settings, head=head)
    nonfinite = state.out.action_mask & ~jnp.isfinite(state.out.logprobs)
    return settings.schedule.finish(state, episodes), {
        **{name: getattr(state, name) for name in COUNTERS},
        'nonfinite': nonfinite.sum(dtype=jnp.int32),
        'no_legal_token': state.out.no_legal_token.sum(dtype=jnp.int32),
    }


def play(
    state: Slots,
    params: Params,
    task: text.TextTask,
    episodes: Episodes,
    keys: tuple[jax.Array, jax.Array],
    *,
    settings: RolloutSettings,
    head: Any = None,
) -> Slots:
    """Serve and decode until every slot is idle.

    keys: (of tokens, of environments). head: see collect.
    """
    k_tokens, k_world = keys

    def decoding(state):
        waiting = settings.schedule.waiting(state)
        return jnp.any(state.phase == GENERATING) & (waiting < settings.serve_rows)

    def decode_once(state):
        return decode(state, params, task, k_tokens, settings=settings, head=head)

    def advance(state):
        state = serve(state, params, task, episodes, k_world, settings=settings)
        return jax.lax.while_loop(decoding, decode_once, state)

    return jax.lax.while_loop(lambda state: jnp.any(state.phase != IDLE), advance, state)


def start(
    params: Params, task: text.TextTask, episodes: Episodes, *, settings: RolloutSettings
) -> Slots:
    """Return empty slots that wait for their first episode, with the prefix in their caches."""
    slots, player, zero = settings.slots, settings.player, jnp.int32(0)
    listed = settings.schedule.listed(episodes)
    world = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.zeros(slots, jnp.int32))
    cache_tokens = settings.context(task).cache_tokens(settings.max_tokens)
    rows = token_rows.start(params, player.untransposed, task.prefix, slots, cache_tokens)
    return Slots(
        rows=rows,
        episode=jnp.full(slots, listed.level.shape[0], jnp.int32),
        phase=jnp.full(slots, WAITING, jnp.int32),
        response=jnp.zeros(slots, jnp.int32),
        answer=answers.init_answer(task.answer, slots),
        world=world,
        next_episode=zero,
        out=empty_rollout(task, listed.level, settings.max_tokens).replace(
            extra=player.rollout_extra(listed, task.max_turns)
        ),
        place=begin_answers(empty_place(task, slots), task, jnp.arange(slots), world),
        **dict.fromkeys(COUNTERS, zero),
        schedule=settings.schedule.start(task, episodes, rows, world),
    )


def empty_place(task: text.TextTask, slots: int) -> grammars.GrammarState | None:
    """Return the initial grammar state of all slots; None without a grammar."""
    if task.grammar is None:
        return None
    offered = (slots, grammars.words(len(task.env.ACTION_NAMES)))
    return grammars.GrammarState(jnp.zeros(slots, jnp.int32), jnp.zeros(offered, jnp.uint32))


def collect_on_mesh(mesh: jax.sharding.Mesh, settings: RolloutSettings) -> Callable:
    """Return `collect` for a mesh: each ('data', 'fsdp') shard plays its own rows in its own slots.

    Shards run their loops independently, without waiting for each other. Parameters must be
    replicated over both axes (sharding.rollout_rules) and may be split over 'tensor'.
    settings.slots is the number for the full mesh. Counters are returned per shard, int32 [shards].
    """
    rows, settings = P(('data', 'fsdp')), settings.of_shard(mesh)

    def local(params, task, episodes, key, head):
        out, counters = collect(params, task, episodes, key, head, settings=settings)
        return out, jax.tree.map(lambda x: x[None], counters)

    def replicated(params, task, episodes, key):
        sharding.check_no_empty_array(task, mesh)
        head = settings.player.answer_head(params, task)
        if head is not None:  # replicate: shards of few columns would be padded inside the loops
            head = jax.lax.with_sharding_constraint(head, NamedSharding(mesh, P()))
        return shards_of(params, task, episodes, key, head)

    shards_of = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(), rows, P(), P()),
        out_specs=(rows, rows),
        axis_names={'data', 'fsdp'},
        check_vma=False,
    )
    return replicated
