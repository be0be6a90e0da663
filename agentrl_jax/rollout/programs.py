"""What the device does of a rollout against hosts: rows of tokens, and four programs on them.

  start    rows that hold the common prefix alone
  decode   live rows sample until enough of them have ended their turn, or for a number of steps
  read     a block of tokens, each line a chunk of one row's observation, goes into the caches
  copy     rows take over the caches of others, whose conversations begin as theirs do, and sample
           where nothing is left to read
They know no episode, turn or world, so every rollout of a run shares them: each is compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import stops
from agentrl_jax.types import Params, TurnStop

READ_HEADER = 10  # numbers in front of the tokens of a line that is read, and of what is on offer
REPORT_HEADER = 3  # ... and of a line that is reported


@struct.dataclass
class State:
    """S rows, and the answers that they are sampling."""

    rows: token_rows.Rows
    live: jax.Array  # bool [S]    samples
    stop: jax.Array  # int32 [S]   TurnStop of an answer that was not reported yet
    count: jax.Array  # int32 [S]   tokens of the answer so far
    found: jax.Array  # int32 [S]   state of the stop strings' automaton
    most: jax.Array  # int32 [S]   tokens that the answer may have
    temperature: jax.Array  # float32 [S]  of the answer, and ...
    top_p: jax.Array  # float32 [S]  ... its top_p, for a RowSampler
    tokens: jax.Array  # int32 [S, R]
    logprobs: jax.Array  # float32 [S, R]
    opened: jax.Array  # compute dtype [S, D]  final hidden state after what the cache begins with
    place: grammars.Place | None = None  # in the grammar of answers; None without one
    parser: answers.AnswerState | None = None  # with Ends.answer
    allowed: jax.Array | None = None  # uint32 [S, R, W]  as Rollout.allowed


@struct.dataclass
class Ends:
    """What ends a turn."""

    eos_ids: jax.Array  # int32 [n]
    strings: stops.StopTable
    grammar: grammars.Grammar | None = None  # what is sampled from; None = the vocabulary
    answer: answers.AnswerTable | None = None  # parses answers to worlds on the device: their
    # thoughts end where it finds the end

    @property
    def words(self) -> tuple[int, int]:
        """Words of what is allowed, and of the forms on offer; 0 without a grammar."""
        if self.grammar is None:
            return 0, 0
        through = self.grammar.through
        offers = 1 if through is None else through.shape[2]
        return grammars.words(self.grammar.after.shape[1]), offers


def start(
    params: Params,
    prefix: jax.Array,
    ends: Ends,
    *,
    settings: RolloutSettings,
    cache_tokens: int,
) -> State:
    """Rows that hold nothing but the common prefix int32 [P]."""
    slots, max_response = settings.slots, settings.max_response
    none, grammar = jnp.zeros(slots, jnp.int32), {}
    if ends.grammar is not None:
        words, offers = ends.words
        grammar = dict(
            place=grammars.Place(none, jnp.zeros((slots, offers), jnp.uint32)),
            allowed=jnp.zeros((slots, max_response, words), jnp.uint32),
        )
        if ends.answer is not None:
            grammar['parser'] = answers.init_answer(ends.answer, slots)
    rows = token_rows.start(params, settings.player, prefix, slots, cache_tokens)
    return State(
        rows=rows,
        opened=rows.hidden,
        live=jnp.zeros(slots, bool),
        stop=none,
        count=none,
        found=none,
        most=none,
        temperature=jnp.ones(slots, jnp.float32),
        top_p=jnp.ones(slots, jnp.float32),
        tokens=jnp.zeros((slots, max_response), jnp.int32),
        logprobs=jnp.zeros((slots, max_response), jnp.float32),
        **grammar,
    )


def decode(
    state: State,
    params: Params,
    ends: Ends,
    key: jax.Array,
    until: jax.Array,
    limit: jax.Array,
    *,
    settings: RolloutSettings,
) -> tuple[State, jax.Array]:
    """Live rows sample until `until` of them have stopped, none is left, or `limit` steps are done.

    key: that of the rollout. Returns the state and a report int32 [serve_rows + 1, REPORT_HEADER +
    (2 + W) R]: row (S = none), number of tokens, TurnStop, the tokens, the bits of their log-
    probabilities and of what was allowed, of rows that have stopped; in the last line steps, live
    rows, and stopped ones that were not reported yet.
    """
    player, serve_rows = settings.player, settings.serve_rows
    k_tokens = jax.random.split(key)[0]
    slots, longest = state.tokens.shape
    each = jnp.arange(slots)

    def going(carry):
        state, steps = carry
        stopped = jnp.sum(state.stop != TurnStop.NONE)
        return jnp.any(state.live) & (stopped < until) & (steps < limit)

    def step(carry):
        state, steps = carry
        live = state.live
        draw = functools.partial(settings.sampler.draw, state, vocab_shards=settings.vocab_shards)
        at = jnp.where(live, state.count, longest)
        if ends.grammar is not None:
            legal = grammars.allowed(ends.grammar, state.place)
            draw = grammars.constrain(draw, ends.grammar, legal)
            bits = grammars.pack(legal)
            state = state.replace(allowed=state.allowed.at[each, at].set(bits, mode='drop'))
        token, logprob = token_rows.sample(state.rows, params, k_tokens, player=player, draw=draw)
        stop, count, found = stops.turn_stop(
            token,
            live,
            state.count,
            state.found,
            advance=functools.partial(stops.advance, ends.strings),
            matched=functools.partial(stops.matched, ends.strings),
            eos_ids=ends.eos_ids,
            max_response=state.most,
        )
        if ends.grammar is not None:
            place = grammars.advance(ends.grammar, state.place, token, live, state.most - count)
            if ends.answer is not None:
                parser = answers.advance(ends.answer, state.parser, token, live)
                before, state = state.place, state.replace(parser=parser)
                place = grammars.open_actions(ends.grammar, before, place, ends.answer, parser)
            state = state.replace(place=place)
        state = state.replace(
            rows=token_rows.push(state.rows, params, token, live, player=player),
            live=live & (stop == TurnStop.NONE),
            stop=jnp.where(live, stop, state.stop),
            count=count,
            found=found,
            tokens=state.tokens.at[each, at].set(token, mode='drop'),
            logprobs=state.logprobs.at[each, at].set(logprob, mode='drop'),
        )
        return state, steps + 1

    state, steps = jax.lax.while_loop(going, step, (state, jnp.int32(0)))
    which = jnp.nonzero(state.stop != TurnStop.NONE, size=serve_rows, fill_value=slots)[0]
    parts = [jnp.stack([which, state.count[which], state.stop[which]], axis=1)]
    parts += [state.tokens[which], as_int(state.logprobs[which])]
    if state.allowed is not None:
        parts.append(as_int(state.allowed[which]).reshape(serve_rows, -1))
    message = jnp.concatenate(parts, axis=1)
    state = state.replace(stop=state.stop.at[which].set(TurnStop.NONE, mode='drop'))
    left = jnp.sum(state.stop != TurnStop.NONE)
    last = jnp.zeros((1, message.shape[1]), jnp.int32)
    last = last.at[0, :REPORT_HEADER].set(jnp.stack([steps, state.live.sum(), left]))
    return state, jnp.concatenate([message, last]).astype(jnp.int32)


def as_int(x: jax.Array) -> jax.Array:
    """The same bits as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def read(
    state: State, params: Params, ends: Ends, block: jax.Array, *, settings: RolloutSettings
) -> State:
    """Reads a block int32 [w, READ_HEADER + offers + C], a line for each row that gets a chunk.

    Head of a line: row (S = none), position in the cache, tokens of the chunk, length of the
    episode with the prompt, random stream, whether this is the last chunk (the row then samples;
    2: the last of what its cache begins with, which others may copy), the kind of the turn (0, it
    acts), the most tokens of its answer, and the bits of its temperature and top_p; then the words
    of the forms on offer.
    """
    which, begin, count, _, _, last, *_ = block.T
    text = READ_HEADER + ends.words[1]
    rows = token_rows.prefill(
        state.rows, params, which, (block[:, text:], begin, count), player=settings.player
    )
    slots = rows.length.shape[0]
    kept = rows.hidden.at[which].get(mode='clip')
    opened = state.opened.at[jnp.where(last > 1, which, slots)].set(kept, mode='drop')
    return begin_answers(state.replace(rows=rows, opened=opened), ends, block[:, :text])


def begin_answers(state: State, ends: Ends, heads: jax.Array) -> State:
    """Rows that go on to sample where the heads int32 [w, READ_HEADER + offers] say so."""
    which, _, _, length, stream, last, part, most, *own = heads[:, :READ_HEADER].T
    temperature, top_p = jax.lax.bitcast_convert_type(jnp.stack(own), jnp.float32)

    def put(into, value):
        return into.at[which].set(value, mode='drop')

    if ends.grammar is not None:
        offered = jax.lax.bitcast_convert_type(heads[:, READ_HEADER:], jnp.uint32)
        place = grammars.begin(ends.grammar, part, offered)
        state = state.replace(place=state.place.put(which, place))
        if ends.answer is not None:
            parser = answers.init_answer(ends.answer, len(which))
            state = state.replace(parser=jax.tree.map(put, state.parser, parser))
    rows = state.rows
    return state.replace(
        rows=rows.replace(length=put(rows.length, length), stream=put(rows.stream, stream)),
        live=put(state.live, last > 0),
        count=put(state.count, 0),
        found=put(state.found, 0),
        most=put(state.most, most),
        temperature=put(state.temperature, temperature),
        top_p=put(state.top_p, top_p),
    )


def copy(state: State, ends: Ends, lines: jax.Array, *, settings: RolloutSettings) -> State:
    """Rows take over what the caches of others begin with, a line int32 [w, 1 + head] for each.

    The row that is copied, and the head of a line that is read: where it is the last chunk, the row
    has all that it would have read and samples.
    """
    del settings
    source, heads = lines[:, 0], lines[:, 1:]
    which, begin, count, _, _, last, *_ = heads.T
    slots = state.rows.length.shape[0]
    rows = token_rows.copy(state.rows, source, which, jnp.sum(which < slots))
    at, theirs = jnp.where(last > 0, which, slots), state.opened[source]
    rows = rows.replace(
        hidden=rows.hidden.at[at].set(theirs, mode='drop'),
        context=rows.context.at[which].set(begin + count, mode='drop'),
    )
    opened = state.opened.at[at].set(theirs, mode='drop')
    return begin_answers(state.replace(rows=rows, opened=opened), ends, heads)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The four programs, jitted, over the devices of this process."""

    start: Callable  # (params, prefix, ends) -> state
    decode: Callable  # (state, params, ends, key, until, limit) -> (state, reports)
    read: Callable  # (state, params, ends, blocks) -> state
    copy: Callable  # (state, ends, lines) -> state
    shards: int  # parts of the rows; each has its own reports and blocks, one after another
    settings: RolloutSettings  # of a shard: slots are its rows, serve_rows lines of a report and of
    # a block
    width: int  # tokens of a chunk


@functools.cache
def build_programs(
    mesh: jax.sharding.Mesh, settings: RolloutSettings, *, width: int, cache_tokens: int
) -> Programs:
    """The programs for settings.slots rows of each ('data', 'fsdp') shard of a local mesh.

    Equal settings share programs. slots, serve_rows and width are part of what a rollout is: other
    shapes may round differently in the last bits.
    """
    rows = P(('data', 'fsdp'))
    settings = dataclasses.replace(
        settings,
        serve_rows=min(settings.serve_rows, settings.slots),
        vocab_shards=mesh.shape['tensor'],
    )

    def program(function, *, takes, gives, donate=(), **static):
        local = jax.shard_map(
            functools.partial(function, settings=settings, **static),
            mesh=mesh,
            in_specs=takes,
            out_specs=gives,
            axis_names={'data', 'fsdp'},
            check_vma=False,
        )
        return jax.jit(local, donate_argnums=donate)

    return Programs(
        start=program(start, takes=(P(), P(), P()), gives=rows, cache_tokens=cache_tokens),
        decode=program(decode, takes=(rows, P(), P(), P(), P(), P()), gives=(rows, rows), donate=0),
        read=program(read, takes=(rows, P(), P(), rows), gives=rows, donate=0),
        copy=program(copy, takes=(rows, P(), rows), gives=rows, donate=0),
        shards=mesh.shape['data'] * mesh.shape['fsdp'],
        settings=settings,
        width=width,
    )
