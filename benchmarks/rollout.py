"""Multi-turn episodes of FrozenLake: rollout.collect compared with the loop of other libraries.

  python -m benchmarks.rollout [--json=PATH]

Both sides have the same weights, maps, turns and tokens per turn (answers have a fixed length: no
token ends a turn). The other side works like trainers around an inference engine: in each turn, the
conversations are converted to text, tokenised again and left-padded, and HuggingFace `generate`
reads them from the start. Answers are parsed and environments stepped one at a time on the host.
Sampled ids are reused unchanged, so that both sides read the same tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs import FrozenLake
from agentrl_jax.rollout import device
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.loading import BUNDLED_TOKENIZER
from agentrl_jax.text import task as text
from agentrl_jax.text.answer import parse_answer
from agentrl_jax.tokens import chat as chats
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.types import Episodes
from benchmarks import common


def build_task(turns: int) -> tuple[text.TextTask, Any, int]:
    """(FrozenLake as text, with an end-of-turn id outside of the vocabulary; tokenizer; size)."""
    tokenizer = load_tokenizer(BUNDLED_TOKENIZER)
    env = FrozenLake()
    task = text.build_task(
        env,
        env.make_params('train', num_levels=64),
        tokenizer,
        style='brief',
        max_turns=turns,
        max_actions_per_episode=99,
    )
    vocab = -(-tokenizer.vocab_size // 64) * 64
    return task.replace(eos_ids=jnp.array([vocab], jnp.int32)), tokenizer, vocab


def episode_list(episodes: int) -> Episodes:
    stream = jnp.arange(episodes, dtype=jnp.int32)
    return Episodes(level=stream % 64, token_stream=stream, world_stream=stream)


class HostLoop:
    """The loop of other libraries, turn by turn."""

    def __init__(self, model: Any, task: text.TextTask, tokenizer: Any):
        self.model, self.task, self.tokenizer = model, task, tokenizer
        self.chat = chats.build_chat(tokenizer)
        self.reset = jax.jit(task.env.reset_level)
        self.step = jax.jit(task.env.step_env)

    def observation(self, state: Any, *, first: bool, warn: bool, left: int) -> list[int]:
        """Tokens of a turn's prompt, from its text."""
        style = self.task.style
        message = self.task.env.observation_text(state) + (style.warning if warn else '')
        message += style.tail.format(left=left, max_words=100)
        opening = [] if first else [self.chat.end_id, *self.chat.user_open('')]
        return opening + self.tokenizer.encode(message) + self.chat.answer_open('<think>')

    def read_again(self, row: list[int]) -> list[int]:
        """Convert the conversation to text and tokenise it again."""
        return self.tokenizer.encode(self.tokenizer.decode(row))

    def act(self, state: Any, answer: list[int], key: jax.Array) -> tuple[Any, int]:
        """(environment state after the answer, number of actions)."""
        task = self.task
        matched, parts = parse_answer(
            self.tokenizer.decode_bytes(answer),
            task.env.ACTION_NAMES,
            max_actions=task.max_actions_per_turn,
            opening=task.opening,
        )
        actions = [part for part in parts if part >= 0] if matched else []
        for action in actions:
            _, state, _, _, _ = self.step(key, state, action, task.env_params)
        return jax.device_get(state), len(actions)

    def play(self, levels: list[int], turns: int, new: int) -> list[list[int]]:
        """Play one episode per level and return their tokens."""
        budget, key = self.task.max_actions_per_episode, jax.random.key(0)
        states = [jax.device_get(self.reset(i, self.task.env_params)) for i in levels]
        rows = [np.asarray(self.task.prefix).tolist() for _ in levels]
        used, warn = [0] * len(levels), [False] * len(levels)
        for turn in range(turns):
            for i, row in enumerate(rows):
                row += self.observation(
                    states[i], first=turn == 0, warn=warn[i], left=budget - used[i]
                )
                self.read_again(row)
            for i, answer in enumerate(self.generate(rows, new)):
                rows[i] += answer
                states[i], count = self.act(states[i], answer, key)
                used[i], warn[i] = used[i] + count, count == 0
        return rows

    def generate(self, rows: list[list[int]], new: int) -> list[list[int]]:
        torch = common.import_optional('torch')
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                eos_token_id=None,
            )
        return out[:, width:].tolist()


def run(*, episodes: int, turns: int, new: int, repeats: int, **shape: int) -> dict[str, Any]:
    """Return all measurements as a dictionary."""
    task, tokenizer, vocab = build_task(turns)
    config = common.model_config(vocab, **shape)
    params = common.init_params(config)
    length = task.prefix.shape[0] + turns * (task.width + new)
    settings = RolloutSettings(
        Player(config),
        slots=episodes,
        serve_rows=episodes,
        max_tokens=length,
        max_response=new,
    )
    collect = jax.jit(functools.partial(device.collect, settings=settings))
    listed = episode_list(episodes)
    levels = np.asarray(listed.level).tolist()
    host = HostLoop(common.hf_model(params, config), task, tokenizer)

    def ours():
        return collect(params, task, listed, jax.random.key(0))

    times = common.medians(
        common.alternate({'ours': ours, 'hf': lambda: host.play(levels, turns, new)}, repeats)
    )
    out, _ = jax.device_get(ours())
    rows = host.play(levels, turns, new)
    count = int(out.num_turns.sum())
    return {
        'episodes': episodes,
        'turns': count,
        'tokens': int(out.attention_mask.sum()),
        'hf_tokens': sum(map(len, rows)),
        'ours_s': times['ours'],
        'hf_s': times['hf'],
        'turns_per_s': count / times['ours'],
        'hf_turns_per_s': episodes * turns / times['hf'],
        'times_hf': count / times['ours'] * times['hf'] / (episodes * turns),
    }


def show(result: dict[str, Any]) -> str:
    return common.table(
        f'{result["episodes"]} episodes, {result["turns"]} turns, {result["tokens"]:,} tokens',
        ['loop', 'seconds', 'turns/s', 'x as fast'],
        [
            ['collect', result['ours_s'], result['turns_per_s'], result['times_hf']],
            ['generate per turn', result['hf_s'], result['hf_turns_per_s'], 1.0],
        ],
    )


if __name__ == '__main__':
    common.main('rollout', __doc__, run, show, episodes=16, turns=4, new=16, repeats=3)
