"""Small agents for tests: text environments, a policy cloned in seconds, a reference replay.

Everything is cached, so the files of a test process share environments, policies and programs.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax.envs import Bandit, FrozenLake, Sokoban
from agentrl_jax.imitation import clone
from agentrl_jax.imitation.demonstrations import demonstrate
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rollout import device, windows
from agentrl_jax.rollout.openings import SharedPrompts
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.sampling import Sampler
from agentrl_jax.rollout.slots import RolloutSettings, Schedule
from agentrl_jax.text.answer import END, parse_answer
from agentrl_jax.text.task import build_task
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tools.demo_tokenizer import DEMO_MODEL
from agentrl_jax.types import Episodes, EpisodeStop, TurnStop

SPECIALS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>')
NAMES = ('frozen_lake', 'sokoban', 'bandit')
MAX_TOKENS = {'frozen_lake': 160, 'sokoban': 224, 'bandit': 320}
MAX_RESPONSE = 12
BUDGETS = dict(max_turns=3, max_actions_per_turn=3, max_actions_per_episode=5)


@functools.cache
def tokenizer():
    return load_tokenizer(DEMO_MODEL)


@functools.cache
def environment(name):
    """Return (environment, pool of 16 levels); lake moves succeed two times in three."""
    if name == 'frozen_lake':
        env = FrozenLake(success_rate=2.0 / 3.0)
        return env, env.make_params('train', num_levels=16)
    if name == 'sokoban':
        env = Sokoban(search_depth=30)
        return env, env.make_params('train', num_levels=16)
    env = Bandit(pairs='v0423')
    return env, env.make_params('train')


@functools.cache
def task(name, **changes):
    env, env_params = environment(name)
    return build_task(env, env_params, tokenizer(), **(dict(style='brief') | BUDGETS | changes))


@functools.cache
def config(layers=1):
    return Qwen2(
        vocab_size=-(-tokenizer().vocab_size // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )


@functools.cache
def untrained():
    return jax.jit(config().init)(jax.random.key(0))


@functools.cache
def score(temperature=1.0):
    """Return a function (params, tokens, attention_mask) -> the trainer's (logprobs, entropy)."""
    return lambda params, *rows: scored(None, temperature)(params, *rows, None)


def gap(params, out, temperature=1.0, found=None):
    """Return the largest logprob difference of sampler and trainer; found: the windows."""
    rows, length = (jnp.asarray(out.tokens), jnp.asarray(out.attention_mask)), out.tokens.shape[1]
    if found is not None:
        rows = windows.split_turns(rows, found)
    trained, _ = score(temperature)(params, *rows)
    if found is not None:
        trained = windows.scatter_back(trained, found, length)
    assert out.action_mask.sum() > 50
    return np.where(out.action_mask, np.abs(np.asarray(trained) - out.logprobs), 0.0).max()


def hidden(params, *rows):
    return config().forward(params, *rows)


def head(params):
    return config().head_kernel(params)


@functools.cache
def demonstrations(name, oracle=0.5, episodes=64):
    env, env_params = environment(name)

    def expert(states, used):
        return env.plans(states, used, BUDGETS['max_actions_per_episode'], env_params)

    return demonstrate(
        task(name),
        tokenizer(),
        expert,
        seed=0,
        episodes=episodes,
        oracle=oracle,
        max_tokens=MAX_TOKENS[name],
    )


@functools.cache
def cloned(name, steps=30):
    """Return (policy that mostly follows the format and plays badly, training losses)."""
    losses = []
    params = clone.clone(
        untrained(),
        demonstrations(name),
        jax.random.key(1),
        fns=ModelFns(hidden, head),
        tx=optax.adam(2e-2),
        steps=steps,
        batch_size=32,
        chunk_size=4096,
        report=lambda step, loss: losses.append(float(loss)),
    )
    return params, losses


def episodes(name, *, groups=4, group_size=4, common=False):
    """Return group-major episodes on the first levels, with separate streams unless common."""
    stream = jnp.arange(groups * group_size, dtype=jnp.int32)
    env, env_params = environment(name)
    return Episodes(
        level=stream // group_size % env.num_levels(env_params),
        token_stream=stream,
        world_stream=stream // group_size if common else stream,
    )


QUICK = {'xla_backend_optimization_level': 0}  # halves the time XLA needs for a program


def settings(*, model=None, temperature=1.0, top_k=0, top_p=1.0, share=False, **others):
    """Return RolloutSettings with 8 slots by default."""
    default = dict(
        player=Player(model or config()),
        sampler=Sampler(temperature, top_k, top_p),
        schedule=SharedPrompts() if share else Schedule(),
        slots=8,
        serve_rows=3,
        max_response=MAX_RESPONSE,
    )
    return RolloutSettings(**default | others)


@functools.cache
def compiled(how):
    """Return the jitted rollout.collect."""
    program = functools.partial(device.collect, settings=how)
    return jax.jit(program, compiler_options=QUICK)


def play(name, params, key, *, listed=None, task_=None, **changes):
    """Return (Rollout on the host, counters) of 16 episodes, by default in 8 slots."""
    how = settings(**{'max_tokens': MAX_TOKENS[name]} | changes)
    listed = episodes(name) if listed is None else listed
    return jax.device_get(compiled(how)(params, task_ or task(name), listed, key))


KEY = jax.random.key(7)
TEMPERATURES = {'frozen_lake': 1.0, 'sokoban': 1.3, 'bandit': 0.6}


@functools.cache
def played(name):
    """Return (rollout, counters) of a cloned policy with KEY: 16 episodes in 8 slots."""
    return play(name, cloned(name)[0], KEY, temperature=TEMPERATURES[name])


# A reference replay, with Python's re and one environment step at a time.


@functools.cache
def _host_steps(env):
    return jax.jit(env.step_env), jax.jit(env.env_action), jax.jit(env.reset_level)


def answered(out, b, k, task_):
    """Return (matched, parts) of the bytes that episode b sampled in turn k."""
    ids = out.tokens[b][out.action_mask[b] & (out.turn[b] == k)]
    if out.turn_stop[b, k] == TurnStop.EOS:
        assert ids[-1] in tokenizer().eos_ids
        ids = ids[:-1]
    assert not set(ids.tolist()) & set(tokenizer().eos_ids)
    ended = bool(out.turn_stop[b, k] == TurnStop.EOS)
    return parse_answer(
        tokenizer().decode_bytes(ids) + END * ended,
        task_.env.ACTION_NAMES,
        max_actions=task_.max_actions_per_turn,
        opening=task_.opening,
    )


def play_by_hand(task_, state, key, turn, used, matched, parts):
    """Play one turn by the rules, word by word; return its events. key: of the episode."""
    step, action_of, _ = _host_steps(task_.env)
    before = state
    fault, acted, reward, done, known = not matched, [], np.float32(0), False, 0
    for index, part in enumerate(parts if matched else []):
        if part == -2:
            continue
        action = int(action_of(before, part)) if part >= 0 else -1
        if action < 0:
            fault = True
            continue
        known += 1
        if done or used >= task_.max_actions_per_episode:
            continue
        step_key = jax.random.fold_in(jax.random.fold_in(key, turn), index)
        _, state, gain, done, _ = step(step_key, state, action, task_.env_params)
        done = bool(done) or bool(task_.env.is_truncated(state, task_.env_params))
        acted, used, reward = [*acted, action], used + 1, np.float32(reward + gain)
    stop = EpisodeStop.NONE
    if turn + 1 >= int(task_.turn_limit):
        stop = EpisodeStop.TURN_BUDGET
    if used >= task_.max_actions_per_episode:
        stop = EpisodeStop.ACTION_BUDGET
    if done:
        stop = EpisodeStop.TERMINATED
    return dict(
        state=state,
        used=used,
        reward=reward,
        actions=acted,
        stop=stop,
        penalty=task_.format_penalty if fault or not known else 0.0,
        warn=not known,
        valid=bool(known) and not fault,
        success=bool(task_.env.success(state, task_.env_params)),
    )


def replay(out, b, task_, key, world_stream):
    """Replay the turns of episode b from its bytes: [state before], [events of each]."""
    k_world = jax.random.fold_in(jax.random.split(key)[1], world_stream)
    state = _host_steps(task_.env)[2](int(out.level[b]), task_.env_params)
    states, turns, used = [state], [], 0
    for k in range(int(out.num_turns[b])):
        matched, parts = answered(out, b, k, task_)
        turns.append(play_by_hand(task_, states[-1], k_world, k, used, matched, parts))
        states.append(turns[-1]['state'])
        used = turns[-1]['used']
    return states, turns


def spelled(text):
    """Return the ids of a text with spelled-out special tokens."""
    ids = []
    for span in re.split('(' + '|'.join(map(re.escape, SPECIALS)) + ')', text):
        ids += [tokenizer().special(span)] if span in SPECIALS else tokenizer().encode(span)
    return ids


TAIL = (
    'You have {left} actions left. Always output: <think> [Your thoughts] </think> <answer> '
    '[your answer] </answer> with no extra text. Strictly follow this format. '
    'Max response length: 100 words (tokens).\n'
)
WARNING = (
    'No valid action provided previously. Environment state remains the same. Please try again.\n'
)


def opening_text(env, style, max_actions):
    """Return the system message and the start of the first user message, as spelled-out text."""
    if style == 'brief':
        return f'<|im_start|>system\n{env.name}\n<|im_end|>\n<|im_start|>user\n'
    return (
        f"<|im_start|>system\nYou're a helpful assistant. {env.instruction}\n"
        f'Your available actions are:\n{", ".join(env.ACTION_NAMES)}\nYou can make up to '
        f'{max_actions} actions, separated by the action separator " || "\n<|im_end|>\n'
        '<|im_start|>user\n\n'
    )


def turn_text(env, style, state, *, turn, reward, warn, left, sampled_end, prefix='<think>'):
    """Return the text between two answers: RAGEN's turn block in ChatML, or the brief wording."""
    text = ''
    if turn > 0:
        text += ('' if sampled_end else '<|im_end|>') + '\n<|im_start|>user\n'
        text += f'Reward:\n{round(float(reward), 1) + 0.0:.1f}\n\n' if style == 'ragen' else ''
    text += f'Turn {turn + 1}:\nState:\n' if style == 'ragen' else ''
    text += env.observation_text(state)
    if style == 'ragen':
        text += (WARNING if warn else '') + TAIL.format(left=left)
    else:
        text += ('Invalid.\n' if warn else '') + f'{left} left\n'
    return f'{text}<|im_end|>\n<|im_start|>assistant\n{prefix}'


@functools.cache
def scored(bits, temperature):
    """Return jitted (log-probabilities, entropy), normalised over the allowed tokens."""

    def program(params, tokens, attention, allowed):
        states = hidden(params, tokens, positions_of(attention), attention)
        return losses.token_logprobs(
            states,
            head(params),
            tokens,
            losses.HeadSettings(temperature, chunk_size=512, bits=bits),
            with_entropy=True,
            allowed=allowed,
        )

    return jax.jit(program)
