"""Reading: whole prompts, and what worlds say in the middle of an episode.

  python -m benchmarks.prefill [--vocab=151936 --batch=8] [--json=PATH]

1. Prompts of several lengths into an empty cache, logits of the last token: ours beside
   transformers with the same weights, alternating. "same token": share of rows whose likeliest
   next token is the same.
2. Observations of --observation tokens behind 0, 64, ... cached tokens, as rollout.serve reads
   them, beside reading the whole conversation again. The cache has room for the longest history
   throughout. A turn must not cost more because of what was said before, except for attention to
   it; the limit has only that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models import Model
from benchmarks import common, limits

LOOPS = 4  # observations read in one program, so that making its cache is a small part


def read_prompt(params: Any, prompt: jax.Array, *, config: Model):
    """(logits float32 [B, V] behind prompt int32 [B, P], cache)."""
    rows, length = prompt.shape
    positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)
    cache = config.init_cache(rows, length)
    hidden, cache = config.forward_cached(params, prompt, positions, cache, None, kv_length=length)
    return config.logits(params, hidden[:, -1]), cache


def read_observations(
    params: Any, tokens: jax.Array, behind: jax.Array, *, config: Model, room: int
):
    """Hidden states of tokens int32 [B, O] at positions behind..., read LOOPS times.

    behind int32 [] is traced: one program for all histories.
    """
    positions = behind + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rows = jnp.arange(len(tokens))

    def again(_, carry):
        hidden, cache = carry
        return config.forward_cached(params, tokens, positions, cache, rows)

    empty = jnp.zeros((*tokens.shape, config.hidden_size), config.dtype)
    cache = config.init_cache(len(tokens), room)
    return jax.lax.fori_loop(0, LOOPS, again, (empty, cache))[0]


def hf_read(model: Any, prompt: np.ndarray) -> np.ndarray:
    """The first by transformers."""
    torch = common.import_optional('torch')
    ids = torch.tensor(prompt, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].cpu().numpy()


def prompts(
    params: Any,
    config: Model,
    found: limits.Limits,
    *,
    batch: int,
    lengths: list[int],
    repeats: int,
) -> dict[str, dict]:
    """Part 1, by length."""
    model, out = common.hf_model(params, config), {}
    ours = jax.jit(functools.partial(read_prompt, config=config))
    for length in lengths:
        tokens = np.random.default_rng(0).integers(1, config.vocab_size, (batch, length))
        tokens = tokens.astype(np.int32)
        calls = {
            'ours': functools.partial(ours, params, tokens),
            'hf': functools.partial(hf_read, model, tokens),
        }
        row = common.compare(common.alternate(calls, repeats), 'ours', 'hf')
        likeliest = np.asarray(ours(params, tokens)[0]).argmax(-1)
        least = found.seconds(**limits.prefill(config, batch, length))
        out[str(length)] = row | {
            'tokens_per_s': batch * length / row['ours_s'],
            'share_of_limit': least / row['ours_s'],
            'same_token': float((likeliest == hf_read(model, tokens).argmax(-1)).mean()),
        }
    return out


def observations(
    params: Any,
    config: Model,
    found: limits.Limits,
    *,
    batch: int,
    observation: int,
    histories: list[int],
    repeats: int,
) -> dict[str, dict]:
    """Part 2, by tokens behind which the observation is read."""
    tokens = jnp.ones((batch, observation), jnp.int32)
    keep = jax.jit(
        functools.partial(read_observations, config=config, room=max(histories) + observation)
    )
    again = jax.jit(functools.partial(read_prompt, config=config))
    calls = {f'keep {n}': functools.partial(keep, params, tokens, jnp.int32(n)) for n in histories}
    for n in histories:
        whole = jnp.ones((batch, n + observation), jnp.int32)
        calls[f'again {n}'] = functools.partial(again, params, whole)
    times = common.medians(common.alternate(calls, repeats))
    out = {}
    for n in histories:
        spent = times[f'keep {n}'] / LOOPS
        least = found.seconds(**limits.prefill(config, batch, observation, n))
        out[str(n)] = {
            'seconds': spent,
            'times_first': spent / (times[f'keep {histories[0]}'] / LOOPS),
            'share_of_limit': least / spent,
            'again_s': times[f'again {n}'],
            'times_again': times[f'again {n}'] / spent,
        }
    return out


def run(
    *,
    vocab: int,
    batch: int,
    lengths: str,
    observation: int,
    histories: str,
    repeats: int,
    **shape: int,
) -> dict[str, Any]:
    """All measurements, as the dictionary that is printed."""
    config = common.model_config(vocab, **shape)
    params, found = common.init_params(config), limits.measure()
    given = dict(params=params, config=config, found=found, batch=batch, repeats=repeats)
    return {
        'shape': dict(vocab=vocab, batch=batch, observation=observation),
        'prompts': prompts(lengths=[int(x) for x in lengths.split(',')], **given),
        'observations': observations(
            observation=observation, histories=[int(x) for x in histories.split(',')], **given
        ),
        'limits': vars(found),
    }


def show(result: dict[str, Any]) -> str:
    size = result['shape']
    names = ['ours_s', 'other_s', 'times_as_fast', 'tokens_per_s', 'share_of_limit']
    columns = ['tokens', 'ours, s', 'HF, s', 'x as fast as HF', 'tokens/s', 'share of limit']
    rows = [[n, *(x[name] for name in names)] for n, x in result['prompts'].items()]
    first = common.table(f'prompts, {size["batch"]} rows', columns, rows)
    names = ['seconds', 'times_first', 'share_of_limit', 'again_s', 'times_again']
    columns = ['behind', 'seconds', 'x the first', 'share of limit', 'read again, s', 'x as long']
    rows = [[n, *(x[name] for name in names)] for n, x in result['observations'].items()]
    title = f'observations of {size["observation"]} tokens, {size["batch"]} rows'
    return f'{first}\n\n{common.table(title, columns, rows)}'


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0],
        vocab=common.SMALL_VOCAB,
        batch=16,
        lengths='64,256,1024',
        observation=32,
        histories='0,64,256,1024',
        repeats=5,
    )
    common.pin(args.core)
    result = run(**{k: v for k, v in vars(args).items() if k not in ('json', 'core')})
    print(show(result))
    common.emit('prefill', result, args.json)


if __name__ == '__main__':
    main()
