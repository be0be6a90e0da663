"""Arithmetic and memory traffic of a program on one device, counted in its jaxpr, and the roofline.

The compiler's own counts take the body of a loop once. Here bodies count as often as they run:
scans as long as they are, the two loops of a rollout as often as assumed. Of branches the most
expensive one counts, unless it is known how often each is taken.
- FLOPs are those of matrix products (2 m n k). Bytes are operands and results of these, what is
  gathered and scattered, and the carry of scans (parameters, moments, summed gradients) read and
  written once an iteration; everything elementwise is assumed to be fused into its neighbours.
- Work is assumed to be split evenly over devices, but every device reads all weights of a product
  (a share of them with 'tensor'). Transfers between devices are assumed to overlap with the rest.
- Each operation takes the longer of its FLOPs at peak and its bytes at full bandwidth; the sum of
  these is a lower bound in practice, not a prediction.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

PASSES = {  # results are the operand in another form or place, so weights stay weights
    'convert_element_type',
    'copy',
    'reshape',
    'transpose',
    'sharding_constraint',
    'squeeze',
    'broadcast_in_dim',
    'reduce_precision',
    'optimization_barrier',
    'copy_p',
    'stack',
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peaks of a device (None: no time), and what share of an array's work it has."""

    platform: str
    flops: float | None
    bandwidth: float | None
    trips: tuple[float, ...]  # iterations of nested while loops, outermost first
    data: int  # mesh axes
    fsdp: int
    tensor: int
    branches: tuple[Sequence[float], ...] = ()  # how often each is taken; nesting as in trips


@dataclasses.dataclass
class Cost:
    """Of one device."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, other: 'Cost', times: float = 1.0) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.seconds += times * other.seconds


def lowered_for(platform: str) -> str:
    """The name by which programs choose for a platform: of 'gpu' it is 'cuda'."""
    return 'cuda' if platform == 'gpu' else platform


def size(var: Any) -> float:
    """Bytes of a value of a jaxpr."""
    if not hasattr(var.aval, 'shape') or jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended):
        return 0.0
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def count(program: Any, weights: Sequence[bool], machine: Machine) -> Cost:
    """Cost of a closed jaxpr whose inputs marked in `weights` are parameters."""
    cost, _ = _Counter(machine, local=False, depth=0).body(program.jaxpr, weights)
    return cost


@dataclasses.dataclass(frozen=True)
class _Counter:
    machine: Machine
    local: bool  # inside shard_map: shapes are those of one shard
    depth: int  # while loops around
    forks: int = 0  # branches around of which it is known how often each is taken

    @property
    def share(self) -> float:
        m = self.machine
        return 1.0 / (m.tensor if self.local else m.data * m.fsdp * m.tensor)

    @property
    def kept(self) -> float:
        """Share of parameters, moments and gradients that a device keeps."""
        return 1.0 / (self.machine.tensor * (1 if self.local else self.machine.fsdp))

    def op(self, flops: float, traffic: float) -> Cost:
        m = self.machine
        times = [0.0]
        if m.flops is not None:
            times = [flops / m.flops, traffic / m.bandwidth]
        return Cost(flops, traffic, max(times))

    def body(self, jaxpr: Any, weights: Sequence[bool]) -> tuple[Cost, list[bool]]:
        """(cost, which outputs are weights)."""
        marks = dict(zip(jaxpr.invars, weights, strict=True))
        total = Cost()

        def is_weight(var):
            return not isinstance(var, core.Literal) and var in marks and marks[var]

        for eqn in jaxpr.eqns:
            cost, out = self.equation(eqn, [is_weight(v) for v in eqn.invars])
            total.add(cost)
            marks.update(zip(eqn.outvars, out, strict=True))
        return total, [is_weight(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, weights: list[bool]) -> tuple[Cost, list[bool]]:
        name, none = eqn.primitive.name, [False] * len(eqn.outvars)
        if name in PASSES:
            return Cost(), [all(weights)] * len(eqn.outvars)
        if name == 'dot_general':
            return self.product(eqn, weights), none
        if name in ('gather', 'dynamic_slice'):
            return self.op(0.0, 2 * self.share * size(eqn.outvars[0])), none
        if name.startswith('scatter') or name == 'dynamic_update_slice':
            update = eqn.invars[2] if name.startswith('scatter') else eqn.invars[1]
            return self.op(0.0, 2 * self.share * size(update)), none
        if name == 'scan':
            return self.scan(eqn, weights), none
        if name == 'while':
            return self.loop(eqn, weights), none
        if name == 'cond':
            return self.branch(eqn, weights), none
        if name == 'pallas_call':
            return self.kernel(eqn), none
        if name.startswith('dot_product_attention'):
            return self.attention(eqn), none
        return self.call(eqn, weights)

    def product(self, eqn: Any, weights: list[bool]) -> Cost:
        (contraction, _), _ = eqn.params['dimension_numbers']
        left = eqn.invars[0].aval.shape
        out = eqn.outvars[0]
        depth = math.prod(left[axis] for axis in contraction)
        flops = 2.0 * math.prod(out.aval.shape) * depth * self.share
        traffic = size(out) * self.share
        for var, weight in zip(eqn.invars, weights, strict=True):
            traffic += size(var) * (1.0 / self.machine.tensor if weight else self.share)
        return self.op(flops, traffic)

    def scan(self, eqn: Any, weights: list[bool]) -> Cost:
        jaxpr = eqn.params['jaxpr'].jaxpr
        inner, _ = self.body(jaxpr, weights)
        pairs = zip(eqn.outvars, jaxpr.outvars, strict=True)  # what is stacked has an axis more
        carry = sum(size(out) for out, own in pairs if out.aval.shape == own.aval.shape)
        inner.add(self.op(0.0, 2 * carry * self.kept))
        total = Cost()
        total.add(inner, eqn.params['length'])
        return total

    def loop(self, eqn: Any, weights: list[bool]) -> Cost:
        test = eqn.params['cond_nconsts']
        inside = dataclasses.replace(self, depth=self.depth + 1)
        inner, _ = inside.body(eqn.params['body_jaxpr'].jaxpr, weights[test:])
        trips = self.machine.trips
        total = Cost()
        total.add(inner, trips[self.depth] if self.depth < len(trips) and inner.flops else 1.0)
        return total

    def branch(self, eqn: Any, weights: list[bool]) -> Cost:
        """The branch of this platform where platforms differ, else those that are taken."""
        branches = eqn.params['branches']
        platforms = eqn.params.get('branches_platforms')
        if platforms is not None:
            matches = [names is None or self.machine.platform in names for names in platforms]
            branches = [branches[matches.index(True)]]
        known = self.machine.branches[self.forks : self.forks + 1]
        taken = known[0] if platforms is None and known and len(known[0]) == len(branches) else None
        inside = self if taken is None else dataclasses.replace(self, forks=self.forks + 1)
        costs = [inside.body(branch.jaxpr, weights[1:])[0] for branch in branches]
        if taken is None:
            return max(costs, key=lambda cost: (cost.seconds, cost.bytes, cost.flops))
        total = Cost()
        for cost, share in zip(costs, taken, strict=True):
            total.add(cost, share)
        return total

    def kernel(self, eqn: Any) -> Cost:
        """A Pallas kernel: the products of one block times its grid, operands and results once."""
        body, _ = self.body(eqn.params['jaxpr'], [False] * len(eqn.params['jaxpr'].invars))
        blocks = math.prod(eqn.params['grid_mapping'].grid)
        moved = sum(size(var) for var in (*eqn.invars, *eqn.outvars))
        return self.op(body.flops * blocks, moved * self.share)

    def attention(self, eqn: Any) -> Cost:
        """cuDNN's: two products forwards, five backwards, of all queries with all keys."""
        q, k = (var.aval.shape for var in eqn.invars[:2])
        products = 2 if 'fwd' in eqn.primitive.name else 5
        flops = 2.0 * products * math.prod(q) * k[1]
        moved = sum(size(var) for var in (*eqn.invars, *eqn.outvars))
        return self.op(flops * self.share, moved * self.share)

    def call(self, eqn: Any, weights: list[bool]) -> tuple[Cost, list[bool]]:
        """An equation around one jaxpr (jit, shard_map, remat, ...), or an elementwise one."""
        for name in ('jaxpr', 'call_jaxpr', 'fun_jaxpr'):
            if name in eqn.params:
                inner = eqn.params[name]
                inner = inner.jaxpr if hasattr(inner, 'jaxpr') else inner
                local = self.local or eqn.primitive.name == 'shard_map'
                counter = dataclasses.replace(self, local=local)
                # Constants of a closed jaxpr are no parameters of the model.
                return counter.body(inner, weights[: len(inner.invars)])
        return Cost(), [False] * len(eqn.outvars)


def trips(cfg: Any, shards: int, answer_tokens: int) -> tuple[float, float]:
    """(serves, decodes between two of them) of a rollout in which every episode has all its turns.

    Slots of a shard decode together: rounds of episodes x turns x tokens of an answer.
    """
    episodes = cfg.rollout.num_groups * cfg.rollout.group_size / shards
    slots = min(cfg.rollout.slots / shards or episodes, episodes)
    rows = min(cfg.rollout.serve_rows, slots)
    serves = math.ceil((episodes * cfg.env.max_turns + slots) / rows)
    decodes = math.ceil(episodes / slots) * cfg.env.max_turns * answer_tokens
    return float(serves), decodes / serves
