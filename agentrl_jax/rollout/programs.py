"""Device side of a host rollout: rows of tokens and four programs on them.

  start    creates rows that contain only the common prefix
  decode   lets live rows sample until enough of them end their turn, or for a number of steps
  read     reads a block into the caches; each line is a chunk of one row's observation
  copy     copies caches to rows with the same start of their conversation, which then sample if
           nothing is left to read
They do not depend on episodes, turns or environments, so all rollouts of a run share them and each
is compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import sharding
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout import sampling
from agentrl_jax.rollout.slots import RolloutSettings, sample
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import stops
from agentrl_jax.types import Params, TurnStop

READ_HEADER = 10  # numbers in front of the offers and tokens of a line to read
REPORT_HEADER = 3  # numbers in front of the tokens of a reported line


def sample_rows(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    *,
    top_k: int = 0,
    vocab_shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Run `sample` with a temperature and a top_p per row, float32 [S].

    Temperatures below 1e-3 are greedy, because the quotients could overflow.
    """
    greedy, top_p = temperature < 1e-3, jnp.maximum(top_p, 1e-6)
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    drawn = sampling.sample(scaled, uniform, top_k=top_k, top_p=top_p, vocab_shards=vocab_shards)
    best = sampling.sample(logits, uniform, temperature=0.0, vocab_shards=vocab_shards)
    token, logprob = (jnp.where(greedy, x, y) for x, y in zip(best, drawn, strict=True))
    return token, logprob


@dataclasses.dataclass(frozen=True)
class RowSampler(sampling.Sampler):
    """Uses a temperature and a top_p per slot; the fields of the sampler are the defaults."""

    def draw(
        self, slots: Any, logits: jax.Array, uniform: jax.Array, *, vocab_shards: int = 1
    ) -> tuple[jax.Array, jax.Array]:
        """See Sampler.draw. slots: has temperature and top_p, float32 [S]."""
        row_settings, more = (slots.temperature, slots.top_p), dict(top_k=self.top_k)
        return sample_rows(logits, uniform, *row_settings, **more, vocab_shards=vocab_shards)


@struct.dataclass
class State:
    """S rows and the answers that they are sampling."""

    rows: token_rows.Rows
    live: jax.Array  # bool [S]    sampling
    stop: jax.Array  # int32 [S]   TurnStop of an answer that was not reported yet
    count: jax.Array  # int32 [S]   tokens of the answer so far
    found: jax.Array  # int32 [S]   state of the stop strings' automaton
    most: jax.Array  # int32 [S]   maximum number of tokens of the answer
    temperature: jax.Array  # float32 [S]  of the answer, for a RowSampler
    top_p: jax.Array  # float32 [S]  of the answer, for a RowSampler
    tokens: jax.Array  # int32 [S, R]
    logprobs: jax.Array  # float32 [S, R]
    opened: jax.Array  # compute dtype [S, D]  final hidden state after the conversation's opening
    place: grammars.GrammarState | None = None
    # state of the answer grammar; None without a grammar
    parser: answers.AnswerState | None = None  # with StopRules.answer
    allowed: jax.Array | None = None  # uint32 [S, R, W]  as Rollout.allowed


@struct.dataclass
class StopRules:
    """Conditions that end a turn."""

    eos_ids: jax.Array  # int32 [n]
    strings: stops.StopTable
    grammar: grammars.Grammar | None = None  # restricts sampling; None = any token
    answer: answers.AnswerTable | None = None  # parser of answers to device environments: detects
    # the end of their thoughts

    @property
    def words(self) -> tuple[int, int]:
        """Number of words of the allowed bits and of the offered forms; 0 without a grammar."""
        if self.grammar is None:
            return 0, 0
        through = self.grammar.through
        offers = 1 if through is None else through.shape[2]
        return grammars.words(self.grammar.after.shape[1]), offers


def start(
    params: Params,
    prefix: jax.Array,
    ends: StopRules,
    *,
    settings: RolloutSettings,
    cache_tokens: int,
) -> State:
    """Return rows that contain only the common prefix int32 [P]."""
    slots, max_response = settings.slots, settings.max_response
    none, grammar = jnp.zeros(slots, jnp.int32), {}
    if ends.grammar is not None:
        words, offers = ends.words
        grammar = dict(
            place=grammars.GrammarState(none, jnp.zeros((slots, offers), jnp.uint32)),
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
    ends: StopRules,
    key: jax.Array,
    until: jax.Array,
    limit: jax.Array,
    *,
    settings: RolloutSettings,
) -> tuple[State, jax.Array]:
    """Let live rows sample until `until` rows have stopped, none is live, or for `limit` steps.

    key: of the rollout. Returns the state and a report int32 [serve_rows + 1, REPORT_HEADER +
    (2 + W) R]. Each line describes a stopped row: row (S = none), number of tokens, TurnStop, the
    tokens, the bits of their log-probabilities, and the allowed bits. The last line has the number
    of steps, of live rows, and of stopped rows that were not reported yet.
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
        at = jnp.where(live, state.count, longest)
        token, logprob, bits = sample(state, params, ends.grammar, k_tokens, settings=settings)
        if bits is not None:
            state = state.replace(allowed=state.allowed.at[each, at].set(bits, mode='drop'))
        stop, count, stop_state = stops.turn_stop(
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
            found=stop_state,
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
    """Reinterpret the bits as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def read(
    state: State, params: Params, ends: StopRules, block: jax.Array, *, settings: RolloutSettings
) -> State:
    """Read a block int32 [w, READ_HEADER + offers + C], one line for each row with a chunk.

    Head of a line: row (S = none), cache position, tokens of the chunk, length of the episode with
    the prompt, random stream, last chunk (0: no; 1: yes, the row then samples; 2: also the end of
    the opening, which other rows may copy), kind of the turn (0: it acts), maximum tokens of the
    answer, the bits of its temperature and top_p, and then the words of the offered forms.
    """
    which, begin, count, _, _, last, *_ = block.T
    text = READ_HEADER + ends.words[1]
    rows = token_rows.prefill(
        state.rows, params, which, (block[:, text:], begin, count), player=settings.player
    )
    slots = rows.length.shape[0]
    hidden = rows.hidden.at[which].get(mode='clip')
    opened = state.opened.at[jnp.where(last > 1, which, slots)].set(hidden, mode='drop')
    return begin_answers(state.replace(rows=rows, opened=opened), ends, block[:, :text])


def begin_answers(state: State, ends: StopRules, heads: jax.Array) -> State:
    """Start sampling in rows with a last chunk; heads int32 [w, READ_HEADER + offers]."""
    which, _, _, length, stream, last, part, max_new_tokens, *sampling_bits = heads[
        :, :READ_HEADER
    ].T
    temperature, top_p = jax.lax.bitcast_convert_type(jnp.stack(sampling_bits), jnp.float32)

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
        most=put(state.most, max_new_tokens),
        temperature=put(state.temperature, temperature),
        top_p=put(state.top_p, top_p),
    )


def copy(state: State, ends: StopRules, lines: jax.Array, *, settings: RolloutSettings) -> State:
    """Copy the start of caches to other rows; lines int32 [w, 1 + head].

    A line is the source row and the head of a line as in `read`. If the head marks the last chunk,
    nothing is left to read and the row samples.
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
    shards: int  # number of shards of the rows; their reports and blocks are concatenated
    settings: RolloutSettings  # of a shard: slots = rows, serve_rows = lines per report and block
    width: int  # tokens per chunk


@functools.cache
def build_programs(
    mesh: jax.sharding.Mesh, settings: RolloutSettings, *, width: int, cache_tokens: int
) -> Programs:
    """Build the programs for settings.slots rows of each ('data', 'fsdp') shard of a local mesh.

    Equal settings share programs. slots, serve_rows and width affect the results of a rollout,
    because other shapes may round the last bits differently.
    """
    rows = P(('data', 'fsdp'))

    def program(function, *, takes, gives, donate=(), **static):
        local = jax.shard_map(
            functools.partial(function, settings=settings, **static),
            mesh=mesh,
            in_specs=takes,
            out_specs=gives,
            axis_names={'data', 'fsdp'},
            check_vma=False,
        )
        options = settings.model.compiler_options
        return jax.jit(local, donate_argnums=donate, compiler_options=options)

    return Programs(
        start=program(start, takes=(P(), P(), P()), gives=rows, cache_tokens=cache_tokens),
        decode=program(decode, takes=(rows, P(), P(), P(), P(), P()), gives=(rows, rows), donate=0),
        read=program(read, takes=(rows, P(), P(), rows), gives=rows, donate=0),
        copy=program(copy, takes=(rows, P(), rows), gives=rows, donate=0),
        shards=sharding.row_shards(mesh),
        settings=settings,
        width=width,
    )
