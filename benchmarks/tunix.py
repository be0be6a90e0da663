"""Beside Tunix 0.1.7: decoding, updates, turns, slow worlds, with the same weights and tokens.

  make bench-tunix                  in an environment of its own (requirements-tunix.txt)
  python -m benchmarks.tunix [--parts=decode,update,turns,worlds] [--json=PATH]

Both sides live in one process on one core and take turns; what compiles has done so before. A ratio
is the median over the pairs, beside their range.
1. decode, update: the shapes of benchmarks.decode and benchmarks.update, at both vocabularies:
   Tunix's Sampler beside ours, its GRPO loss in one jitted step with our optimiser beside our
   update. Neither packs nor shards. same_tokens: share of greedy tokens on which both agree.
2. turns: 16 episodes in groups of 4, 4 turns of 16 sampled tokens. Ours plays FrozenLake on the
   device. Tunix gets the same observations from a script, so that its worlds cost nothing, and the
   length of an answer, for which its agentic learner has no setting. Beside ours are: the rollout
   of that learner, one episode at a time and all at once; its Sampler with all episodes in one call
   and the cheapest loop around it, which none of its agentic learners does; and a whole step of
   the learner, its own training loop, beside rollout and update of ours. (It computes the
   trainer's log-probabilities once more for its metrics; ours come with the update.)
3. worlds: 64 episodes of 4 turns of 16 tokens, 16 at once, whose worlds answer late: both sides
   wait before each reply of each episode for the same time, drawn as in benchmarks.host_schedule.
   Ours plays them on hosts (agentrl_jax/rollout/host.py), Tunix by its agentic learner's rollout.
   Seconds of the wall clock, CPU-seconds beside them; once without delays.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.envs.hosts.base import Items
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.models import Model
from agentrl_jax.rollout import device as rollouts
from agentrl_jax.rollout import host
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.keepers import Pool
from agentrl_jax.run.parts import BUNDLED_TOKENIZER
from agentrl_jax.text import answer as answers
from agentrl_jax.text.conversation import build_host_task
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.types import Rollout, Scores
from benchmarks import common, decode, host_schedule, hosts, rollout, update

INSTALL = 'it by `make bench-tunix`, or requirements-tunix.txt beside requirements.txt (--no-deps)'
GROUP = 4  # episodes of a group
MICROBATCHES, CHUNK = 4, 1024
WORDS = ('up', 'down', 'left', 'right', 'a wall', 'the box', 'a target', 'you')
WARM = 2  # rounds before those that count; Tunix's sampler compiles in the second call too


def load_peer() -> Any:
    common.import_optional('tunix', INSTALL)
    return common.import_optional('benchmarks.tunix_peer', INSTALL)


def compare_decode(
    params: Any,
    config: Model,
    *,
    batch: int,
    prompt: int,
    new: int,
    repeats: int,
    modes: tuple[str, ...],
) -> dict[str, Any]:
    """Part 1, sampling: a dictionary for each mode."""
    peer, out = load_peer(), {}
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (batch, prompt))
    tokens, key = tokens.astype(np.int32), jax.random.key(1)
    theirs = peer.build_generate(peer.build_model(params, config), config, tokens, new)
    for name in modes:
        ours = functools.partial(decode.generate, config=config, new=new, **decode.MODES[name])
        ours = functools.partial(jax.jit(ours), params, tokens, key)
        calls = {'ours': ours, 'tunix': functools.partial(theirs, name)}
        out[name] = common.compare(common.alternate(calls, repeats, WARM), 'ours', 'tunix')
        out[name]['tokens_per_s'] = batch * new / out[name]['ours_s']
        if name == 'greedy':
            out[name]['same_tokens'] = float((np.asarray(ours()[0]) == theirs(name)).mean())
    return out


def compare_update(
    params: Any, config: Model, *, batch: int, prompt: int, new: int, repeats: int
) -> dict[str, Any]:
    """Part 1, an optimiser step."""
    peer = load_peer()
    rows = update.make_batch(config.vocab_size, batch, prompt, new)
    ours = update.ours(params, config, rows, new=new, microbatches=MICROBATCHES, chunk=CHUNK)
    theirs = peer.build_update(
        peer.build_model(params, config), rows, update.optimiser(), prompt=prompt, clip=update.CLIP
    )
    first = float(ours()['policy/grad_norm']), float(theirs())
    times = common.alternate({'ours': ours, 'tunix': theirs}, repeats, WARM)
    out = common.compare(times, 'ours', 'tunix')
    out['tokens_per_s'] = batch * (prompt + new) / out['ours_s']
    out['gradient_difference'] = abs(first[0] / first[1] - 1.0)
    return out


@dataclasses.dataclass(frozen=True)
class Ours:
    """Our side of part 2."""

    params: Any
    step: Callable  # (state) -> (state, metrics): rollout and update; not jitted
    collect: Callable  # (params) -> (rollout, counters); not jitted
    rollout: Rollout  # what collect gives, on the host


def build_ours(config: Model, *, episodes: int, turns: int, new: int) -> Ours:
    task, tokenizer, vocab = rollout.build_task(turns)
    if config.vocab_size < vocab:
        raise ValueError(f'the vocabulary must have the {vocab} tokens of the prompts at least')
    # Tokens that the tokenizer has not spell nothing, and none ends a turn.
    spelled = tokenizer.token_bytes() + [b''] * (config.vocab_size - tokenizer.vocab_size)
    table = answers.build_answer_table(
        spelled,
        task.env.ACTION_NAMES,
        max_actions=task.max_actions_per_turn,
        opening=task.opening,
    )
    task = task.replace(answer=table, eos_ids=jnp.array([config.vocab_size], jnp.int32))
    groups = jnp.repeat(jnp.arange(episodes // GROUP, dtype=jnp.int32), GROUP)
    listed = rollout.episode_list(episodes).replace(level=groups)
    collect = functools.partial(
        rollouts.collect,
        task=task,
        episodes=listed,
        key=jax.random.key(0),
        config=config,
        slots=episodes,
        serve_rows=episodes,
        max_response=new,
        max_tokens=task.prefix.shape[0] + turns * (task.width + new),
    )
    optimise = update.build_step(config, new=turns * new, microbatches=MICROBATCHES, chunk=CHUNK)

    def step(state):
        played, _ = collect(state.params)
        zeros = jnp.zeros_like(played.logprobs)
        scores = Scores(old_logprobs=played.logprobs, ref_logprobs=zeros, values=zeros)
        return optimise(state, GRPO().make_batch(played, scores, group_size=GROUP))

    params = common.init_params(config)
    out, _ = jax.device_get(jax.jit(collect)(params))
    if not (out.num_turns == turns).all():
        raise RuntimeError('an episode ended early; the other side could not play the same')
    return Ours(params=params, step=step, collect=collect, rollout=out)


def observations(played: Rollout) -> list[list[list[int]]]:
    """Tokens that the policy was shown, by episode and turn."""
    shown = played.attention_mask & ~played.action_mask
    return [
        [row.tolist() for row in (tokens[seen & (turn == k)] for k in range(turn.max() + 1))]
        for tokens, seen, turn in zip(played.tokens, shown, played.turn, strict=True)
    ]


def build_script(peer: Any, played: Rollout, new: int, delays: np.ndarray | None = None) -> Any:
    """tunix_peer.Script of a rollout."""
    shown, length = observations(played), played.attention_mask.sum(1)
    texts = [[' '.join(map(str, turn)) for turn in episode] for episode in shown]
    if any(0 in turn for episode in shown for turn in episode):
        raise RuntimeError('token 0 is in a prompt; to Tunix it is padding')
    first = np.array([len(episode[0]) for episode in shown])
    return peer.Script(
        turns=texts,
        group_size=GROUP,
        new=new,
        longest=int(length.max() - new),
        response=int((length - first).max()) + 1,  # an episode that reaches it loses its last turn
        delays=delays,
    )


def compare_turns(
    config: Model, *, episodes: int, turns: int, new: int, repeats: int
) -> dict[str, Any]:
    """Part 2: turns per second of each way, and tokens behind the first prompts on both sides."""
    peer = load_peer()
    ours = build_ours(config, episodes=episodes, turns=turns, new=new)
    script = build_script(peer, ours.rollout, new)
    collect = functools.partial(jax.jit(ours.collect), ours.params)
    learners = {
        f'rollout, {n} at once': peer.build_learner(
            peer.build_model(ours.params, config),
            script,
            update.optimiser(),
            clip=update.CLIP,
            concurrency=n,
        )
        for n in (1, episodes)
    }
    sampler = peer.build_sampler(
        peer.build_model(ours.params, config), config, script.longest + script.new
    )
    calls = {'ours': collect} | {
        name: functools.partial(peer.collect, learner, script) for name, learner in learners.items()
    }
    calls['sampler, one batch'] = functools.partial(peer.collect_batched, sampler, script)
    times = common.alternate(calls, repeats, WARM)
    played = peer.collect(learners[f'rollout, {episodes} at once'], script)
    first = sum(len(episode[0]) for episode in observations(ours.rollout))
    rows = {name: common.compare(times, 'ours', name) for name in calls if name != 'ours'}
    rows['step with update'] = compare_steps(
        peer, ours, learners[f'rollout, {episodes} at once'], script, repeats
    )
    for row in rows.values():
        row['turns_per_s'] = episodes * turns / row['ours_s']
        row['other_turns_per_s'] = episodes * turns / row['other_s']
    return {
        'turns': episodes * turns,
        'tokens': int(ours.rollout.attention_mask.sum()) - first,
        'tunix_tokens': sum(len(x['conversation_tokens']) for x in played),
        'different': len({tuple(x['conversation_tokens']) for x in played}),
        'rows': rows,
    }


def compare_steps(peer: Any, ours: Ours, learner: Any, script: Any, repeats: int) -> dict[str, Any]:
    """Whole steps: rollout, advantages, an update of all episodes.

    Ours runs where Tunix's training loop asks for its next batch.
    """
    state = update.first_state(ours.params, update.optimiser())
    step = jax.jit(ours.step, donate_argnums=0)
    times = {'ours': [], 'tunix': []}

    def run():
        nonlocal state
        state, metrics = step(state)
        return metrics

    def batches():
        for i in range(WARM + repeats):
            start = common.clock()
            yield peer.prompts(script)
            jax.block_until_ready(peer.parameters(learner))
            theirs, mine = common.clock() - start, common.seconds(run)
            if i >= WARM:
                times['tunix'].append(theirs)
                times['ours'].append(mine)

    learner.train(batches())
    return common.compare(times, 'ours', 'tunix')


class Late:
    """A world of twenty words a turn, each reply as late as `delays` [E, K + 1] says."""

    deterministic, instruction = True, ''

    def __init__(self, delays: np.ndarray):
        self.delays = delays

    def reset(self, item: int) -> str:
        self.item, self.turn = item, 0
        return self.words()

    def words(self) -> str:
        time.sleep(self.delays[self.item, self.turn])
        luck = np.random.default_rng([self.item, self.turn])
        return ' '.join(luck.choice(WORDS, 20))

    def step(self, action: str) -> Reply:
        self.turn += 1
        return Reply(self.words(), done=self.turn + 1 == self.delays.shape[1])

    def close(self) -> None:
        pass


def draw_delays(shape: tuple[int, int]) -> np.ndarray:
    """Seconds [E, K + 1], as slow worlds of benchmarks.host_schedule take."""
    return np.vectorize(host_schedule.latency_of)(*np.indices(shape))


def compare_worlds(
    *, episodes: int, at_once: int, turns: int, new: int, repeats: int, **shape: int
) -> dict[str, Any]:
    """Part 3."""
    peer, tokenizer = load_peer(), load_tokenizer(BUNDLED_TOKENIZER)
    config = common.model_config(-(-tokenizer.vocab_size // 64) * 64, **shape)
    params, delays = common.init_params(config), np.zeros((episodes, turns + 1))
    spoken = hosts.conversation(tokenizer, '', 128)
    stream = np.arange(episodes, dtype=np.int32)
    task = build_host_task(hosts.Environment(), Items(stream), spoken, max_turns=turns)
    task = task.replace(eos_ids=np.array([config.vocab_size], np.int32))  # no token ends a turn
    pool = Pool(lambda: Late(delays), spoken.prompt)
    collect = hosts.collector(
        host.Worlds(pool, spoken),
        tokenizer,
        config=config,
        slots=at_once,
        serve_rows=8,
        read_tokens=32,
        max_tokens=task.prefix.shape[0] + turns * (task.width + new),
        max_response=new,
    )
    listed = Episodes(level=stream, token_stream=stream, world_stream=stream)
    ours = functools.partial(collect, params, task, listed, jax.random.key(0))
    played, _ = jax.device_get(ours())
    if not (played.num_turns == turns).all():
        raise RuntimeError('an episode ended early; the other side could not play the same')
    script = build_script(peer, played, new, delays)
    learner = peer.build_learner(
        peer.build_model(params, config),
        script,
        update.optimiser(),
        clip=update.CLIP,
        concurrency=at_once,
    )
    calls = {'ours': ours, 'tunix': functools.partial(peer.collect, learner, script)}
    for call in [*calls.values()] * WARM:
        jax.block_until_ready(call())
    found = {'no delays': wall_and_cpu(calls, repeats)}
    delays[:] = draw_delays(delays.shape)
    found['delays'] = wall_and_cpu(calls, repeats)
    again, _ = jax.device_get(ours())
    pool.close()
    tokens = [len(x['conversation_tokens']) for x in calls['tunix']()]
    first = sum(len(episode[0]) for episode in observations(played))
    return {
        'turns': episodes * turns,
        'at_once': at_once,
        'tokens': int(played.attention_mask.sum()) - first,
        'tunix_tokens': sum(tokens),
        'same': bool((again.tokens == played.tokens).all()),  # late or not
        'delays_s': float(delays.sum()),
        'longest_s': float(delays.sum(1).max()),  # of an episode
        'rows': found,
    }


def wall_and_cpu(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """common.compare of the wall clock, and CPU-seconds, of calls that take turns."""
    wall, cpu = {name: [] for name in calls}, {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start, spent = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - spent)
    spent = common.compare(cpu, 'ours', 'tunix')
    return common.compare(wall, 'ours', 'tunix') | {
        'cpu_s': spent['ours_s'],
        'other_cpu_s': spent['other_s'],
        'cpu_times': spent['times_as_fast'],
    }


def show(result: dict[str, Any]) -> str:
    """Tables of all parts."""
    names = ['ours_s', 'other_s', 'times_as_fast', 'times_low', 'times_high']
    rows = [
        [f'{what}, vocabulary {vocab}', *(x[name] for name in names)]
        for vocab, parts in result['shapes'].items()
        for what, x in parts.items()
    ]
    title = 'CPU-seconds' if jax.default_backend() == 'cpu' else 'seconds'
    columns = ['ours', 'Tunix', 'x as fast', 'at least', 'at most']
    tables = [common.table(title, ['one call', *columns], rows)] if rows else []
    if 'turns' in result:
        found = result['turns']
        names = ['turns_per_s', 'other_turns_per_s', *names[2:]]
        rows = [[way, *(x[name] for name in names)] for way, x in found['rows'].items()]
        title = f'turns/s, {found["turns"]} turns, {found["tokens"]:,} tokens behind first prompts'
        tables.append(common.table(title, ['Tunix by', *columns], rows))
    if 'worlds' in result:
        found = result['worlds']
        names = ['ours_s', 'other_s', 'times_as_fast', 'times_low', 'times_high']
        names += ['cpu_s', 'other_cpu_s', 'cpu_times']
        rows = [[way, *(x[name] for name in names)] for way, x in found['rows'].items()]
        title = (
            f'seconds of {found["turns"]} turns, {found["at_once"]} episodes at once; delays of '
            f'{found["delays_s"]:.0f} s in all, {found["longest_s"]:.1f} s in the longest episode'
        )
        columns = ['ours', 'Tunix', 'x as fast', 'at least', 'at most', 'CPU', 'Tunix', 'x']
        tables.append(common.table(title, ['worlds', *columns], rows))
    return '\n\n'.join(tables)


def run(
    *,
    parts: str,
    vocabs: str,
    batches: str,
    prompt: int,
    new: int,
    episodes: int,
    turns: int,
    turn_tokens: int,
    modes: str,
    late_episodes: int,
    at_once: int,
    repeats: int,
    **shape: int,
) -> dict[str, Any]:
    """All measurements, as the dictionary that is printed."""
    result: dict[str, Any] = {'shapes': {}}
    wanted, sizes = parts.split(','), [int(x) for x in vocabs.split(',')]
    lengths = dict(prompt=prompt, new=new, repeats=repeats)
    for vocab, batch in zip(sizes, map(int, batches.split(',')), strict=True):
        config = common.model_config(vocab, **shape)
        params, found = common.init_params(config), {}
        if 'decode' in wanted:
            found |= compare_decode(
                params, config, batch=batch, modes=tuple(modes.split(',')), **lengths
            )
        if 'update' in wanted:
            found['update'] = compare_update(params, config, batch=batch, **lengths)
        result['shapes'][str(vocab)] = found
    if 'turns' in wanted:
        result['turns'] = compare_turns(
            common.model_config(sizes[0], **shape),
            episodes=episodes,
            turns=turns,
            new=turn_tokens,
            repeats=repeats,
        )
    if 'worlds' in wanted:
        result['worlds'] = compare_worlds(
            episodes=late_episodes,
            at_once=at_once,
            turns=turns,
            new=turn_tokens,
            repeats=repeats,
            **shape,
        )
    return result


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0],
        parts='decode,update,turns,worlds',
        vocabs=f'{common.SMALL_VOCAB},{common.QWEN_VOCAB}',
        batches='16,8',
        prompt=64,
        new=64,
        episodes=16,
        turns=4,
        turn_tokens=16,
        modes='greedy,plain,nucleus',
        late_episodes=64,
        at_once=16,
        repeats=3,
    )
    common.pin(args.core)
    logging.set_verbosity(logging.ERROR)  # what Tunix says of logs, meshes and TPUs
    result = run(**{k: v for k, v in vars(args).items() if k not in ('json', 'core')})
    print(show(result))
    common.emit('tunix', result, args.json)


if __name__ == '__main__':
    main()
