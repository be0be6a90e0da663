"""Compare decoding, updates and turns with Tunix 0.1.7, with the same weights and tokens.

  make bench-tunix                  in a separate environment (requirements/tunix.txt)
  python -m benchmarks.peers.tunix [--parts=decode,update,turns] [--json=PATH]

Both sides alternate in one process on one core; everything is compiled beforehand. Ratios are
medians over the pairs, with their range.
1. decode, update: the shapes of benchmarks.decode and benchmarks.update, with both vocabularies.
   Compares Tunix's Sampler with ours, and its GRPO loss (one jitted step with our optimiser) with
   our update. same_tokens: share of greedy tokens that are the same on both sides.
2. turns: 16 episodes in groups of 4, 4 turns of 16 sampled tokens. Ours plays FrozenLake on the
   device. Tunix replays the same observations, so its environments cost nothing. Our rollout is
   compared with its agentic learner's rollout (one episode at a time and all at once) and with its
   Sampler (all episodes in one call), and our rollout and update with a full step of the learner.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.models import Model
from agentrl_jax.rollout import device as rollouts
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.text import answer as answers
from agentrl_jax.types import Rollout, Scores
from benchmarks import common, decode, rollout, update

INSTALL = 'it with `make bench-tunix`, or requirements.txt and requirements/tunix.txt (--no-deps)'
GROUP = 4  # episodes of a group
MICROBATCHES, CHUNK = 4, 1024
WARM = 2  # warm-up rounds; Tunix's sampler also compiles in its second call


def load_peer() -> Any:
    common.import_optional('tunix', INSTALL)
    return common.import_optional('benchmarks.peers.tunix_peer', INSTALL)


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
    """Part 1, sampling: one dictionary per mode."""
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
    rollout: Rollout  # result of collect, on the host


def build_ours(config: Model, *, episodes: int, turns: int, new: int) -> Ours:
    task, tokenizer, vocab = rollout.build_task(turns)
    if config.vocab_size < vocab:
        raise ValueError(f'the vocabulary must have at least the {vocab} tokens of the prompts')
    # Tokens outside of the tokenizer are empty strings, and no token ends a turn.
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
        settings=RolloutSettings(
            Player(config),
            slots=episodes,
            serve_rows=episodes,
            max_response=new,
            max_tokens=task.prefix.shape[0] + turns * (task.width + new),
        ),
    )
    optimise = update.build_step(config, new=turns * new, microbatches=MICROBATCHES, chunk=CHUNK)

    def step(state):
        collected, _ = collect(state.params)
        zeros = jnp.zeros_like(collected.logprobs)
        scores = Scores(old_logprobs=collected.logprobs, ref_logprobs=zeros, values=zeros)
        return optimise(state, GRPO().make_batch(collected, scores, group_size=GROUP))

    params = common.init_params(config)
    out, _ = jax.device_get(jax.jit(collect)(params))
    if not (out.num_turns == turns).all():
        raise RuntimeError('an episode ended early, so Tunix cannot play the same episodes')
    return Ours(params=params, step=step, collect=collect, rollout=out)


def observations(played: Rollout) -> list[list[list[int]]]:
    """Tokens that the policy has read, by episode and turn."""
    is_prompt = played.attention_mask & ~played.action_mask
    return [
        [row.tolist() for row in (tokens[mask & (turn == k)] for k in range(turn.max() + 1))]
        for tokens, mask, turn in zip(played.tokens, is_prompt, played.turn, strict=True)
    ]


def build_script(peer: Any, played: Rollout, new: int) -> Any:
    """tunix_peer.Script of a rollout."""
    prompts, length = observations(played), played.attention_mask.sum(1)
    texts = [[' '.join(map(str, turn)) for turn in episode] for episode in prompts]
    if any(0 in turn for episode in prompts for turn in episode):
        raise RuntimeError('token 0 is in a prompt, but Tunix treats it as padding')
    first = np.array([len(episode[0]) for episode in prompts])
    return peer.Script(
        turns=texts,
        group_size=GROUP,
        new=new,
        longest=int(length.max() - new),
        response=int((length - first).max()) + 1,  # without + 1, it would drop the last turn
    )


def compare_turns(
    config: Model, *, episodes: int, turns: int, new: int, repeats: int
) -> dict[str, Any]:
    """Part 2: turns per second of each variant, and both sides' tokens after the first prompts."""
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
    trajectories = peer.collect(learners[f'rollout, {episodes} at once'], script)
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
        'tunix_tokens': sum(len(x['conversation_tokens']) for x in trajectories),
        'different': len({tuple(x['conversation_tokens']) for x in trajectories}),
        'rows': rows,
    }


def compare_steps(peer: Any, ours: Ours, learner: Any, script: Any, repeats: int) -> dict[str, Any]:
    """Full steps: rollout, advantages, and an update with all episodes.

    Ours runs whenever Tunix's training loop requests its next batch.
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
        turns = result['turns']
        names = ['turns_per_s', 'other_turns_per_s', *names[2:]]
        rows = [[way, *(x[name] for name in names)] for way, x in turns['rows'].items()]
        title = f'turns/s, {turns["turns"]} turns, {turns["tokens"]:,} tokens after first prompts'
        tables.append(common.table(title, ['Tunix by', *columns], rows))
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
    repeats: int,
    **shape: int,
) -> dict[str, Any]:
    """Return all measurements as a dictionary."""
    result: dict[str, Any] = {'shapes': {}}
    selected, sizes = parts.split(','), [int(x) for x in vocabs.split(',')]
    lengths = dict(prompt=prompt, new=new, repeats=repeats)
    for vocab, batch in zip(sizes, map(int, batches.split(',')), strict=True):
        config = common.model_config(vocab, **shape)
        params, shape_result = common.init_params(config), {}
        if 'decode' in selected:
            shape_result |= compare_decode(
                params, config, batch=batch, modes=tuple(modes.split(',')), **lengths
            )
        if 'update' in selected:
            shape_result['update'] = compare_update(params, config, batch=batch, **lengths)
        result['shapes'][str(vocab)] = shape_result
    if 'turns' in selected:
        result['turns'] = compare_turns(
            common.model_config(sizes[0], **shape),
            episodes=episodes,
            turns=turns,
            new=turn_tokens,
            repeats=repeats,
        )
    return result


if __name__ == '__main__':
    logging.set_verbosity(logging.ERROR)  # hides Tunix's messages about logs, meshes and TPUs
    common.main(
        'tunix',
        __doc__,
        run,
        show,
        parts='decode,update,turns',
        vocabs=f'{common.SMALL_VOCAB},{common.QWEN_VOCAB}',
        batches='16,8',
        prompt=64,
        new=64,
        episodes=16,
        turns=4,
        turn_tokens=16,
        modes='greedy,plain,nucleus',
        repeats=3,
    )
