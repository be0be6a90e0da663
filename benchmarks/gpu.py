"""Qwen2.5 on a GPU in nine minutes: decoding, rollouts, updates, memory and a profile.

  python -m benchmarks.gpu --out=DIR [--minutes=9] [--tokenizer=FOLDER]
  python -m benchmarks.gpu --out=DIR --rehearse          the same on a CPU, with tiny sizes
  python -m benchmarks.gpu --out=DIR --topology=h100:1   compiles for a GPU that is not there

Weights are random, so every answer uses all of its tokens. Each figure is appended to
DIR/figures.jsonl as soon as it is known, so the process may be killed at any time. No part starts
after --minutes. A part that fails runs again with plain attention, then with eight layers; the
figures name both. The table at the end adds the published seconds of comparable steps.

planning.programs builds the same programs as a run. Each is compiled once, and the programs of a
part compile at the same time. --tokenizer is a folder with Qwen2.5's tokenizer. Without it the
bundled tokenizer splits the prompts; the model has Qwen2.5's vocabulary in both cases.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from agentrl_jax.planning import hardware

if __name__ == '__main__':
    hardware.prepare(sys.argv)  # before other imports, which start the backend

import jax.numpy as jnp

from agentrl_jax.machine import sharding
from agentrl_jax.models import Model
from agentrl_jax.planning import fit
from agentrl_jax.planning import programs as plan_programs
from agentrl_jax.records import about
from agentrl_jax.rollout import sampling
from agentrl_jax.run import loading, parts
from agentrl_jax.run.state import make_state
from agentrl_jax.run.streams import draw_episodes
from agentrl_jax.types import FrozenParams
from benchmarks import common, limits
from configs import frozen_lake

GB = 1e9
PUBLISHED = [
    ['RAGEN, 0.5B, PPO, Sokoban, one A100 or H100 (arXiv:2504.20073, Fig 7)', '68.7 s a step'],
    ['RAGEN, the same with a quarter of the groups and updates', '23.5 s a step'],
    ['Tunix, Qwen3-0.6B, GRPO, 2,048 sequences, TPU7x (its PR 2231)', '4.7 s to copy weights'],
    ['verl, Qwen3.5-9B, GRPO, 8 x H800 (its issue 7203)', '290 s a step'],
]
FALLBACKS = ({}, {'attention': 'plain'}, {'attention': 'plain', 'layers': 8})


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Models, rows and config of the measurements."""

    model: str  # of models.sizes; '' = the sizes of the config
    larger: str  # the model with LoRA
    rows: tuple[int, ...]  # of decoding
    prompt: int  # tokens
    new: int  # decoded tokens
    config: dict[str, Any]
    lora_rank: int = 64
    repeats: int = 3


FULL = Sizes(
    'Qwen2.5-0.5B',
    'Qwen2.5-1.5B',
    rows=(64, 16, 128, 256),
    prompt=512,
    new=64,
    config={'env.max_turns': 5, 'rollout.max_response': 100, 'rollout.serve_rows': 32},
)
TINY = Sizes(
    '',
    '',
    rows=(4, 2),
    prompt=16,
    new=64,
    config={
        'env.prompt': 'brief',
        'env.max_turns': 2,
        'env.train_levels': 16,
        'model.hidden_size': 64,
        'model.num_layers': 2,
        'rollout.num_groups': 4,
        'rollout.group_size': 4,
        'rollout.max_response': 8,
        'batch.minibatch_rows': 4,
        'batch.microbatch_rows': 4,
    },
    lora_rank=4,
)
STARPO_S = {}  # configs/frozen_lake.py: two of eight groups train
PPO = {'filter.keep': 1.0, 'loss.clip_high': 0.2, 'loss.kl_coef': 0.001, 'loss.kl_in': 'reward'}


class Session:
    """One measuring: sizes, the time that is left, and the file of figures."""

    def __init__(self, args: argparse.Namespace):
        self.sizes = TINY if args.rehearse else FULL
        self.tokenizer, self.topology = args.tokenizer, args.topology
        self.out = pathlib.Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + 60 * args.minutes
        where = hardware.find(args.topology) if args.topology else None
        self.devices = where.devices if where else jax.devices()[:1]
        self.figures: list[dict[str, Any]] = []
        self.limits: limits.Limits | None = None  # None if nothing runs here
        self.step: Callable[[], Any] | None = None  # a step of the first measured config

    def tell(self, part: str, **figures: Any) -> None:
        """Append a line to the file of figures."""
        left = round(self.deadline - time.monotonic())
        line = {'part': part, **figures, 'seconds_left': left}
        self.figures.append(line)
        with open(self.out / 'figures.jsonl', 'a', encoding='utf-8') as file:
            file.write(json.dumps(line) + '\n')
        common.note(json.dumps(line))

    def config(self, changes: dict[str, Any]) -> Any:
        """RAGEN's config with these fields changed; rows are as long as their episodes can be."""
        cfg = frozen_lake.get_config()
        cfg.batch.widths = 1  # of rows that are all full
        if self.tokenizer:
            cfg.model.tokenizer = self.tokenizer
        for name, value in (self.sizes.config | changes).items():
            section, _, field = name.partition('.')
            cfg[section][field] = value
        known = plan_programs.settings.read(cfg, None)
        task = parts.build_text_task(known, loading.build_tokenizer(known), 'train', None)
        turns = cfg.env.max_turns * (task.width + cfg.rollout.max_response)
        cfg.rollout.max_tokens = -(-(task.prefix.shape[0] + turns) // 64) * 64
        return cfg


@dataclasses.dataclass
class Program:
    """A compiled program."""

    call: Any
    seconds: float  # of tracing and compiling
    memory: int  # bytes in use while it runs


def compile_all(
    session: Session, functions: dict[Any, tuple[Callable, tuple]], **facts: Any
) -> dict[Any, Program]:
    """Compile {name: (jitted function, abstract arguments)}, all at the same time."""

    def one(function, arguments):
        start = time.monotonic()
        compiled = function.trace(*arguments).lower().compile()
        used = compiled.memory_analysis()
        new = used.output_size_in_bytes - used.alias_size_in_bytes + used.temp_size_in_bytes
        seconds = time.monotonic() - start
        return Program(compiled, seconds, used.argument_size_in_bytes + new)

    start = time.process_time()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(one, *each) for name, each in functions.items()}
        programs = {name: job.result() for name, job in jobs.items()}
    seconds = {str(name): x.seconds for name, x in programs.items()}
    memory = {str(name): x.memory / GB for name, x in programs.items()}
    cpu = time.process_time() - start
    session.tell('compile', **facts, cpu_s=cpu, seconds=seconds, memory_gb=memory)
    return programs


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median of `repeats` calls after a first one."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def device_and_limits(session: Session) -> None:
    """Which device, and its copy bandwidth and matmul rate in bfloat16."""
    kind = session.devices[0].device_kind
    session.tell('device', commit=about.commit(), jax=jax.__version__, device=kind)
    if not session.topology:
        session.limits = limits.measure('bfloat16')
        session.tell(
            'limits',
            bandwidth_gb_s=session.limits.bandwidth / GB,
            matmul_tflop_s=session.limits.flops / 1e12,
        )


def generate(
    params: Any, prompt: jax.Array, key: jax.Array, new: jax.Array, *, config: Model, room: int
) -> jax.Array:
    """Read prompt int32 [B, P], then sample `new` tokens per row, at most `room`: int32 [B]."""
    rows, length = prompt.shape
    cache = config.init_cache(rows, length + room)
    positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)
    hidden, cache = config.forward_cached(params, prompt, positions, cache, None, kv_length=length)

    def step(t, carry):
        hidden, cache, _ = carry
        uniform = jax.random.uniform(jax.random.fold_in(key, t), (rows,))
        token, _ = sampling.sample(config.logits(params, hidden), uniform, temperature=1.0)
        position = jnp.full((rows, 1), length + t)
        hidden, cache = config.forward_cached(params, token[:, None], position, cache, None)
        return hidden[:, 0], cache, token

    start = hidden[:, -1], cache, jnp.zeros(rows, jnp.int32)
    return jax.lax.fori_loop(0, new, step, start)[2]


def decoding(session: Session, changes: dict[str, Any]) -> None:
    """Tokens per second of decoding and of reading a prompt, with the limits of the device."""
    sizes = session.sizes
    layers = changes['layers'] if 'layers' in changes else 0
    shapes = plan_programs.shapes(session.config({}), session.devices, sizes.model, layers)
    config = shapes.config
    layout = jax.sharding.NamedSharding(shapes.mesh, jax.sharding.PartitionSpec())
    place = functools.partial(sharding.with_layout, layout=layout)
    params = jax.eval_shape(lambda key: cast(config.init(key), config), jax.random.key(0))
    key, count = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(functools.partial(generate, config=config, room=sizes.new))
    calls = {}
    for rows in sizes.rows:
        prompt = jax.ShapeDtypeStruct((rows, sizes.prompt), jnp.int32)
        calls[rows] = program, place((params, prompt, key, count))
    programs = compile_all(session, calls, config='decoding', **changes)
    if session.limits is None:
        return
    params = jax.jit(lambda key: cast(config.init(key), config))(jax.random.key(0))
    for rows, one in programs.items():
        prompt = jnp.ones((rows, sizes.prompt), jnp.int32)

        def play(new, run=one.call, prompt=prompt):
            return run(params, prompt, jax.random.key(0), jnp.int32(new))

        seconds = [
            median_seconds(functools.partial(play, new), sizes.repeats) for new in (0, sizes.new)
        ]
        step, width = (seconds[1] - seconds[0]) / sizes.new, jnp.dtype(config.dtype).itemsize
        context = sizes.prompt + sizes.new / 2
        least = session.limits.seconds(**limits.decode_step(config, rows, context, width))
        block = limits.prefill(config, rows, sizes.prompt, itemsize=width)
        session.tell(
            'decoding',
            rows=rows,
            tokens_per_s=rows / step,
            share_of_limit=least / step,
            prefill_tokens_per_s=rows * sizes.prompt / seconds[0],
            prefill_share=session.limits.seconds(**block) / seconds[0],
            **changes,
        )


def cast(params: Any, config: Model) -> Any:
    return jax.tree.map(lambda x: x.astype(config.dtype), params)


def training_step(
    session: Session,
    changes: dict[str, Any],
    *,
    name: str,
    fields: dict[str, Any],
    model: str,
) -> None:
    """Rollout and update of one config: compile, time and measure them."""
    attention = {'model.attention': changes['attention']} if 'attention' in changes else {}
    layers = changes['layers'] if 'layers' in changes else 0
    cfg = session.config(fields | attention)
    shapes = plan_programs.shapes(cfg, session.devices, model, layers)
    programs_of = {'rollout': shapes.collect, 'update': shapes.learn}
    programs = compile_all(session, programs_of, config=name, **changes)
    if session.limits is None:
        return
    collect, learn = (programs[part].call for part in ('rollout', 'update'))
    cfg, config = shapes.cfg, shapes.config
    task = parts.build_text_task(cfg, loading.build_tokenizer(cfg), 'train', shapes.mesh)
    draw = functools.partial(
        draw_episodes,
        levels=task.env.num_levels(task.env_params),
        groups=cfg.rollout.num_groups,
        group_size=cfg.rollout.group_size,
    )
    draw = jax.jit(draw, out_shardings=sharding.shard_rows(shapes.mesh))
    params = sharding.init_sharded(
        config.init, jax.random.key(0), sharding.TRAIN_RULES, shapes.mesh
    )
    make = functools.partial(
        make_state, cfg=cfg, config=config, optimizers=parts.build_optimisers(cfg)
    )
    state = jax.jit(make)(params)
    reference = jax.tree.map(jnp.copy, state.params) if cfg.algorithm.uses_reference else None
    frozen = FrozenParams(params if cfg.lora.rank else {}, reference, {})

    def play(step):
        policy = plan_programs.policy_of(state.actor, frozen.model)
        return collect(policy, task, draw(jax.random.key(1), step), jax.random.key(step))

    def train(rollout):
        nonlocal state
        shuffle = jax.random.key(2) if cfg.batch.shuffle else None
        state, measured, rows, _ = learn(state, frozen, rollout, shuffle, None)
        return measured, rows

    rollout, _ = play(0)
    repeats = session.sizes.repeats
    seconds = median_seconds(lambda: play(0), repeats)
    tokens = int(rollout.attention_mask.sum())
    sampled = int(rollout.action_mask.sum())
    width = jnp.dtype(cfg.model.dtype).itemsize
    work = limits.rollout(config, len(rollout.tokens), tokens, sampled, width)
    session.tell(
        'rollout',
        config=name,
        seconds=seconds,
        episodes=len(rollout.tokens),
        tokens=tokens,
        sampled=sampled,
        tokens_per_s=tokens / seconds,
        share_of_limit=session.limits.seconds(**work) / seconds,
        **changes,
    )
    measured, rows = train(rollout)
    gap, trained = float(measured['sampler/logprob_gap']), len(rows)
    seconds = median_seconds(lambda: train(rollout), repeats)
    length, answer = round(tokens / len(rollout.tokens)), round(sampled / len(rollout.tokens))
    work = limits.update(config, trained, length, answer)
    passes = 2 + 1 / 3  # policy, critic, and the critic's values before the update
    session.tell(
        'update',
        config=name,
        seconds=seconds,
        rows=trained,
        tokens_per_s=trained * length / seconds,
        share_of_limit=passes * session.limits.seconds(**work) / seconds,
        logprob_gap=gap,
        **changes,
    )
    stats = session.devices[0].memory_stats()
    session.tell(
        'memory',
        config=name,
        peak_gb=stats['peak_bytes_in_use'] / GB if stats else float('nan'),
        estimated_gb=fit.estimate(shapes).likely / GB,
        **changes,
    )
    if session.step is None:  # only this state stays in memory
        session.step = lambda: jax.block_until_ready(train(play(0)[0]))


def profile(session: Session, _) -> None:
    """Trace a step of the first config."""
    if session.step is not None:
        with jax.profiler.trace(str(session.out / 'profile')):
            session.step()
        session.tell('profile', folder='profile')


def sections(sizes: Sizes) -> Iterator[tuple[str, Callable]]:
    """The parts, in the order in which their figures matter."""
    step = functools.partial
    yield 'decoding', decoding
    yield 'StarPO-S', step(training_step, name='StarPO-S', fields=STARPO_S, model=sizes.model)
    yield 'PPO', step(training_step, name='PPO', fields=PPO, model=sizes.model)
    name = f'{sizes.larger or "tiny"} with LoRA'
    fields = {'lora.rank': sizes.lora_rank, 'optim.lr': 1e-5}
    yield name, step(training_step, name=name, fields=fields, model=sizes.larger)
    yield 'profile', profile


def run(session: Session) -> None:
    """Measure part after part while there is time."""
    device_and_limits(session)
    for name, part in sections(session.sizes):
        for changes in FALLBACKS:
            if time.monotonic() > session.deadline:
                session.tell('stopped', before=name)
                return
            try:
                part(session, changes)
                break
            except (RuntimeError, NotImplementedError, ValueError) as error:  # also out of memory
                session.tell('failed', what=name, error=str(error)[:2000], **changes)


def show(figures: list[dict[str, Any]]) -> str:
    """The table of all figures."""
    rows = []
    for line in figures:
        what = [str(line[name]) for name in ('config', 'rows', 'what') if name in line]
        values = [
            f'{name} {value:.4g}' if isinstance(value, float) else f'{name} {value}'
            for name, value in line.items()
            if name not in ('part', 'config', 'rows', 'what', 'seconds_left')
        ]
        rows.append([line['part'], ', '.join(what), '; '.join(values)])
    rows += [['published', who, seconds] for who, seconds in PUBLISHED]
    return common.table('', ['part', 'of', 'figures'], rows)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', required=True, help='folder of the figures')
    parser.add_argument('--minutes', type=float, default=9.0, help='no part starts later')
    parser.add_argument('--tokenizer', default='', help="folder of Qwen2.5's tokenizer")
    parser.add_argument('--rehearse', action='store_true', help='tiny sizes')
    parser.add_argument('--topology', default='', help='only compile, for this machine: h100:1')
    return parser.parse_args(words)


def main() -> None:
    session = Session(arguments())
    run(session)
    print(show(session.figures))
    sys.exit(any(line['part'] == 'failed' for line in session.figures))


if __name__ == '__main__':
    main()
