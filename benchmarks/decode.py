"""Reading prompts and sampling answers of one turn, compared with HuggingFace `generate`.

  python -m benchmarks.decode [--vocab=151936 --batch=8] [--json=PATH]

Both sides have the same random weights, prompts and lengths, and alternate in one process. Ours is
one program: a block forward pass into the cache, then a loop of sampling.sample and
Model.forward_cached, as in rollout.collect. "same tokens" is the share of greedy tokens that are
the same on both sides.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models import Model
from agentrl_jax.rollout import sampling
from benchmarks import common, limits

MODES = {
    'greedy': dict(temperature=0.0),
    'plain': dict(temperature=1.0),
    'nucleus': dict(temperature=1.0, top_p=0.95),
}


def generate(
    params: Any,
    prompt: jax.Array,
    key: jax.Array,
    *,
    config: Model,
    new: int,
    temperature: float,
    top_p: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Sample tokens int32 [B, new] after prompt int32 [B, P]; return them and their logprobs."""
    rows, length = prompt.shape
    cache = config.init_cache(rows, length + new)
    positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)
    hidden, cache = config.forward_cached(params, prompt, positions, cache, None, kv_length=length)

    def sample(t, hidden):
        logits = config.logits(params, hidden)
        uniform = jax.random.uniform(jax.random.fold_in(key, t), (rows,))
        return sampling.sample(logits, uniform, temperature=temperature, top_p=top_p)

    def step(t, carry):
        hidden, cache, tokens, logprobs = carry
        token, logprob = sample(t, hidden)
        position = jnp.full((rows, 1), length + t)
        hidden, cache = config.forward_cached(params, token[:, None], position, cache, None)
        return hidden[:, 0], cache, tokens.at[:, t].set(token), logprobs.at[:, t].set(logprob)

    start = (
        hidden[:, -1],
        cache,
        jnp.zeros((rows, new), jnp.int32),
        jnp.zeros((rows, new), jnp.float32),
    )
    hidden, _, tokens, logprobs = jax.lax.fori_loop(0, new - 1, step, start)
    token, logprob = sample(new - 1, hidden)  # no forward pass after the last token
    return tokens.at[:, -1].set(token), logprobs.at[:, -1].set(logprob)


def hf_generate(model: Any, prompt: np.ndarray, new: int, mode: dict[str, float]) -> np.ndarray:
    """The same with transformers; [B, new]."""
    torch = common.import_optional('torch')
    ids = torch.tensor(prompt, dtype=torch.long, device=model.device)
    sampled = dict(do_sample=False)
    if mode['temperature'] > 0:
        top_p = mode['top_p'] if 'top_p' in mode else 1.0
        sampled = dict(do_sample=True, temperature=mode['temperature'], top_k=0, top_p=top_p)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=True,
            **sampled,
        )
    return out[:, ids.shape[1] :].cpu().numpy()


def run(
    *, vocab: int, batch: int, prompt: int, new: int, repeats: int, modes: str, **shape: int
) -> dict[str, Any]:
    """Return all measurements as a dictionary."""
    config = common.model_config(vocab, **shape)
    params = common.init_params(config)
    device_limits = limits.measure()
    model = common.hf_model(params, config)
    tokens = np.random.default_rng(0).integers(1, vocab, (batch, prompt)).astype(np.int32)
    key, out = jax.random.key(1), {}
    least = device_limits.seconds(**limits.generate(config, batch, prompt, new))
    for name in modes.split(','):
        mode = MODES[name]
        ours = jax.jit(functools.partial(generate, config=config, new=new, **mode))
        times = common.medians(
            common.alternate(
                {
                    'ours': lambda ours=ours: ours(params, tokens, key),
                    'hf': lambda mode=mode: hf_generate(model, tokens, new, mode),
                },
                repeats,
            )
        )
        out[name] = {
            'ours_s': times['ours'],
            'hf_s': times['hf'],
            'times_hf': times['hf'] / times['ours'],
            'tokens_per_s': batch * new / times['ours'],
            'share_of_limit': least / times['ours'],
        }
        if name == 'greedy':
            same = np.asarray(ours(params, tokens, key)[0]) == hf_generate(model, tokens, new, mode)
            out[name]['same_tokens'] = float(same.mean())
    result = {'shape': dict(vocab=vocab, batch=batch, prompt=prompt, new=new), 'modes': out}
    result['limit_s'] = least
    if {'plain', 'nucleus'} <= out.keys():
        result['nucleus_over_plain'] = out['nucleus']['ours_s'] / out['plain']['ours_s']
    return result


def show(result: dict[str, Any]) -> str:
    columns = ['sampling', 'ours, s', 'HF, s', 'speed-up over HF', 'tokens/s', 'share of limit']
    rows = [[name, *list(mode.values())[:5]] for name, mode in result['modes'].items()]
    return common.table(f'decode {result["shape"]}', columns, rows)


if __name__ == '__main__':
    common.main(
        'decode',
        __doc__,
        run,
        show,
        vocab=common.SMALL_VOCAB,
        batch=16,
        prompt=64,
        new=64,
        repeats=5,
        modes='greedy,plain,nucleus',
    )
