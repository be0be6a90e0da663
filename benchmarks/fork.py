"""What continuations cost: a forked rollout beside a plain one, and a fork beside its alternatives.

  python -m benchmarks.fork [--json=PATH]

1. Seconds a sampled token of a rollout whose episodes have continuations from every later turn, and
   of one without, over as many turns. Answers have 5 to 60 tokens, uniform; no token ends a turn.
   Slots: a quarter of the episodes of the plain one, and as many as it has episodes.
2. Seconds of one fork: reading the observation (which every turn does, forked or not), copying the
   row of another slot before it (slots that help), and reading all that was said before instead.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models import Model
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.episodes import draw_forks
from benchmarks import common, limits
from benchmarks.rollout import LONG, SHORT, SMALL, build_task, collect_planned, episode_list


def turns_of(turns: int, continuations: int) -> int:
    """Turns that an episode and its continuations play: n + M (n - 1 + ... + 1)."""
    return turns + continuations * turns * (turns - 1) // 2


def conversation(turns: int, **shape: int) -> tuple[Any, Model, Any, int]:
    """(task, model, its parameters, tokens of the longest episode)."""
    task, _, vocab = build_task(turns)
    config = common.model_config(vocab, **(SMALL | shape))
    length = task.prefix.shape[0] + turns * (task.width + LONG)
    return task, config, common.init_params(config), length


def forked_list(episodes: int, turns: int, continuations: int) -> Any:
    """Episodes with continuations from every turn behind the first."""
    listed = episode_list(episodes)
    forks = draw_forks(
        jax.random.key(0),
        listed,
        turns='every',
        continuations=continuations,
        max_turns=turns,
        common=False,
    )
    return listed.replace(forks=forks)


def compare(
    *, episodes: int, turns: int, continuations: int, serve_rows: int, repeats: int, **shape: int
) -> dict[str, Any]:
    """Part 1; episodes: of the plain rollout. Trunks are fewer, so that both play as many turns."""
    task, config, params, length = conversation(turns, **shape)
    trunks = episodes * turns // turns_of(turns, continuations)
    lists = {
        'plain': episode_list(episodes),
        'forked': forked_list(trunks, turns, continuations),
    }
    calls, rng = {}, np.random.default_rng(0)
    for name, listed in lists.items():
        rows = listed.listed.level.shape[0]
        plan = jnp.asarray(rng.integers(SHORT, LONG + 1, (rows, turns)), jnp.int32)
        for slots in (episodes // 4, episodes):
            program = functools.partial(
                collect_planned,
                config=config,
                slots=slots,
                serve_rows=min(serve_rows, slots),
                max_tokens=length,
                max_response=LONG,
            )
            arguments = (params, task, listed, jax.random.key(0), plan)
            calls[f'{name}, {slots}'] = functools.partial(jax.jit(program), *arguments)
    times = common.medians(common.alternate(calls, repeats))
    found = {}
    for name, call in calls.items():
        _, _, decodes, generated = map(int, jax.device_get(call()))
        slots = int(name.split()[-1])
        found[name] = {
            'rollout': name.split(',')[0],
            'slots': slots,
            'seconds': times[name],
            'sampled': generated,
            'decodes': decodes,
            'occupancy': generated / (decodes * slots),
            'token_us': 1e6 * times[name] / generated,
        }
    for one in found.values():
        one['x_plain'] = one['token_us'] / found[f'plain, {one["slots"]}']['token_us']
    return {'episodes': episodes, 'trunks': trunks, 'continuations': continuations, 'runs': found}


def one_fork(
    *, slots: int, rows: int, turns: int, repeats: int, times: int = 8, **shape: int
) -> dict[str, Any]:
    """Part 2: seconds a row, of blocks of `rows` rows, at the middle of a conversation."""
    task, config, params, length = conversation(turns, **shape)
    middle = length // 2
    which = jnp.arange(rows, dtype=jnp.int32)

    def reading(width, begin):
        def once(state):
            tokens = jnp.ones((rows, width), jnp.int32)
            at = jnp.full(rows, begin, jnp.int32)
            return token_rows.prefill(
                state, params, which, tokens, at, jnp.full(rows, width), config=config
            )

        return once

    def copying(state):
        return token_rows.copy(state, which + slots - rows, which, jnp.int32(rows))

    def program(once):
        @jax.jit
        def run():
            cache = config.init_cache(slots, length)
            zeros = jnp.zeros(slots, jnp.int32)
            hidden = jnp.zeros((slots, config.hidden_size), config.dtype)
            state = token_rows.Rows(cache, hidden, zeros, zeros, zeros)
            state = jax.lax.fori_loop(0, times, lambda _, state: once(state), state)
            return state.hidden.sum() + sum(x[0, 0, 0] for x in state.cache.k)

        return run

    parts = {
        'nothing': program(lambda state: state),
        'observation': program(reading(task.width, middle)),
        'row': program(copying),
        'conversation': program(reading(middle, 0)),
    }
    spent = common.medians(common.alternate(parts, repeats))
    costs = {
        name: (spent[name] - spent['nothing']) / times / rows for name in parts if name != 'nothing'
    }
    return {
        'observation_tokens': task.width,
        'conversation_tokens': middle,
        'row_s': costs,
        'x_copied': 1 + costs['row'] / costs['observation'],
        'x_read_again': 1 + costs['conversation'] / costs['observation'],
    }


def show(result: dict[str, Any]) -> str:
    one, two = result['rollouts'], result['fork']
    names = ['rollout', 'slots', 'sampled', 'decodes', 'occupancy', 'token_us', 'x_plain']
    first = common.table(
        f'{one["episodes"]} episodes, or {one["trunks"]} with {one["continuations"]} continuations '
        'from every later turn',
        names,
        [[run[name] for name in names] for run in one['runs'].values()],
    )
    alone, copied, again = (two['row_s'][name] for name in ('observation', 'row', 'conversation'))
    second = common.table(
        f'a fork behind {two["conversation_tokens"]} tokens; observations of up to '
        f'{two["observation_tokens"]}',
        ['how', 'ms', 'x a plain turn'],
        [
            ['rewound: the observation is read', 1e3 * alone, 1.0],
            ['in another slot: the row is copied', 1e3 * (alone + copied), two['x_copied']],
            ['all is read again', 1e3 * (alone + again), two['x_read_again']],
        ],
    )
    return f'{first}\n\n{second}'


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0],
        episodes=128,
        turns=4,
        continuations=2,
        slots=64,
        serve_rows=8,
        repeats=3,
    )
    common.pin(args.core)
    result = {
        'rollouts': compare(
            episodes=args.episodes,
            turns=args.turns,
            continuations=args.continuations,
            serve_rows=args.serve_rows,
            repeats=args.repeats,
        ),
        'fork': one_fork(
            slots=args.slots, rows=args.serve_rows, turns=args.turns, repeats=args.repeats
        ),
        'limits': vars(limits.measure()),
    }
    print(show(result))
    common.emit('fork', result, args.json)


if __name__ == '__main__':
    main()
