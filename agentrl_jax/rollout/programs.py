"""What the device does of a rollout against hosts: rows of tokens, and three programs on them.

  start    rows that hold the common prefix alone
  decode   live rows sample until enough of them have ended their turn, or for a number of steps
  read     a block of tokens, each line a chunk of one row's observation, goes into the caches
They know no episode, turn or world, so every rollout of a run shares them: each is compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from agentrl_jax.models.base import Model
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout import sampling
from agentrl_jax.text import stops
from agentrl_jax.types import Params, TurnStop

READ_HEADER = 6  # numbers in front of the tokens of a line that is read
REPORT_HEADER = 3  # ... and of a line that is reported


@struct.dataclass
class State:
    """S rows, and the answers that they are sampling."""

    rows: token_rows.Rows
    live: jax.Array  # bool [S]    samples
    stop: jax.Array  # int32 [S]   TurnStop of an answer that was not reported yet
    count: jax.Array  # int32 [S]   tokens of the answer so far
    found: jax.Array  # int32 [S]   state of the stop strings' automaton
    tokens: jax.Array  # int32 [S, R]
    logprobs: jax.Array  # float32 [S, R]


@struct.dataclass
class Ends:
    """What ends a turn."""

    eos_ids: jax.Array  # int32 [n]
    strings: stops.StopTable


def start(
    params: Params,
    prefix: jax.Array,
    *,
    config: Model,
    slots: int,
    cache_tokens: int,
    max_response: int,
) -> State:
    """Rows that hold nothing but the common prefix int32 [P]."""
    none = jnp.zeros(slots, jnp.int32)
    return State(
        rows=token_rows.start(params, config, prefix, slots, cache_tokens),
        live=jnp.zeros(slots, bool),
        stop=none,
        count=none,
        found=none,
        tokens=jnp.zeros((slots, max_response), jnp.int32),
        logprobs=jnp.zeros((slots, max_response), jnp.float32),
    )


def decode(
    state: State,
    params: Params,
    ends: Ends,
    key: jax.Array,
    until: jax.Array,
    limit: jax.Array,
    *,
    config: Model,
    serve_rows: int,
    draw: Callable,
) -> tuple[State, jax.Array]:
    """Live rows sample until `until` of them have stopped, none is left, or `limit` steps are done.

    key: that of the rollout. Returns the state and a report int32 [serve_rows + 1, REPORT_HEADER +
    2 R]: row (S = none), number of tokens, TurnStop, the tokens, and the bits of their log-
    probabilities, of rows that have stopped; in the last line steps, live rows, and stopped ones
    that were not reported yet.
    """
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
        token, logprob = token_rows.sample(state.rows, params, k_tokens, config=config, draw=draw)
        place = jnp.where(live, state.count, longest)
        stop, count, found = stops.turn_stop(
            token,
            live,
            state.count,
            state.found,
            advance=functools.partial(stops.advance, ends.strings),
            matched=functools.partial(stops.matched, ends.strings),
            eos_ids=ends.eos_ids,
            max_response=longest,
        )
        state = state.replace(
            rows=token_rows.push(state.rows, params, token, live, config=config),
            live=live & (stop == TurnStop.NONE),
            stop=jnp.where(live, stop, state.stop),
            count=count,
            found=found,
            tokens=state.tokens.at[each, place].set(token, mode='drop'),
            logprobs=state.logprobs.at[each, place].set(logprob, mode='drop'),
        )
        return state, steps + 1

    state, steps = jax.lax.while_loop(going, step, (state, jnp.int32(0)))
    which = jnp.nonzero(state.stop != TurnStop.NONE, size=serve_rows, fill_value=slots)[0]
    bits = jax.lax.bitcast_convert_type(state.logprobs[which], jnp.int32)
    head = jnp.stack([which, state.count[which], state.stop[which]], axis=1)
    message = jnp.concatenate([head, state.tokens[which], bits], axis=1)
    state = state.replace(stop=state.stop.at[which].set(TurnStop.NONE, mode='drop'))
    left = jnp.sum(state.stop != TurnStop.NONE)
    last = jnp.zeros((1, message.shape[1]), jnp.int32)
    last = last.at[0, :REPORT_HEADER].set(jnp.stack([steps, state.live.sum(), left]))
    return state, jnp.concatenate([message, last]).astype(jnp.int32)


def read(state: State, params: Params, block: jax.Array, *, config: Model) -> State:
    """Reads a block int32 [w, READ_HEADER + C], a line for each row that gets a chunk of tokens.

    Head of a line: row (S = none), position in the cache, tokens of the chunk, length of the
    episode with the prompt, random stream, and whether this is the last chunk: the row then
    samples.
    """
    which, begin, count, length, stream, last = (block[:, i] for i in range(READ_HEADER))
    rows = token_rows.prefill(
        state.rows, params, which, block[:, READ_HEADER:], begin, count, config=config
    )

    def put(into, value):
        return into.at[which].set(value, mode='drop')

    return state.replace(
        rows=rows.replace(length=put(rows.length, length), stream=put(rows.stream, stream)),
        live=put(state.live, last > 0),
        count=put(state.count, 0),
        found=put(state.found, 0),
    )


@dataclasses.dataclass(frozen=True)
class Programs:
    """The three programs, jitted, over the devices of this process."""

    start: Callable  # (params, prefix) -> state
    decode: Callable  # (state, params, ends, key, until, limit) -> (state, reports)
    read: Callable  # (state, params, blocks) -> state
    shards: int  # parts of the rows; each has its own reports and blocks, one after another
    slots: int  # rows of a shard
    serve_rows: int  # lines of a report, and of a block, of a shard
    width: int  # tokens of a chunk
    max_response: int


@functools.cache
def build_programs(
    mesh: jax.sharding.Mesh,
    *,
    config: Model,
    slots: int,
    serve_rows: int,
    width: int,
    cache_tokens: int,
    max_response: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Programs:
    """The programs for `slots` rows of each ('data', 'fsdp') shard of a mesh of local devices.

    Equal settings share programs. slots, serve_rows and width are part of what a rollout is: other
    shapes may round differently in the last bits.
    """
    rows = P(('data', 'fsdp'))
    serve_rows = min(serve_rows, slots)
    draw = functools.partial(sampling.sample, temperature=temperature, top_k=top_k, top_p=top_p)

    def program(function, *, takes, gives, donate=(), **static):
        local = jax.shard_map(
            functools.partial(function, config=config, **static),
            mesh=mesh,
            in_specs=takes,
            out_specs=gives,
            axis_names={'data', 'fsdp'},
            check_vma=False,
        )
        return jax.jit(local, donate_argnums=donate)

    sizes = dict(slots=slots, cache_tokens=cache_tokens, max_response=max_response)
    return Programs(
        start=program(start, takes=(P(), P()), gives=rows, **sizes),
        decode=program(
            decode,
            takes=(rows, P(), P(), P(), P(), P()),
            gives=(rows, rows),
            donate=0,
            serve_rows=serve_rows,
            draw=draw,
        ),
        read=program(read, takes=(rows, P(), rows), gives=rows, donate=0),
        shards=mesh.shape['data'] * mesh.shape['fsdp'],
        slots=slots,
        serve_rows=serve_rows,
        width=width,
        max_response=max_response,
    )
