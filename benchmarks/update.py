"""One GRPO-like optimiser step: update.update_step compared with torch, transformers and AdamW.

  python -m benchmarks.update [--vocab=151936 --batch=8] [--json=PATH]

Both sides have the same weights, tokens, advantages, clipping and AdamW, and alternate in one
process. `hf` computes the head for the answers only, and no metrics; `hf, same work` adds the
entropy that ours reports. "same gradient" is the relative difference of the gradient norms. In
`ours, once a prompt`, all rows of a micro-batch start with the same prompt, which batch.prefix_rows
computes once; its gradient is compared with the gradient of `ours` on the same rows.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.models import Model
from agentrl_jax.models.functions import model_functions
from agentrl_jax.rl import update
from agentrl_jax.rl.algorithm import KL, Clip
from agentrl_jax.rl.learning import BatchSettings, Optim, UpdateSettings
from agentrl_jax.types import Batch, TrainState
from benchmarks import common, limits

ONCE = 'ours, once a prompt'
LR, WEIGHT_DECAY, CLIP = 1e-5, 1e-4, 0.2
WIDTHS = 4  # of the rest of rows after a common prompt
OPTIM = Optim(lr=LR, weight_decay=WEIGHT_DECAY)


def make_batch(vocab: int, rows: int, prompt: int, new: int, alike: int = 1) -> Batch:
    """Random tokens; the last `new` of each row are trained, as if sampled uniformly.

    alike: number of adjacent rows with the same prompt.
    """
    rng = np.random.default_rng(0)
    shape = (rows, prompt + new)
    mask = np.broadcast_to(np.arange(prompt + new) >= prompt, shape)
    zeros, tokens = jnp.zeros(shape, jnp.float32), rng.integers(1, vocab, shape)
    tokens[:, :prompt] = np.repeat(tokens[::alike, :prompt], alike, axis=0)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        attention_mask=jnp.ones(shape, bool),
        mask=jnp.asarray(mask),
        value_mask=jnp.zeros(shape, bool),
        turn=jnp.zeros(shape, jnp.int32),
        old_logprobs=jnp.asarray(np.where(mask, -math.log(vocab), 0.0), jnp.float32),
        ref_logprobs=zeros,
        advantages=jnp.asarray(np.where(mask, rng.normal(size=(rows, 1)), 0.0), jnp.float32),
        returns=zeros,
        old_values=zeros,
    )


def optimiser() -> Any:
    """AdamW with clipping of the global norm."""
    return OPTIM.tx(LR)


def build_step(
    config: Model, *, new: int, microbatches: int, chunk: int, alike: int = 1
) -> Callable:
    """step(state, batch) -> (state, metrics); not jitted. new: maximum trained tokens per row."""
    fns = model_functions(config, None, has_critic=False, shares_backbone=False)
    widths = 1 if alike == 1 else WIDTHS

    def step(state, batch):
        rows = len(batch.tokens)
        settings = UpdateSettings(
            GRPO(clip=Clip(CLIP, CLIP), kl=KL()),
            batch=BatchSettings(
                rows, rows // microbatches, head_chunk=chunk, widths=widths, prefix_rows=alike
            ),
            optim=OPTIM,
            max_response=new,
        )
        return update.update_step(state, batch, fns=fns, settings=settings)

    return step


def first_state(params: Any, tx: Any) -> TrainState:
    """A training state with a copy of the parameters, without a critic."""
    params = jax.tree.map(jnp.copy, params)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=tx.init(params),
        critic_params=None,
        critic_opt_state=None,
        skipped=jnp.int32(0),
    )


def ours(params: Any, config: Model, batch: Batch, **sizes: int) -> Callable:
    """step() -> metrics of one update. The state stays on the device and is donated."""
    tx = optimiser()
    program = jax.jit(build_step(config, **sizes), donate_argnums=0)
    state = first_state(params, tx)

    def step():
        nonlocal state
        state, metrics = program(state, batch)
        return metrics

    return step


def hf(model: Any, batch: Batch, prompt: int, *, with_entropy: bool) -> Any:
    """step() -> gradient norm of the same update in torch."""
    torch = common.import_optional('torch')
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)

    def to_torch(x):
        return torch.tensor(np.asarray(x), device=model.device)

    tokens = to_torch(batch.tokens).long()
    new = tokens.shape[1] - prompt
    answer = tokens[:, prompt:]
    old, advantages = (to_torch(x)[:, prompt:] for x in (batch.old_logprobs, batch.advantages))

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
            logits_to_keep=new + 1,
        ).logits[:, :-1]
        normaliser = torch.logsumexp(logits, -1)
        logprobs = torch.gather(logits, -1, answer[..., None])[..., 0] - normaliser
        if with_entropy:
            with torch.no_grad():
                every = logits - normaliser[..., None]
                (-(every.exp() * every).sum(-1)).mean()
        ratio = torch.exp(torch.clamp(logprobs - old, -20, 20))
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        torch.maximum(-advantages * ratio, -advantages * clipped).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(norm)

    return step


def run(
    *,
    vocab: int,
    batch: int,
    prompt: int,
    new: int,
    microbatches: int,
    chunk: int,
    repeats: int,
    **shape: int,
) -> dict[str, Any]:
    """Return all measurements as a dictionary."""
    config = common.model_config(vocab, **shape)
    params = common.init_params(config)
    device_limits = limits.measure()
    rows, sizes = make_batch(vocab, batch, prompt, new), dict(new=new, chunk=chunk)
    sizes['microbatches'] = microbatches
    calls = {'ours': ours(params, config, rows, **sizes)}
    unit = batch // microbatches
    one_prompt = make_batch(vocab, batch, prompt, new, unit)
    uncached = ours(params, config, one_prompt, **sizes)
    calls[ONCE] = ours(params, config, one_prompt, alike=unit, **sizes)
    norms = float(calls[ONCE]()['policy/grad_norm']), float(uncached()['policy/grad_norm'])
    model = common.hf_model(params, config)
    calls['hf'] = hf(model, rows, prompt, with_entropy=False)
    first = float(calls['ours']()['policy/grad_norm']), calls['hf']()
    calls['hf, same work'] = hf(model, rows, prompt, with_entropy=True)
    times = common.medians(common.alternate(calls, repeats))
    work = limits.update(config, batch, prompt + new, new)
    return {
        'shape': dict(vocab=vocab, batch=batch, prompt=prompt, new=new, microbatches=microbatches),
        'seconds': times,
        'times_hf': times['hf'] / times['ours'],
        'times_hf_same_work': times['hf, same work'] / times['ours'],
        'times_once_a_prompt': times['ours'] / times[ONCE],
        'tokens_per_s': batch * (prompt + new) / times['ours'],
        'limit_s': device_limits.seconds(**work),
        'share_of_limit': device_limits.seconds(**work) / times['ours'],
        'gflops': work['flops'] / times['ours'] / 1e9,
        'matmul_gflops': device_limits.flops / 1e9,
        'gradient_difference': abs(first[0] / first[1] - 1.0),
        'gradient_difference_once_a_prompt': abs(norms[0] / norms[1] - 1.0),
    }


def show(result: dict[str, Any]) -> str:
    least = result['limit_s']
    rows = [
        [name, s, s / result['seconds']['ours'], least / s] for name, s in result['seconds'].items()
    ]
    columns = ['update', 'seconds', 'times ours', 'share of limit']
    return common.table(f'update {result["shape"]}', columns, rows)


if __name__ == '__main__':
    common.main(
        'update',
        __doc__,
        run,
        show,
        vocab=common.SMALL_VOCAB,
        batch=16,
        prompt=64,
        new=64,
        microbatches=4,
        chunk=1024,
        repeats=5,
    )
