"""collect: batched multi-turn episodes in one XLA program.

A fixed number of slots play a longer list of episodes. The program alternates between
  serve    up to `serve_rows` slots whose turn has ended step their worlds, get the next observation
           written and prefilled as one block, or take over the next episode of the list;
  decode   every generating slot samples one token and runs it through the model, again and again
           until `serve_rows` slots wait or nobody generates.
Nothing leaves the device, and rows whose turns end early do not wait for the longest one. Each
token is read once, except with context.window, which reads the turns of the window again.

Episodes may have continuations (rollout.forks): rows of the list after the episodes, E (1 + F) in
all, which slots take over as they take over episodes.

Of the first observation of a group one slot reads all, and the others copy it (rollout.openings).

The tokens, their cache and their random streams are rows (rollout.rows), as they are for worlds on
hosts; here each row has a world, an answer reader and a place in the output beside it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import sharding
from agentrl_jax.models.base import Model, transpose_kernels
from agentrl_jax.rollout import forks, openings, sampling, windows
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import stops
from agentrl_jax.text import task as text
from agentrl_jax.types import EpisodeStop, Pair, Params, Rollout, TurnStop

IDLE, GENERATING, WAITING, READING, FOLLOWING = 0, 1, 2, 3, 4


@struct.dataclass
class Slots:
    """State of the S slots, and what is written so far (N rows: E episodes and continuations)."""

    rows: token_rows.Rows  # S rows of tokens
    episode: jax.Array  # int32 [S]     row of `out` being played; N = none
    phase: jax.Array  # int32 [S]     IDLE, GENERATING, WAITING, FOLLOWING a slot that reads the
    # same or, with chunks, READING
    response: jax.Array  # int32 [S]     tokens sampled in the current turn
    answer: answers.AnswerState  # parser of the current turn, S rows
    world: text.Episode  # worlds, S rows
    next_episode: jax.Array  # int32 []
    out: Rollout  # N rows
    decodes: jax.Array  # int32 []      decode iterations
    serves: jax.Array  # int32 []      serve iterations
    reads: jax.Array  # int32 []      blocks read
    read: jax.Array  # int32 []      tokens in them
    generated: jax.Array  # int32 []      tokens sampled
    overflow: jax.Array  # int32 []      observations longer than their block (must stay 0)
    place: grammars.Place | None = None  # in the grammar of answers, S rows; None without one
    bank: forks.Bank | None = None  # what continuations begin from; None without them
    opened: openings.Openings | None = None  # None where each slot reads all of its own


def decode(
    slots: Slots,
    params: Params,
    task: text.TextTask,
    key: jax.Array,
    *,
    config: Model,
    max_response: int,
    stop_at_answer: bool,
    draw: Callable,
    head: jax.Array | None = None,
) -> Slots:
    """Every generating slot samples one token; the token's keys and values go into the cache."""
    live = slots.phase == GENERATING
    out, length, grammar, allowed = slots.out, slots.rows.length, task.grammar, {}
    if grammar is not None:
        legal = grammars.allowed(grammar, slots.place)
        draw = grammars.constrain(draw, grammar, legal)
        allowed = {'allowed': grammars.pack(legal)}
    token, logprob = token_rows.sample(slots.rows, params, key, config=config, draw=draw, head=head)
    token = jnp.where(live, token, task.pad_id)
    row = jnp.where(live, slots.episode, out.tokens.shape[0])
    stop, response, parser = stops.turn_stop(
        token,
        live,
        slots.response,
        slots.answer,
        advance=functools.partial(answers.advance, task.answer),
        matched=lambda parser: answers.matched(task.answer, parser) & stop_at_answer,
        eos_ids=task.eos_ids,
        max_response=max_response,
    )
    turn = slots.world.turn
    own, counted = True, live
    if slots.rows.other is not None:
        own, counted = ~slots.rows.other, live & ~slots.rows.other
        logprob = jnp.where(own, logprob, 0.0)
    sampled = dict(tokens=token, logprobs=logprob, attention_mask=True, action_mask=own)
    out = out.put((row, length), **sampled, **allowed, turn=turn).put((row, turn), turn_stop=stop)
    place = slots.place
    if grammar is not None:
        place = grammars.advance(grammar, place, token, live, max_response - response)
        place = grammars.open_actions(grammar, slots.place, place, task.answer, parser)
    return slots.replace(
        place=place,
        rows=token_rows.push(slots.rows, params, token, live, config=config),
        phase=jnp.where(live & (stop != TurnStop.NONE), WAITING, slots.phase),
        response=response,
        answer=parser,
        out=out,
        decodes=slots.decodes + 1,
        generated=slots.generated + counted.sum(),
    )


def finish_turn(
    slots: Slots,
    task: text.TextTask,
    episodes: Episodes,
    key: jax.Array,
    rows: jax.Array,
    *,
    max_response: int,
) -> tuple[text.Episode, Rollout, jax.Array, jax.Array]:
    """Steps the worlds of the given slots with their parsed answers and records the outcome.

    Returns (worlds after the turn, out, episode_over bool [w], sampled_end bool [w]).
    """
    out = slots.out
    num_episodes, max_tokens = out.tokens.shape
    world = jax.tree.map(lambda x: x[rows], slots.world)
    parser = jax.tree.map(lambda x: x[rows], slots.answer)
    episode = slots.episode[rows]
    playing = episode < num_episodes
    source = jnp.minimum(episode, num_episodes - 1)
    streams = episodes.listed.world_stream[source]
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
    fits = slots.rows.length[rows] + prompt + max_response <= max_tokens
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
    return after, out, over, sampled_end


def choose(which: jax.Array, new: Any, old: Any) -> Any:
    """Trees of arrays [w, ...]: the new one's where which bool [w], elsewhere the old one's."""

    def one(new, old):
        return jnp.where(which.reshape(which.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)


def start_episodes(
    slots: Slots,
    task: text.TextTask,
    episodes: Episodes,
    rows: jax.Array,
    world: text.Episode,
    over: jax.Array,
) -> tuple[jax.Array, text.Episode, jax.Array, jax.Array]:
    """Gives the next episodes of the list to the slots whose episode is over.

    Returns (episode int32 [w], world, length int32 [w], next_episode).
    """
    num_episodes, none = episodes.level.shape[0], slots.out.tokens.shape[0]
    wants = over & (rows < slots.phase.shape[0])
    candidate = slots.next_episode + jnp.cumsum(wants) - 1
    starts = wants & (candidate < num_episodes)
    if slots.opened is not None:
        candidate = slots.opened.order[jnp.minimum(candidate, num_episodes - 1)]
    episode = jnp.where(starts, candidate, jnp.where(over, none, slots.episode[rows]))
    level = slots.out.level[jnp.minimum(candidate, num_episodes - 1)]
    fresh = jax.vmap(text.begin, in_axes=(None, 0))(task, level)
    world = choose(starts, fresh, world)
    length = jnp.where(starts, task.prefix.shape[0], slots.rows.length[rows])
    return episode, world, length, slots.next_episode + starts.sum()


def served(slots: Slots, serve_rows: int) -> jax.Array:
    """Up to serve_rows slots, S = none: those that wait, followed by helpers without work.

    int32 [serve_rows].
    """
    none = slots.phase.shape[0]
    (waiting,) = jnp.nonzero(slots.phase == WAITING, size=serve_rows, fill_value=none)
    if slots.bank is None:
        return waiting
    (idle,) = jnp.nonzero(slots.phase == IDLE, size=serve_rows, fill_value=none)
    after = jnp.arange(serve_rows) - jnp.sum(waiting < none)
    return jnp.where(after < 0, waiting, idle[jnp.maximum(after, 0)])


def start_turns(
    slots: Slots,
    task: text.TextTask,
    episodes: Episodes,
    rows: jax.Array,
    over: jax.Array,
    world: text.Episode,
    sampled_end: jax.Array,
    *,
    copies: bool,
) -> tuple[Slots, jax.Array, text.Episode, jax.Array, jax.Array]:
    """What the slots play next: their next turn, the next episode of the list or a continuation.

    A slot plays the continuations of its trunk before the next episode, and helps others where the
    list is at its end; copies: it then needs the cache of the slot it helps. Returns (slots,
    episode int32 [w], world, length int32 [w], sampled_end bool [w]).
    """
    bank, free = slots.bank, over
    if bank is not None:
        played = slots.episode[rows]
        bank = forks.finish(bank, episodes.forks, rows, played, over, world.turn, slots.out)
        free = over & ~forks.own_work(bank, rows)
    episode, world, length, next_episode = start_episodes(slots, task, episodes, rows, world, free)
    slots = slots.replace(next_episode=next_episode)
    if bank is None:
        return slots, episode, world, length, sampled_end
    left = over & ~(free & (episode < slots.out.tokens.shape[0]))
    bank, work, out, begun = forks.begin(bank, slots.out, slots.episode, episodes.forks, rows, left)
    current = (episode, world, length, sampled_end)
    episode, world, length, sampled_end = choose(work.begins, begun, current)
    at = jnp.where(episode < out.tokens.shape[0], rows, slots.phase.shape[0])
    bank = forks.remember(bank, at, world, length, sampled_end)
    cached = forks.copy_caches(slots.rows, rows, work) if copies else slots.rows
    return slots.replace(bank=bank, out=out, rows=cached), episode, world, length, sampled_end


def begin_answers(
    place: grammars.Place | None, task: text.TextTask, rows: jax.Array, world: text.Episode
) -> grammars.Place | None:
    """With slots `rows` int32 [w] in front of the answer to what their worlds offer."""
    if place is None:
        return None
    offered = grammars.pack(jax.vmap(text.offered, in_axes=(None, 0))(task, world.state))
    return place.put(rows, grammars.begin(task.grammar, world.agent.part, offered))


def write_prompts(
    out: Rollout,
    task: text.TextTask,
    episode: jax.Array,
    playing: jax.Array,
    world: text.Episode,
    length: jax.Array,
    sampled_end: jax.Array,
) -> tuple[Rollout, jax.Array, jax.Array]:
    """Writes the prompt of the turn that each world of w slots is at, after `length` int32 [w].

    episode int32 [w]: row of out, where playing bool [w]. Returns (out, tokens int32 [w, width]
    with pad_id after the end, count int32 [w], which is above the width where tokens were lost).
    """
    num_episodes, max_tokens = out.tokens.shape
    tokens, count = jax.vmap(text.turn_tokens, in_axes=(None, 0, 0))(task, world, sampled_end)
    count = jnp.where(playing, count, 0)
    opening = jax.vmap(text.opening_length, in_axes=(None, 0, 0))(task, world, sampled_end)
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
    if out.seats is not None:
        out = out.put((row, world.turn), seats=jax.vmap(task.env.seat)(world.state))
    return out, jnp.where(used, tokens, task.pad_id), count


def seat(
    slots: Slots,
    task: text.TextTask,
    rows: jax.Array,
    episode: jax.Array,
    turn: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
) -> tuple[Slots, jax.Array]:
    """Slots `rows` play `episode`, each at its `turn`, all int32 [w]; write_prompts gave the rest.

    Returns (slots, follows bool [w]: slots whose prompt another one reads).
    """
    changed = episode != slots.episode[rows]
    slots = slots.replace(episode=slots.episode.at[rows].set(episode, mode='drop'))
    if slots.opened is None:
        return slots, jnp.zeros_like(changed)
    opened, follows = openings.begin(
        slots.opened,
        slots.out,
        slots.episode,
        rows,
        changed=changed,
        begins=(episode < slots.out.tokens.shape[0]) & (turn == 0),
        tokens=tokens,
        count=count,
        prefix=task.prefix.shape[0],
    )
    return slots.replace(opened=opened), follows


def serve(
    slots: Slots,
    params: Params,
    task: text.TextTask,
    episodes: Episodes,
    key: jax.Array,
    *,
    config: Model,
    serve_rows: int,
    max_response: int,
    window: int = 0,
    chunk: int = 0,
) -> Slots:
    """Takes up to serve_rows waiting slots to the start of their next answer.

    With a chunk they only get what they are to read next, and then up to serve_rows slots read as
    many tokens of theirs: blocks are narrow and hold no slot that has nothing to read.
    """
    num_slots, num_episodes = slots.phase.shape[0], slots.out.tokens.shape[0]
    # Padding rows point past the last slot: gathers clamp, scatters drop.
    rows = served(slots, serve_rows)
    world, out, over, sampled_end = finish_turn(
        slots, task, episodes, key, rows, max_response=max_response
    )
    over = over | (rows == num_slots)
    slots, episode, world, length, sampled_end = start_turns(
        slots.replace(out=out),
        task,
        episodes,
        rows,
        over,
        world,
        sampled_end,
        copies=not window,  # else the cache holds no more than the last turns, which are read again
    )
    playing = episode < num_episodes
    out, tokens, count = write_prompts(
        slots.out, task, episode, playing, world, length, sampled_end
    )
    slots, follows = seat(slots.replace(out=out), task, rows, episode, world.turn, tokens, count)
    inputs, begin, unread = tokens, length, jnp.where(follows, 0, count)
    if window:
        inputs, begin, unread = windows.read_again(
            out,
            episode,
            world.turn,
            windows.Context.of(task, window, max_response),
            pad_id=task.pad_id,
        )

    def put(into, value):
        return into.at[rows].set(value, mode='drop')

    if slots.rows.other is not None:
        learner = out.learner[jnp.minimum(episode, num_episodes - 1)]
        other = jax.vmap(task.env.seat)(world.state) != learner
        slots = slots.replace(rows=slots.rows.replace(other=put(slots.rows.other, other)))
    if chunk:
        cached, ready = slots.rows.replace(context=put(slots.rows.context, length)), READING
    else:
        wanted, ready = jnp.any(playing & ~follows), GENERATING
        cached = token_rows.prefill(
            slots.rows, params, rows, inputs, begin, unread, config=config, wanted=wanted
        )
        slots = slots.replace(reads=slots.reads + wanted, read=slots.read + unread.sum())
    stream = episodes.listed.token_stream[jnp.minimum(episode, num_episodes - 1)]
    slots = slots.replace(
        rows=cached.replace(
            length=put(cached.length, length + count), stream=put(cached.stream, stream)
        ),
        phase=put(slots.phase, jnp.where(playing, jnp.where(follows, FOLLOWING, ready), IDLE)),
        response=put(slots.response, jnp.zeros_like(count)),
        answer=jax.tree.map(
            put, slots.answer, answers.init_answer(task.answer, serve_rows, world.agent.part)
        ),
        world=jax.tree.map(put, slots.world, world),
        place=begin_answers(slots.place, task, rows, world),
        serves=slots.serves + 1,
        overflow=slots.overflow + jnp.sum(count > tokens.shape[1]),
    )
    if chunk:
        sizes = dict(config=config, serve_rows=serve_rows, chunk=chunk)
        slots, rows = read_chunks(slots, params, task, **sizes)
    return hand_on(slots, task, rows)


def hand_on(slots: Slots, task: text.TextTask, read: jax.Array) -> Slots:
    """Slots copy what those that they follow have read, if the slots `read` int32 [w] now have."""
    if slots.opened is None:
        return slots
    where = dict(prefix=task.prefix.shape[0], width=task.width)
    opened, rows, ready = openings.hand_on(slots.opened, slots.rows, read, **where)
    phase = jnp.where(ready, GENERATING, slots.phase)
    return slots.replace(opened=opened, rows=rows, phase=phase)


def read_chunks(
    slots: Slots,
    params: Params,
    task: text.TextTask,
    *,
    config: Model,
    serve_rows: int,
    chunk: int,
) -> tuple[Slots, jax.Array]:
    """Up to serve_rows slots read the next `chunk` tokens that the worlds have written for them.

    Nothing is read while fewer wait for it and others can go on sampling. Returns the slots, and
    those that have read int32 [serve_rows], S = none.
    """
    num_slots, (num_episodes, max_tokens) = slots.phase.shape[0], slots.out.tokens.shape
    reading = slots.phase == READING
    wanted = (reading.sum() >= serve_rows) | (
        jnp.any(reading) & ~jnp.any(slots.phase == GENERATING)
    )
    rows = jnp.nonzero(reading, size=serve_rows, fill_value=num_slots)[0]
    begin, length = slots.rows.context[rows], slots.rows.length[rows]
    count = jnp.where(rows < num_slots, jnp.minimum(length - begin, chunk), 0)
    column = jnp.arange(chunk)[None]
    row = jnp.minimum(slots.episode[rows], num_episodes - 1)[:, None]
    tokens = slots.out.tokens[row, jnp.minimum(begin[:, None] + column, max_tokens - 1)]
    inputs = jnp.where(column < count[:, None], tokens, task.pad_id)
    count = jnp.where(wanted, count, 0)
    rows = jnp.where(wanted, rows, num_slots)
    phase = jnp.where(begin + count == length, GENERATING, READING)
    slots = slots.replace(
        rows=token_rows.prefill(
            slots.rows, params, rows, inputs, begin, count, config=config, wanted=wanted
        ),
        phase=slots.phase.at[rows].set(phase, mode='drop'),
        reads=slots.reads + wanted,
        read=slots.read + count.sum(),
    )
    return slots, rows


def answer_head(
    params: Params | Pair, task: text.TextTask, config: Model
) -> jax.Array | Pair | None:
    """The head [D, U] of the tokens of answers; None where any token may be sampled.

    Made once, before all loops: in them it would be gathered for every token.
    """
    if task.grammar is None or task.grammar.free:
        return None
    if isinstance(params, Pair):
        return Pair(*(answer_head(one, task, config) for one in token_rows.each(params)))
    config = dataclasses.replace(config, transposed=False)
    return config.head_columns(params, task.grammar.columns)


def collect(
    params: Params | Pair,
    task: text.TextTask,
    episodes: Episodes,
    key: jax.Array,
    head: jax.Array | Pair | None = None,
    *,
    config: Model,
    slots: int,
    serve_rows: int,
    max_tokens: int,
    max_response: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_at_answer: bool = False,
    window: int = 0,
    chunk: int = 0,
    vocab_shards: int = 1,
    share: bool = False,
    seated: bool = False,
) -> tuple[Rollout, dict[str, jax.Array]]:
    """Plays the E episodes and returns them in their order, with counters int32 [].

    With episodes.forks each has its continuations beside it (Rollout.continuations).

    head: answer_head of the parameters, where it was made before; None: it is made here.
    window: turns that the policy sees, the current one included; 0 = the whole conversation.
    chunk: tokens of a slot that are read at a time, for whole conversations; 0 = a turn's prompt.
    vocab_shards: of logits over the whole vocabulary, see sampling.sample.
    share: slots copy a first observation that another one reads, where the policy sees whole
    conversations; what is sampled is the same.
    seated: with Rollout.seats. Of a Pair the policy has seat 0
    in episodes of even token streams and seat 1 in the others, and its tokens alone are sampled
    ones of the rollout; that needs window=1.

    Counters: decodes and serves (iterations), generated (sampled tokens), reads (blocks), read
    (tokens in them), overflow (must be 0), nonfinite (sampled tokens whose log-probability is not
    finite: of such logits the draw is no draw; must be 0), no_legal_token (sampled tokens for which
    the grammar allowed no token; must be 0).
    """
    k_tokens, k_world = jax.random.split(key)
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    head = answer_head(params, task, config) if head is None else head
    state = start(
        params,
        task,
        episodes,
        config=dataclasses.replace(config, transposed=False),
        slots=slots,
        max_tokens=max_tokens,
        cache_tokens=windows.Context.of(task, window, max_response).cache_tokens(max_tokens),
        share=share and not window,
        seated=seated,
    )

    def draw(state, logits, uniform):
        del state
        return sampling.sample(
            logits,
            uniform,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            vocab_shards=vocab_shards if head is None else 1,
        )

    if config.transposed:
        params = jax.tree.map(transpose_kernels, params, is_leaf=lambda x: not isinstance(x, Pair))
    state = play(
        state,
        params,
        task,
        episodes,
        (k_tokens, k_world),
        draw=draw,
        head=head,
        config=config,
        serve_rows=serve_rows,
        max_response=max_response,
        stop_at_answer=stop_at_answer,
        window=window,
        chunk=chunk,
    )
    out = state.out
    if episodes.forks is not None:
        out = forks.split(out, forks.turns(state.bank, episodes.forks))
    nonfinite = state.out.action_mask & ~jnp.isfinite(state.out.logprobs)
    return out, {
        'decodes': state.decodes,
        'serves': state.serves,
        'generated': state.generated,
        'reads': state.reads,
        'read': state.read,
        'overflow': state.overflow,
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
    draw: Callable,
    config: Model,
    serve_rows: int,
    max_response: int,
    head: jax.Array | None = None,
    stop_at_answer: bool = False,
    window: int = 0,
    chunk: int = 0,
) -> Slots:
    """Serves and decodes until every slot is idle.

    keys: of tokens and of worlds. draw(state, logits [S, V], uniform [S]) -> (token int32 [S],
    log-probability float32 [S]). head: see answer_head.
    """
    k_tokens, k_world = keys
    static = dict(config=config, max_response=max_response)

    def decoding(state):
        waiting = jnp.sum((state.phase == WAITING) | (state.phase == READING))
        if state.bank is not None:
            waiting += jnp.minimum(jnp.sum(state.phase == IDLE), jnp.sum(state.bank.pending))
        return jnp.any(state.phase == GENERATING) & (waiting < serve_rows)

    def decode_once(state):
        return decode(
            state,
            params,
            task,
            k_tokens,
            stop_at_answer=stop_at_answer,
            draw=functools.partial(draw, state),
            head=head,
            **static,
        )

    def advance(state):
        blocks = dict(serve_rows=serve_rows, window=window, chunk=chunk)
        state = serve(state, params, task, episodes, k_world, **blocks, **static)
        return jax.lax.while_loop(decoding, decode_once, state)

    return jax.lax.while_loop(lambda state: jnp.any(state.phase != IDLE), advance, state)


def start(
    params: Params,
    task: text.TextTask,
    episodes: Episodes,
    *,
    config: Model,
    slots: int,
    max_tokens: int,
    cache_tokens: int,
    share: bool = False,
    seated: bool = False,
) -> Slots:
    """All slots empty and waiting for their first episode; the common prefix is in their caches."""
    listed, zero = episodes.listed, jnp.int32(0)
    world = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.zeros(slots, jnp.int32))
    bank = None
    if episodes.forks is not None:
        bank = forks.empty_bank(world, episodes.forks, task.max_turns)
    rows = token_rows.start(params, config, task.prefix, slots, cache_tokens)
    return Slots(
        rows=rows,
        episode=jnp.full(slots, listed.level.shape[0], jnp.int32),
        phase=jnp.full(slots, WAITING, jnp.int32),
        response=jnp.zeros(slots, jnp.int32),
        answer=answers.init_answer(task.answer, slots),
        world=world,
        next_episode=zero,
        out=Rollout.empty(
            listed.level,
            task.prefix,
            pad_id=task.pad_id,
            max_tokens=max_tokens,
            max_turns=task.max_turns,
            max_actions=task.max_actions_per_turn,
            words=text.words(task),
            seated=seated,
            learner=listed.token_stream % 2 if isinstance(params, Pair) else None,
        ),
        place=begin_answers(empty_place(task, slots), task, jnp.arange(slots), world),
        decodes=zero,
        serves=zero,
        generated=zero,
        reads=zero,
        read=zero,
        overflow=zero,
        bank=bank,
        opened=openings.start(episodes.level, rows.hidden) if share else None,
    )


def empty_place(task: text.TextTask, slots: int) -> grammars.Place | None:
    """Slots that are in no answer yet; None where there is no grammar."""
    if task.grammar is None:
        return None
    offered = (slots, grammars.words(len(task.env.ACTION_NAMES)))
    return grammars.Place(jnp.zeros(slots, jnp.int32), jnp.zeros(offered, jnp.uint32))


def collect_on_mesh(mesh: jax.sharding.Mesh, **static: Any) -> Callable:
    """collect over the mesh: each shard of ('data', 'fsdp') plays its own rows with its own slots.

    Shards run their loops independently, without waiting for one another; parameters must be
    replicated over both axes (sharding.rollout_rules) and may be split over 'tensor'. `slots` is
    the number for the whole mesh. Counters come back per shard, int32 [shards].
    """
    rows = P(('data', 'fsdp'))
    shards = mesh.shape['data'] * mesh.shape['fsdp']
    if static['slots'] % shards:
        raise ValueError(f'rollout.slots={static["slots"]} must be a multiple of {shards} shards')
    static['slots'] //= shards
    static['serve_rows'] = min(static['serve_rows'], static['slots'])
    static['vocab_shards'] = mesh.shape['tensor']

    def local(params, task, episodes, key, head):
        out, counters = collect(params, task, episodes, key, head, **static)
        return out, jax.tree.map(lambda x: x[None], counters)

    def replicated(params, task, episodes, key):
        sharding.check_no_empty_array(task, mesh)
        head = answer_head(params, task, static['config'])
        if head is not None:  # else shards of few columns would be padded within loops
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


def check_budget(task: text.TextTask, *, max_tokens: int, max_response: int) -> int:
    """Tokens of an episode in the worst case.

    Raises on a token budget that cannot hold the first turn.
    """
    prefix, turn = task.prefix.shape[0], task.width + max_response
    if prefix + turn > max_tokens:
        raise ValueError(
            f'rollout.max_tokens={max_tokens} is too small: the prompt prefix takes '
            f'{prefix} tokens, a turn prompt up to {task.width} and an answer '
            f'{max_response}; set it to at least {prefix + turn}'
        )
    return prefix + task.max_turns * turn
