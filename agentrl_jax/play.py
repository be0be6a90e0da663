"""Play an environment in the terminal, or watch a policy play it token by token.

  python -m agentrl_jax.play --config=configs/demo.py [--level=3]      you play
  python -m agentrl_jax.play --workdir=runs/demo [--level=3]           its newest policy plays
  python -m agentrl_jax.play --workdir=runs/demo --split=test --delay=0.5

A policy can also play on hosts and harnesses. You get the same observations as a policy and type
action names, such as `Right || Down`; an empty line quits. Levels are from --split.
"""

from absl import flags
from ml_collections import config_flags

from agentrl_jax.run import command
from agentrl_jax.tokens.tokenizer import Tokenizer

if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, 'Config file, see configs/.')
    flags.DEFINE_string('workdir', '', 'Folder of the run with the policy.')
    flags.DEFINE_enum('split', 'validation', ['train', 'validation', 'test'], 'Pool of levels.')
    flags.DEFINE_integer('level', 0, 'Level of the pool.')
    flags.DEFINE_integer('seed', 0, 'Random seed of the environment and the policy.')
    flags.DEFINE_float('delay', 0.1, 'Seconds between tokens.', 0.0, 60.0)
    command.begin(__doc__, says='agentrl_jax.play: loading')

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from agentrl_jax.imitation.demonstrations import answer_text
from agentrl_jax.machine import files, sharding
from agentrl_jax.records import pages
from agentrl_jax.run import config, hosts, loading, parts
from agentrl_jax.run.config import Config
from agentrl_jax.text import agents
from agentrl_jax.text import task as text
from agentrl_jax.text.answer import ABSENT, END, parse_answer
from agentrl_jax.types import Episodes, EpisodeStop, Rollout


def view_of(task: text.TextTask, world: text.Episode) -> str:
    """Return a policy's observation at the start of a turn, without the chat template."""
    part = int(world.agent.part)
    asks = f'{task.max_actions_per_episode - int(world.used)} actions left'
    if part != agents.ACT:
        asks = getattr(task.style, agents.WRITTEN[part].asks).rstrip()
    return f'Turn {int(world.turn) + 1} of {task.max_turns}\n{board_of(task, world.state)}{asks}'


def board_of(task: text.TextTask, state: Any) -> str:
    """Return the state of the environment as text."""
    return task.env.observation_text(jax.device_get(state))


def ending(task: text.TextTask, stop: EpisodeStop, solved: bool) -> str:
    """Return why an episode is over."""
    if solved:
        return 'solved'
    budget = getattr(task, 'max_actions_per_episode', 0)  # hosts have no such budget
    reasons = {
        EpisodeStop.TERMINATED: 'the environment ended it',
        EpisodeStop.ACTION_BUDGET: f'all {budget} actions are used',
        EpisodeStop.TURN_BUDGET: f'all {task.max_turns} turns are played',
        EpisodeStop.TOKEN_BUDGET: 'no further turn fits into rollout.max_tokens',
        EpisodeStop.ENV_ERROR: 'the environment failed',
        EpisodeStop.NONE: 'the player quit',
    }
    return f'not solved: {reasons[stop]}'


def wrapped(text: str, width: int) -> str:
    """Replace spaces by line breaks, so that no word is cut at the margin.

    The length of the text stays the same. width: columns; 0 = do not wrap.
    """
    line_and_space = rf'(?=.{{{width + 1}}})(.{{0,{width}}}) '  # only in lines that are longer
    return re.sub(line_and_space, r'\1\n', text) if width else text


def play_by_hand(
    task: text.TextTask,
    *,
    level: int,
    seed: int,
    ask: Callable[[str], str],
    say: Callable[[str], None],
) -> tuple[float, bool]:
    """Let a person play one episode; returns (return, solved)."""
    key, world, total = jax.random.key(seed), text.begin(task, jnp.int32(level)), 0.0
    names, turn = task.env.ACTION_NAMES, jax.jit(text.play_turn)
    say(task.env.rules(task.env_params))
    say(f'Actions: {", ".join(names)}; up to {task.max_actions_per_turn} per turn, split by ||')
    solved = False
    while True:
        say('\n' + view_of(task, world))
        line = ask('> ').strip()
        if not line:
            say(f'{ending(task, EpisodeStop.NONE, solved)}, return {total:g}')
            return total, solved
        typed = answer_text([line], '', task.opening).encode() + END
        matched, row = parse_answer(
            typed, names, max_actions=task.max_actions_per_turn, opening=task.opening
        )
        if world.agent.part != agents.ACT:  # any text is valid
            matched, row = True, [ABSENT] * task.max_actions_per_turn
        world, outcome = turn(task, key, world, jnp.asarray(row), jnp.bool_(matched))
        total += float(outcome.reward) + float(outcome.penalty)
        solved = bool(outcome.success)
        if not outcome.valid:
            say(f'(not a list of valid actions: {float(outcome.penalty):g})')
        stop = EpisodeStop(int(outcome.stop))
        if stop != EpisodeStop.NONE:
            say(f'\nThe end\n{board_of(task, world.state)}')
            say(f'{ending(task, stop, solved)}, return {total:g}')
            return total, solved


def pieces(rollout: Rollout, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield (text, sampled?) of the first episode's tokens; each observation is one piece."""
    row = jax.tree.map(lambda x: np.asarray(x)[0], rollout)
    real = row.tokens[: row.attention_mask.sum()].tolist()
    sampled = row.action_mask[: len(real)]
    begin = 0
    while begin < len(real):
        end = begin + 1
        while not sampled[begin] and end < len(real) and not sampled[end]:
            end += 1
        yield tokenizer.decode(real[begin:end], show_special=True), bool(sampled[begin])
        begin = end


def watch(
    cfg: Config, workdir: str, split: str, *, level: int, seed: int, delay: float, console: Console
) -> tuple[float, bool]:
    """Let a run's policy play one episode, then print it token by token; (return, solved)."""
    tokenizer = loading.build_tokenizer(cfg)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    task = parts.build_text_task(cfg, tokenizer, split, None)
    model, params = loading.load_run(files.local_path(workdir), mesh=mesh)
    stream = jnp.arange(2, dtype=jnp.int32)  # two rows: XLA compiles one row differently
    listed = Episodes(level=jnp.full(2, level), token_stream=stream, world_stream=stream)
    few = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, slots=2))
    worlds = hosts.build_worlds(cfg, tokenizer) if cfg.on_hosts else None
    collect = parts.build_collect(few, model, mesh, training=False, worlds=worlds)
    try:
        rollout, _ = collect(params, task, listed, jax.random.key(seed))
    finally:
        if worlds is not None:
            worlds.pool.close()
    tokens = list(pieces(rollout, tokenizer))
    remaining = wrapped(''.join(piece for piece, _ in tokens), width_of(console))
    for piece, sampled in tokens:
        now, remaining = remaining[: len(piece)], remaining[len(piece) :]
        console.print(now, style='bold' if sampled else 'dim', end='')
        time.sleep(delay if sampled else 5 * delay)
    console.print('\n')
    both = jax.device_get(rollout)
    if not cfg.on_hosts:  # on hosts, no token contains the reply to the last answer
        states = pages.replay_states(both, np.arange(2), task, jax.random.key(seed))
        last = next(itertools.islice(states, int(both.num_turns[0]), None))
        console.print(f'The end\n{board_of(task, jax.tree.map(lambda x: x[0], last))}')
    total, solved = float(both.returns[0]), bool(both.success[0])
    stop = EpisodeStop(int(both.episode_stop[0]))
    console.print(f'{ending(task, stop, solved)}, return {total:g}')
    return total, solved


def width_of(console: Console) -> int:
    """Return the columns of a terminal; 0 for files and pipes."""
    return console.width if console.is_terminal else 0


def config_to_play(given: Any, workdir: str) -> Config:
    """Return the config of the run, or the ConfigDict; ValueError for both or neither."""
    if bool(workdir) == (given is not None):
        raise ValueError(
            'set either a --config, to play yourself, or a --workdir, to watch the policy of that '
            'run'
        )
    return loading.config_of_run(files.local_path(workdir)) if workdir else config.read(given)


def play(args: Any) -> None:
    """Play one level, by hand or with a run's policy. args: the parsed flags."""
    cfg = config_to_play(args.config, args.workdir).held_out
    if cfg.on_hosts and not args.workdir:
        raise ValueError(
            f'env.name={cfg.env.name!r} is on hosts, which only a policy can play: set --workdir '
            'to its run'
        )
    tokenizer = loading.build_tokenizer(cfg)
    console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
    task = parts.build_text_task(cfg, tokenizer, args.split, None)
    levels = task.env.num_levels(task.env_params)
    if not 0 <= args.level < levels:
        raise ValueError(f'--level={args.level} must be in 0..{levels - 1}')
    how = dict(level=args.level, seed=args.seed)
    if args.workdir:
        watch(cfg, args.workdir, args.split, **how, delay=args.delay, console=console)
    else:
        width = width_of(console)
        play_by_hand(task, **how, ask=input, say=lambda text: print(wrapped(text, width)))


def main() -> None:
    with command.running():
        try:
            play(flags.FLAGS)
        except (EOFError, KeyboardInterrupt):
            print()


if __name__ == '__main__':
    main()
