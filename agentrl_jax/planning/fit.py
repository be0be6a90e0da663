"""Check that a run fits into device memory, from shapes alone, before anything is loaded.

Parameters, moments, the reference, the rollout cache and one tree of gradients are counted
exactly. Activations and logits are estimated, as in advice.py. A run is rejected only if the exact
part does not fit; if the full estimate is close, it gets a warning.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.machine import files, sharding
from agentrl_jax.planning import advice, programs
from agentrl_jax.run import parts
from agentrl_jax.run.config import Config, read
from agentrl_jax.run.usage import WrongUsage

CLOSE = 0.9  # a run that needs more than this share of the memory gets a warning
MEMINFO = Path('/proc/meminfo')
CGROUPS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')
SHOWN, WORTH_SAYING = 4, 0.01  # a message lists up to 4 settings, each saving at least 1 %
TREES = 4  # trees of gradient size in memory during the optimiser step
PROCESS = 10**9  # bytes for the interpreter, packages and compiled programs


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on one device. State, cache and gradients are exact; the rest is estimated."""

    state: int  # parameters, moments, critic, reference, base or other models
    cache: int  # of the rollout with the most rows
    sampler: int  # the rollout's copy of the parameters; 0 if it uses the parameters themselves
    gradients: int  # one tree: the larger of policy and critic
    activations: int  # activations and logits of a micro-batch
    program: int  # interpreter, packages and compiled programs

    @property
    def certain(self) -> int:
        """Bytes that a step is certain to need at one time."""
        return self.state + max(self.cache, self.gradients)

    @property
    def pieces(self) -> dict[str, int]:
        """Peak memory by component, of the rollout or the update, whichever needs more."""
        playing = {'cache': self.cache, 'copy that plays': self.sampler}
        # On the CPU, XLA keeps four trees during the optimiser step (measured by plan: 0.5B, cpu:1)
        trees = max(TREES * self.gradients, 2 * self.gradients + self.activations)
        known = {'gradients, updates and activations': trees}
        tightest = max((playing, known), key=lambda parts: sum(parts.values()))
        resident = {'parameters and optimiser': self.state, 'the program itself': self.program}
        return {name: size for name, size in (resident | tightest).items() if size}

    @property
    def likely(self) -> int:
        return sum(self.pieces.values())

    @property
    def tightest(self) -> str:
        """The program with the highest peak, by its name in plan: 'collect' or 'learn'."""
        return 'collect' if 'cache' in self.pieces else 'learn'


def of_device(device: jax.Device) -> int | None:
    """Return the bytes that a run may use on a device; None if unknown.

    CPU devices share the memory and swap of the machine or container equally.
    """
    if device.platform != 'cpu':
        known = device.memory_stats() or {}
        return known['bytes_limit'] if 'bytes_limit' in known else None
    if not MEMINFO.is_file():  # not Linux
        return None
    fields = (line.split() for line in files.read_text(MEMINFO).splitlines())
    sizes = {line[0]: int(line[1]) * 1024 for line in fields if len(line) == 3}
    total = sizes['MemTotal:'] + sizes['SwapTotal:']
    for path in map(Path, CGROUPS):
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total // jax.local_device_count()


def estimate(shapes: programs.Shapes) -> Estimate:
    """Estimate memory from the shapes of a run, without compiling its programs."""
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    state, frozen = shapes.state, shapes.frozen
    playing = jnp.dtype(cfg.rollout.sampler_dtype or config.dtype)
    rules = sharding.rollout_rules(
        mesh, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
    )
    # The rollout plays the policy itself if it is float32 with the same layout and kernels
    same_layout = mesh.shape['fsdp'] == 1 and rules == sharding.ROLLOUT_RULES
    same = (
        playing == jnp.float32 and same_layout and not parts.uses_transposed_kernels(config, mesh)
    )
    rollout_params = [
        sharding.with_layout(x, sharding.specs(x, rules, mesh))
        for x in (state.params, frozen.model)
    ]
    policy, critic = (programs.device_bytes(x) for x in (state.params, state.critic_params))
    # Logits, their gradient, and the logits of other models
    logits = (2 + cfg.algorithm.other_models) * advice.logit_bytes(cfg, config, mesh)
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    return Estimate(
        state=programs.device_bytes((state, frozen)),
        cache=advice.cache_bytes(cfg, config, mesh, rows(cfg)) if not cfg.context.window else 0,
        sampler=0 if same else int(programs.device_bytes(rollout_params) * playing.itemsize / 4),
        gradients=max(policy, critic),
        activations=advice.activation_bytes(cfg, config, mesh) + logits,
        program=PROCESS // jax.local_device_count() if on_cpu else 0,
    )


def rows(cfg: Config) -> int:
    """Return the number of concurrent episodes in training or validation, whichever is larger."""
    episodes = max(cfg.rollout.episodes, cfg.env.eval_levels * cfg.eval.samples)
    return min(cfg.rollout.slots or episodes, episodes)


def verdict(cfg: Config, found: Estimate, memory: int, knobs: list[advice.Knob]) -> str:
    """Return a message for a run that does not or may not fit; '' if it fits.

    knobs: changes that save memory, the largest saving first.
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
        f'{listed}. To save memory: {", ".join(saving)}'
    )


def check(given: Any) -> None:
    """Raise WrongUsage if a config cannot fit on this machine; warn if it may not.

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
    need = estimate(shapes)
    sentence = verdict(cfg, need, memory, advice.knobs(shapes, need.tightest))
    if sentence and need.certain > memory:
        raise WrongUsage(sentence)
    if sentence and jax.process_index() == 0:
        files.warn(sentence)
