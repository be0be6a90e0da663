"""Multi-turn GRPO in one file: text, tokens, episodes, advantages, loss, update.

  python examples/one_step.py                # 60 steps from random weights, half a minute on a CPU
  JAX_DISABLE_JIT=1 python examples/one_step.py --steps=1 --groups=2  # stop anywhere

The package does the same at scale. This file imports nothing from it; tests/unit/test_one_step.py
checks that both compute the same log-probabilities, advantages, loss and gradient.

Shapes: B episodes, T tokens, K turns, V vocabulary, D hidden size, H heads. Members of a group are
neighbours and play the same level. x[b, t] always belongs to tokens[b, t].
"""

import argparse
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

# ---- Text ----------------------------------------------------------------------------------------

VOCAB = '_<>LR;\n'  # one token per character; '_' pads, ';' ends an answer, '\n' an observation
PAD, END = VOCAB.index('_'), VOCAB.index(';')


def encode(text: str) -> list[int]:
    return [VOCAB.index(character) for character in text]


def decode(ids) -> str:
    return ''.join(VOCAB[i] for i in ids)


# ---- The environment: walk along a corridor to the goal ------------------------------------------

CELLS = 6
TURNS = 4  # K
MAX_ANSWER = 4  # tokens: up to three moves and the end


@dataclasses.dataclass
class Corridor:
    """Cells of an agent and a goal. An answer such as 'RRL;' moves the agent cell by cell."""

    agent: int
    goal: int

    @classmethod
    def reset(cls, level: int) -> 'Corridor':
        """Each level is a different pair of cells."""
        agent, goal = divmod(level % (CELLS * (CELLS - 1)), CELLS - 1)
        return cls(agent, goal + (goal >= agent))

    def observe(self) -> str:
        """The prompt of a turn: '<<<' and a newline if the goal is three cells to the left."""
        return abs(self.goal - self.agent) * ('<' if self.goal < self.agent else '>') + '\n'

    def step(self, answer: str) -> tuple[float, bool]:
        """Return (reward, done): 1 at the goal; -0.1 for an answer that is not moves and ';'."""
        if not re.fullmatch('[LR]+;', answer):
            return -0.1, False
        for move in answer[:-1]:
            self.agent = min(max(self.agent + (1 if move == 'R' else -1), 0), CELLS - 1)
            if self.agent == self.goal:
                return 1.0, True
        return 0.0, False


LENGTH = TURNS * (CELLS + MAX_ANSWER)  # T: the longest episode


# ---- The policy: a small Qwen2.5 -----------------------------------------------------------------

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD = 2, 32, 64, 4, 2, 8
ROPE_THETA, EPS = 1e6, 1e-6
KERNELS = {  # of a layer, [in, out]
    'self_attn': {
        'q_proj': (HIDDEN, HEADS * HEAD),
        'k_proj': (HIDDEN, KV_HEADS * HEAD),
        'v_proj': (HIDDEN, KV_HEADS * HEAD),
        'o_proj': (HEADS * HEAD, HIDDEN),
    },
    'mlp': {'gate_proj': (HIDDEN, MLP), 'up_proj': (HIDDEN, MLP), 'down_proj': (MLP, HIDDEN)},
}


def init(key: jax.Array) -> dict:
    """Random parameters, named like those of a Qwen2.5 checkpoint."""
    keys = iter(jax.random.split(key, 1 + 7 * LAYERS))

    def dense(shape):
        return {'kernel': jax.random.normal(next(keys), shape) / shape[0] ** 0.5}

    ones = {'scale': jnp.ones(HIDDEN)}
    embedding = 0.02 * jax.random.normal(next(keys), (len(VOCAB), HIDDEN))
    model = {'embed_tokens': {'embedding': embedding}, 'norm': ones}
    for i in range(LAYERS):
        layer = jax.tree.map(dense, KERNELS, is_leaf=lambda x: isinstance(x, tuple))
        for name in ('q_proj', 'k_proj', 'v_proj'):
            layer['self_attn'][name]['bias'] = jnp.zeros(KERNELS['self_attn'][name][1])
        norms = {'input_layernorm': ones, 'post_attention_layernorm': ones}
        model[f'layers_{i}'] = layer | norms
    return {'model': model}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: rotates the channel pairs (i, i + HEAD / 2) of x [B, T, H, HEAD]."""
    frequency = ROPE_THETA ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[None, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * jnp.tile(jnp.cos(angle), 2) + turned * jnp.tile(jnp.sin(angle), 2)


def attention(p: dict, x: jax.Array) -> jax.Array:
    """Causal grouped-query attention; x [B, T, D]. Padding is last, so no token attends to it."""
    rows, length, _ = x.shape
    q, k, v = (x @ p[name]['kernel'] + p[name]['bias'] for name in ('q_proj', 'k_proj', 'v_proj'))
    q, k, v = (x.reshape(rows, length, -1, HEAD) for x in (q, k, v))
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum('bqhd,bkhd->bhqk', rotate(q), rotate(k)) / HEAD**0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', weights, v).reshape(rows, length, HEADS * HEAD)
    return mixed @ p['o_proj']['kernel']


def mlp(p: dict, x: jax.Array) -> jax.Array:  # SwiGLU
    gate = jax.nn.silu(x @ p['gate_proj']['kernel'])
    return (gate * (x @ p['up_proj']['kernel'])) @ p['down_proj']['kernel']


def forward(params: dict, tokens: jax.Array) -> jax.Array:
    """Logits [B, T, V] of the token after each position of tokens [B, T]."""
    model = params['model']
    embedding = model['embed_tokens']['embedding']
    x = embedding[tokens]
    for i in range(LAYERS):
        p = model[f'layers_{i}']
        x = x + attention(p['self_attn'], rms_norm(x, p['input_layernorm']['scale']))
        x = x + mlp(p['mlp'], rms_norm(x, p['post_attention_layernorm']['scale']))
    return rms_norm(x, model['norm']['scale']) @ embedding.T


# ---- Rollout: play B episodes --------------------------------------------------------------------


@dataclasses.dataclass
class Rollout:
    """B episodes as training needs them. Each token is written exactly once."""

    tokens: np.ndarray  # int32 [B, T]    prompts and answers of all turns; PAD after the end
    logprobs: np.ndarray  # float32 [B, T]  log p of each sampled token when it was sampled; else 0
    mask: np.ndarray  # bool [B, T]     sampled tokens: only these are trained
    turn: np.ndarray  # int32 [B, T]    turn of each token; -1 is padding
    rewards: np.ndarray  # float32 [B, K]  reward of each turn
    success: np.ndarray  # bool [B]

    @property
    def returns(self) -> np.ndarray:  # float32 [B]
        return self.rewards.sum(1)


@jax.jit
def sample(params: dict, tokens: jax.Array, length: jax.Array, key: jax.Array) -> tuple:
    """(next token int32 [B], its log-probability [B]) after the first length [B] tokens of rows."""
    rows = jnp.arange(len(tokens))
    logprobs = jax.nn.log_softmax(forward(params, tokens)[rows, length - 1])
    token = jax.random.categorical(key, logprobs)
    return token, logprobs[rows, token]


def collect(params: dict, levels: np.ndarray, key: jax.Array) -> Rollout:
    """Play one episode for each of the levels int [B]: observation, answer, observation, ..."""
    rows, worlds = len(levels), [Corridor.reset(int(level)) for level in levels]
    rollout = Rollout(
        tokens=np.full((rows, LENGTH), PAD, np.int32),
        logprobs=np.zeros((rows, LENGTH), np.float32),
        mask=np.zeros((rows, LENGTH), bool),
        turn=np.full((rows, LENGTH), -1, np.int32),
        rewards=np.zeros((rows, TURNS), np.float32),
        success=np.zeros(rows, bool),
    )
    length, playing = np.zeros(rows, np.int32), np.ones(rows, bool)

    def append(b, ids, turn, logprob=None):
        where = slice(length[b], length[b] + len(ids))
        rollout.tokens[b, where], rollout.turn[b, where] = ids, turn
        if logprob is not None:
            rollout.logprobs[b, where], rollout.mask[b, where] = logprob, True
        length[b] += len(ids)

    for turn in range(TURNS):
        for b in np.flatnonzero(playing):
            append(b, encode(worlds[b].observe()), turn)
        begin, writing = length.copy(), playing.copy()
        for _ in range(MAX_ANSWER):
            key, now = jax.random.split(key)
            token, logprob = map(np.asarray, sample(params, rollout.tokens, length, now))
            for b in np.flatnonzero(writing):
                append(b, [token[b]], turn, logprob[b])
            writing &= token != END
        for b in np.flatnonzero(playing):
            answer = decode(rollout.tokens[b, begin[b] : length[b]])
            rollout.rewards[b, turn], done = worlds[b].step(answer)
            rollout.success[b], playing[b] = done, not done
    return rollout


# ---- GRPO ----------------------------------------------------------------------------------------


def group_advantages(returns: jax.Array, group_size: int) -> jax.Array:
    """(R - mean) / (std + 1e-6) over each group; returns, result [B] (arXiv:2402.03300)."""
    groups = returns.reshape(-1, group_size)
    spread = groups.max(1, keepdims=True) - groups.min(1, keepdims=True)
    normed = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1)[:, None] + 1e-6)
    return jnp.where(spread > 1e-5, normed, 0.0).reshape(-1)  # rounding is not an advantage


def token_logprobs(params: dict, tokens: jax.Array) -> jax.Array:
    """log p(tokens[b, t] | tokens[b, :t]), [B, T]; the first token gets 0.

    This is the only place that shifts by one position.
    """
    logprobs = jax.nn.log_softmax(forward(params, tokens)[:, :-1])
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)[:, :, 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def loss(params, tokens, mask, old_logprobs, advantages, clip: float = 0.2) -> jax.Array:
    """PPO's clipped surrogate: a mean over the sampled tokens of a row, then over rows.

    tokens, mask, old_logprobs [B, T]; advantages [B], the same for all tokens of an episode.
    """
    logprobs = token_logprobs(params, tokens)
    ratio = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0.0))
    a = advantages[:, None]
    surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - clip, 1 + clip) * a)
    weights = mask / (len(mask) * mask.sum(1, keepdims=True))
    return -jnp.sum(jnp.where(mask, weights * surrogate, 0.0))


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))


@jax.jit(static_argnames='group_size')
def update(params, opt_state, tokens, mask, old_logprobs, returns, group_size: int) -> tuple:
    """(params, opt_state, loss) after one optimiser step."""
    batch = (tokens, mask, old_logprobs, group_advantages(returns, group_size))
    value, gradient = jax.value_and_grad(loss)(params, *batch)
    change, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, change), opt_state, value


# ---- Training ------------------------------------------------------------------------------------


def show(rollout: Rollout, b: int, advantage: float) -> None:
    """Print an episode turn by turn; only the sampled tokens have a log-probability."""
    print(f'return {rollout.returns[b]:.1f}, advantage {advantage:.2f} on each sampled token')
    for turn in range(rollout.turn[b].max() + 1):
        here, sampled = rollout.turn[b] == turn, rollout.mask[b]
        prompt = decode(rollout.tokens[b, here & ~sampled]).strip()
        answer = repr(decode(rollout.tokens[b, here & sampled]))
        logprobs = ' '.join(f'{x:.2f}' for x in rollout.logprobs[b, here & sampled])
        print(f'  turn {turn}   {prompt:6}  ->  {answer:8} log p {logprobs}')


def main(steps: int, groups: int, group_size: int, seed: int) -> None:
    """Train from random weights and print the success rate of each tenth step."""
    key, rng = jax.random.key(seed), np.random.default_rng(seed)
    params = init(key)
    opt_state = optimizer.init(params)
    for step in range(steps):
        levels = np.repeat(rng.integers(1000, size=groups), group_size)
        rollout = collect(params, levels, jax.random.fold_in(key, step))
        batch = (rollout.tokens, rollout.mask, rollout.logprobs, rollout.returns)
        if step in (0, steps - 1):
            advantages = group_advantages(rollout.returns, group_size)
            show(rollout, int(np.argmax(advantages)), float(advantages.max()))
        if step == 0:  # the sampler and the trainer are the same policy
            gap = abs(token_logprobs(params, rollout.tokens) - rollout.logprobs)
            print(f'largest gap to the trainer: {np.max(gap, where=rollout.mask, initial=0):.1e}')
        params, opt_state, value = update(params, opt_state, *batch, group_size=group_size)
        if step % 10 == 0 or step == steps - 1:
            print(f'step {step:2}   success {rollout.success.mean():.2f}   loss {value:+.4f}')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(steps=60, groups=16, group_size=8, seed=0).items():
        parser.add_argument(f'--{name}', type=int, default=default)
    main(**vars(parser.parse_args()))
