"""Prompts with tokenizers that depend on the text after a line: all environments and wordings.

Runs with a small tokenizer with SmolLM2's rules, and with the tokenizers of real checkpoints in the
folder AGENTRL_REAL_WEIGHTS: smollm2*.gguf and qwen2.5*.gguf.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen_vocabulary
import real_tokenizers
import smollm_vocabulary

from agentrl_jax.envs import ENVIRONMENTS, BabyAI, FrozenLake, Sokoban
from agentrl_jax.text import agents, lines
from agentrl_jax.text import task as text
from agentrl_jax.text.prompts import STYLES
from agentrl_jax.tokens import chat
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tools import demo_tokenizer

WORLDS = {name: world() for name, world in ENVIRONMENTS.items()} | {
    'lake_coordinates': FrozenLake(size=3, observation_format='grid_coord'),
    'lake_coord': FrozenLake(size=3, observation_format='coord'),
    'lake_cells': FrozenLake(observation_format='cells'),
    'room_cells': Sokoban(observation_format='cells'),
    'room_coordinates': Sokoban(observation_format='grid_coord'),
    'room_coord': Sokoban(observation_format='coord'),
    'babyai_macro': BabyAI(actions='macro'),
    'babyai_brief': BabyAI(actions='macro', wording='brief'),
    'babyai_agentgym': BabyAI(actions='macro', wording='agentgym'),
}
ROWS, TURNS, ACTIONS = 12, 4, 11


def demo():
    return load_tokenizer(demo_tokenizer.DEMO_MODEL)


@functools.cache
def pool(name):
    return WORLDS[name].make_params('train', num_levels=ROWS)


def build(name, tokenizer, style, **changes):
    budgets = dict(max_turns=TURNS, max_actions_per_episode=ACTIONS, max_actions_per_turn=2)
    return text.build_task(WORLDS[name], pool(name), tokenizer, style=style, **budgets | changes)


def moments(task, seed=0):
    """Return (episodes at any turn, whether the policy ended the previous turn)."""
    rng = np.random.default_rng(seed)
    begin = jax.jit(jax.vmap(text.begin, in_axes=(None, 0)))
    episodes = begin(task, np.arange(ROWS) % task.env.num_levels(task.env_params))
    quanta = rng.integers(task.offsets.reward_low, task.offsets.reward_high + 1, ROWS)
    turn = np.arange(ROWS, dtype=np.int32) % TURNS
    if task.agent.writes:
        progress = dict(part=rng.integers(3, size=ROWS), trial=turn % task.agent.trials)
        progress |= dict(turns=rng.integers(2, size=ROWS), stepped=rng.random(ROWS) < 0.5)
        episodes = episodes.replace(agent=agents.Progress(**jax.tree.map(jnp.asarray, progress)))
    return episodes.replace(
        turn=turn,
        used=rng.integers(ACTIONS + 1, size=ROWS).astype(np.int32),
        reward=(quanta * task.env.REWARD_QUANTUM).astype(np.float32),
        warn=rng.random(ROWS) < 0.5,
    ), rng.random(ROWS) < 0.5


@jax.jit
@functools.partial(jax.vmap, in_axes=(None, 0, 0))
def prompt_and_lengths(task, *moment):
    """Return (prompt, its length, its length computed without writing, length of the opening)."""
    prompt, count = text.turn_tokens(task, *moment)
    return prompt, count, text.turn_length(task, *moment), text.opening_length(task, *moment)


def prompts_of(task, episodes, ends):
    """Return (prompts, lengths of their openings) of the episodes."""
    prompts, count, length, opening = jax.device_get(prompt_and_lengths(task, episodes, ends))
    np.testing.assert_array_equal(count, length)
    assert int(count.max()) <= task.width
    return [p[:n].tolist() for p, n in zip(np.asarray(prompts), count, strict=True)], opening


def assert_prompts_are_their_text(name, tokenizer, style, **changes):
    task = build(name, tokenizer, style, **changes)
    prefix = np.asarray(task.prefix).tolist()
    episodes, ends = moments(task)
    for i, (ids, opening) in enumerate(zip(*prompts_of(task, episodes, ends), strict=True)):
        full = [*prefix, *ids] if i % TURNS == 0 else ids
        cut = [*prefix, *(ids if i % TURNS == 0 else ids[int(opening) :])]  # as in a window
        for tokens in (full, cut):
            decoded = tokenizer.decode(tokens, show_special=True)
            assert chat.tokenize(tokenizer, decoded) == tokens, decoded


# One environment per wording of observations; the rest run in `make soak`
QUICKLY = ('frozen_lake', 'lake_coordinates', 'room_cells', 'library', 'bandit')
SOAK = [
    pytest.param(name, 'ragen', marks=pytest.mark.soak) for name in WORLDS if name not in QUICKLY
]


@pytest.mark.parametrize(
    'name, style',
    [
        *((name, 'ragen') for name in QUICKLY),
        *(('sokoban', style) for style in list(STYLES)[1:]),
        *SOAK,
    ],
)
def test_every_prompt_has_the_tokens_of_its_full_text(name, style):
    assert_prompts_are_their_text(name, smollm_vocabulary.smollm_tokenizer(), style)


BOTH = agents.Agent(plans=True, reflects=True, trials=3)
REACT = 'Thought:'


@pytest.mark.parametrize(
    'style, tokenizer',
    [
        ('ragen', smollm_vocabulary.smollm_tokenizer),
        pytest.param('tools', qwen_vocabulary.qwen_tokenizer, marks=pytest.mark.soak),
    ],
)
def test_every_prompt_of_a_writing_agent_has_the_tokens_of_its_full_text(style, tokenizer):
    assert_prompts_are_their_text('frozen_lake', tokenizer(), style, agent=BOTH)


def test_every_prompt_that_forces_a_thought_has_the_tokens_of_its_full_text():
    tokenizer = smollm_vocabulary.smollm_tokenizer()
    assert_prompts_are_their_text('sokoban', tokenizer, 'ragen', generation_prefix=REACT)


def assert_histories_are_their_text(name, tokenizer, style):
    task = build(name, tokenizer, style, past_turns=2)
    episodes, ends = moments(task)
    at, observe = task.offsets, jax.vmap(text.observation_lines, in_axes=(None, 0))
    row = [at.past_turn, *np.asarray(observe(task, episodes.state)[0]), at.past_action, -1]
    row.append(at.past_reward if STYLES[style].reward else -1)
    past = jnp.asarray([row] * 2, jnp.int32)
    episodes = episodes.replace(past=jnp.broadcast_to(past, (ROWS, *past.shape)))
    for i, ids in enumerate(prompts_of(task, episodes, ends)[0]):
        tokens = [*np.asarray(task.prefix).tolist(), *ids] if i % TURNS == 0 else ids
        decoded = tokenizer.decode(tokens, show_special=True)
        assert chat.tokenize(tokenizer, decoded) == tokens, decoded


@pytest.mark.soak
def test_a_history_in_words_has_the_tokens_of_its_text():
    tokenizer = smollm_vocabulary.smollm_tokenizer()
    assert_histories_are_their_text('room_coordinates', tokenizer, 'ragen')


@pytest.mark.slow('reads every prompt of real checkpoints')
@pytest.mark.parametrize('name', WORLDS)
@pytest.mark.parametrize('checkpoint', real_tokenizers.FILES)
def test_every_prompt_of_a_real_checkpoint_has_the_tokens_of_its_full_text(checkpoint, name):
    tokenizer = real_tokenizers.real_tokenizer(checkpoint)
    for style in STYLES:
        assert_prompts_are_their_text(name, tokenizer, style)
        assert_prompts_are_their_text(name, tokenizer, style, agent=BOTH)
        assert_prompts_are_their_text(name, tokenizer, style, generation_prefix=REACT)
        assert_histories_are_their_text(name, tokenizer, style)
    jax.clear_caches()  # programs of hundreds of tasks exceed Linux's limit of memory maps


@pytest.mark.soak
def test_tokens_of_a_blank_line_depend_on_the_next_line():
    """'\\n\\n' is one token at the end and before a digit, two before anything else."""
    tokenizer = smollm_vocabulary.smollm_tokenizer()
    texts = ['-0.1\n\n', 'Turn 1:\n', '10 left\n', '', '#_\n']
    close = [tokenizer.special('<|im_end|>')]
    table = lines.build_line_table(tokenizer, texts, extra_rows=[close])
    sizes = set()
    for rows in ([0, 1], [0, 2], [0, 3, 2], [0, 3, 4, 0, 5], [0, -1, 2, 0, -1, 4], [1, 2, 0], [0]):
        ids, count = lines.gather_lines(table, jnp.asarray(rows), width=60)
        joined = ''.join('<|im_end|>' if r == 5 else texts[r] for r in rows if r >= 0)
        assert ids[: int(count)].tolist() == chat.tokenize(tokenizer, joined), joined
        sizes.add(int(lines.in_context(table, jnp.asarray(rows))[0]))
    assert len(sizes) > 1 and int(lines.longest(table)[0]) == len(tokenizer.encode('-0.1')) + 2


def test_lines_that_tokenise_their_opening_differently_are_named():
    tokenizer = smollm_vocabulary.smollm_tokenizer()
    with pytest.raises(ValueError, match=r"'user\\n\\n' differ .* 'Turn\\n' and '10\\n'"):
        lines.in_front_of_all(tokenizer, 'user\n\n', ['Turn\n', 'To\n', '10\n'])
