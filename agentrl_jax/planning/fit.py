"""Will a run fit into the memory of the devices it is on: counted from shapes before it loads.

What is certain is counted exactly: parameters, moments, reference, the cache of a rollout, one tree
of gradients. Activations and logits are estimates (as in advice.py), so that a run is refused only
for what is certain, and warned where the estimate is close.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.machine import files, sharding
from agentrl_jax.planning import advice, programs
from agentrl_jax.run import parts
from agentrl_jax.run.config import Config, read
from agentrl_jax.run.usage import WrongUsage

CLOSE = 0.9  # share of the memory from which on a run is warned
MEMINFO = Path('/proc/meminfo')
CGROUPS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')
SHOWN, WORTH_SAYING = 4, 0.01  # settings that a sentence names, each for this share of the need
TREES = 4  # of the size of the gradients, in memory when the optimiser takes its step
PROCESS = 10**9  # bytes of interpreter, packages and compiled programs


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on one device. Exact: state, cache, gradients; the others are counted from shapes."""

    state: int  # parameters, moments, critic, reference, base or other models
    cache: int  # of the rollout with the most rows
    sampler: int  # copy of the parameters that plays, where it has another form
    gradients: int  # one tree, of the policy or the critic, whichever is larger
    activations: int  # and logits, of a micro-batch
    program: int  # the process itself

    @property
    def certain(self) -> int:
        """What must be in memory at some moment of a step."""
        return self.state + max(self.cache, self.gradients)

    @property
    def pieces(self) -> dict[str, int]:
        """What is in memory where it is tightest, by what it is: in a rollout or an update."""
        playing = {'cache': self.cache, 'copy that plays': self.sampler}
        # XLA's CPU compiler keeps four trees at the optimiser's step: 0.5B, cpu:1, as plan says
        trees = max(TREES * self.gradients, 2 * self.gradients + self.activations)
        known = {'gradients, updates and activations': trees}
        tightest = max((playing, known), key=lambda parts: sum(parts.values()))
        kept = {'parameters and optimiser': self.state, 'the program itself': self.program}
        return {name: size for name, size in (kept | tightest).items() if size}

    @property
    def likely(self) -> int:
        return sum(self.pieces.values())

    @property
    def tightest(self) -> str:
        """The program that needs most: a name of plan's."""
        return 'collect' if 'cache' in self.pieces else 'learn'


def of_device(device: jax.Device) -> int | None:
    """Bytes that the programs of a run may use on a device; None if that is unknown.

    The devices of a CPU share the memory of the machine, or of the container, and its swap.
    """
    if device.platform != 'cpu':
        known = device.memory_stats() or {}
        return known['bytes_limit'] if 'bytes_limit' in known else None
    if not MEMINFO.is_file():  # not Linux
        return None
    fields = (line.split() for line in files.read_text(MEMINFO).splitlines())
    sizes = {line[0]: int(line[1]) * 1024 for line in fields if len(line) == 3}
    whole = sizes['MemTotal:'] + sizes['SwapTotal:']
    for path in map(Path, CGROUPS):
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            whole = min(whole, int(limit))
    return whole // jax.local_device_count()


def estimate(shapes: programs.Shapes) -> Estimate:
    """Of the shapes of a run; its programs are not looked at."""
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    state, frozen = shapes.state, shapes.frozen
    playing = jnp.dtype(cfg.rollout.sampler_dtype or config.dtype)
    rules = sharding.rollout_rules(
        mesh, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
    )
    # In float32 and laid out alike it is the policy itself, but for transposed kernels
    alike = mesh.shape['fsdp'] == 1 and rules == sharding.ROLLOUT_RULES
    same = playing == jnp.float32 and alike and not parts.transposes(config, mesh)
    played = [
        sharding.with_layout(x, sharding.specs(x, rules, mesh))
        for x in (state.params, frozen.model)
    ]
    policy, critic = (programs.device_bytes(x) for x in (state.params, state.critic_params))
    # And their gradient, and those of other models
    logits = (2 + cfg.algorithm.other_models) * advice.logit_bytes(cfg, config, mesh)
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    return Estimate(
        state=programs.device_bytes((state, frozen)),
        cache=advice.cache_bytes(cfg, config, mesh, rows(cfg)) if not cfg.context.window else 0,
        sampler=0 if same else int(programs.device_bytes(played) * playing.itemsize / 4),
        gradients=max(policy, critic),
        activations=advice.activation_bytes(cfg, config, mesh) + logits,
        program=PROCESS // jax.local_device_count() if on_cpu else 0,
    )


def rows(cfg: Config) -> int:
    """Episodes played at once, of training or of validation."""
    most = max(cfg.rollout.episodes, cfg.env.eval_levels * cfg.eval.samples)
    return min(cfg.rollout.slots or most, most)


def verdict(cfg: Config, found: Estimate, memory: int, knobs: list[advice.Knob]) -> str:
    """A sentence for a run that will not fit, or may not; '' where it fits.

    knobs: what would save memory, the largest saving first.
    """
    pieces, need, verb = found.pieces, found.likely, 'may need about'
    if found.certain > memory:
        need, verb, pieces = found.certain, 'needs', {'parameters and optimiser': found.state}
        name = 'gradients' if found.gradients > found.cache else 'cache'
        pieces[name] = max(found.gradients, found.cache)
    if need <= CLOSE * memory:
        return ''
    names = {'cache': f'cache of {rows(cfg)} rows of rollout.max_tokens={cfg.rollout.max_tokens}'}
    listed = ', '.join(
        f'{size / 1e9:.1f} GB {names[name] if name in names else name}'
        for name, size in pieces.items()
    )
    knobs = [knob for knob in knobs if knob.saves >= WORTH_SAYING * need][:SHOWN]
    saving = [f'{knob.setting} ({knob.saves / 1e9:.1f} GB)' for knob in knobs]
    saving.insert(0 if found.tightest == 'collect' else len(saving), 'fewer rollout.max_tokens')
    return (
        f'this run {verb} {need / 1e9:.1f} GB on a device that has {memory / 1e9:.1f} GB: '
        f'{listed}; what saves memory: {", ".join(saving)}'
    )


def check(given: Any) -> None:
    """WrongUsage where a config cannot fit into this machine; a warning where it may not.

    given: the ConfigDict. Nothing is loaded or allocated.
    """
    cfg = read(given, None)
    mesh = parts.build_mesh(cfg)
    memory = of_device(mesh.local_devices[0])
    if memory is None:
        return
    config = programs.sizes_of(cfg)
    state, frozen = programs.state_of(cfg, config, mesh, parts.build_optimisers(cfg))
    shapes = programs.Shapes(cfg, config, mesh, state, frozen, (), ())
    found = estimate(shapes)
    sentence = verdict(cfg, found, memory, advice.knobs(shapes, found.tightest))
    if sentence and found.certain > memory:
        raise WrongUsage(sentence)
    if sentence and jax.process_index() == 0:
        print(f'WARNING: {sentence}', file=sys.stderr, flush=True)
