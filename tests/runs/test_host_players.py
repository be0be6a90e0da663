"""Play without a policy on hosts, and AgentGym-RL's configs."""

import re
import types

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax.envs.hosts import textcraft
from agentrl_jax.envs.hosts.players import reference_success
from agentrl_jax.imitation import trajectories
from agentrl_jax.records import report
from agentrl_jax.run import cloning, hosts, loading, parts
from agentrl_jax.run.config import read as read_config
from agentrl_jax.text.agents import Agent

SHORT = {
    'hosts.prompt': 'short',
    'textcraft.wording': 'plain',
    'textcraft.distractors': 1,
    'textcraft.depths': (1, 2),
    'textcraft.most_recipes': 3,
    'textcraft.most_commands': 4,
    'textcraft.variants': 8,
    'hosts.answer_prefix': 'Action: ',
    'hosts.max_observation': 80,
    'env.max_turns': 5,
    'rollout.max_tokens': 168,
    'clone.episodes': 12,
}
TURN = re.compile(r'<\|im_start\|>assistant\nAction: (.*?)<\|im_end\|>', re.DOTALL)


def config(**changes):
    """Return a config with short goals of TextCraft in the wording for small models."""
    return micro_runs.plain('textcraft', **(SHORT | changes))


@pytest.fixture(scope='module')
def run():
    """The parts of a run that demonstrations need: no model."""
    cfg = read_config(config())
    tokenizer = loading.build_tokenizer(cfg)
    trained, held_out = (
        parts.build_text_task(cfg, tokenizer, split, None) for split in ('train', 'validation')
    )
    return types.SimpleNamespace(
        config=cfg,
        mesh=None,
        tokenizer=tokenizer,
        training=types.SimpleNamespace(tasks=(trained,)),
        validation=types.SimpleNamespace(task=held_out),
        model=types.SimpleNamespace(vocab_size=tokenizer.vocab_size),
        worlds={cfg.env.name: hosts.build_worlds(cfg, tokenizer)},
    )


def with_changes(run, changes):
    return types.SimpleNamespace(**(vars(run) | {'config': read_config(config(**changes))}))


def demo_texts(run, oracle):
    """Return (texts of rows, texts of their trained parts) of demonstrations."""
    data = jax.device_get(cloning.find_demonstrations(with_changes(run, {'clone.oracle': oracle})))
    assert data.tokens.shape[0] == 12 and data.tokens.shape[1] <= 168

    def texts(masks):
        rows = zip(data.tokens, masks, strict=True)
        return [run.tokenizer.decode(row[mask], show_special=True) for row, mask in rows]

    return texts(data.attention_mask), texts(data.mask)


def test_demonstrations_of_the_expert_reach_their_goals_in_the_tokens_of_a_rollout(run):
    texts, trained = demo_texts(run, oracle=1.0)
    world = textcraft.TextCraft(**run.training.tasks[0].env.settings())
    first = run.tokenizer.decode(np.asarray(run.training.tasks[0].prefix), show_special=True)
    items = run.training.tasks[0].env_params.items.tolist()
    item_of = {world.reset(item): item for item in reversed(items)}
    for text, trained_text in zip(texts, trained, strict=True):
        commands = TURN.findall(text)
        assert trained_text == ''.join(f'{command}<|im_end|>' for command in commands)
        assert text.startswith(first)
        opening = text.removeprefix(first).split('<|im_start|>user\n', 1)[1]
        observation = opening.split('<|im_end|>', 1)[0]
        assert world.reset(item_of[observation]) == observation
        replies = [world.step(command) for command in commands]
        assert replies[-1].success
        for reply in replies[:-1]:
            assert f'user\n{reply.observation}<|im_end|>' in text


def test_random_play_is_mixed_in_turn_by_turn(run):
    expert, mixed, again, random = (demo_texts(run, oracle)[1] for oracle in (1.0, 0.5, 0.5, 0.0))
    assert mixed == again != expert
    turns = [''.join(rows).count('<|im_end|>') for rows in (expert, mixed, random)]
    assert turns[0] < turns[1] <= turns[2]


def test_trajectories_of_a_file_are_not_trained_on_the_forced_prefix(run, tmp_path):
    path = tmp_path / 'episodes.json'
    messages = [
        {'from': 'human', 'loss': None, 'value': 'Goal: craft stick.'},
        {'from': 'gpt', 'loss': True, 'value': 'Action: inventory'},
    ]
    trajectories.write_records(path, [{'item_id': 'textcraft_0', 'conversations': messages}])
    file_run = with_changes(run, {'clone.file': str(path), 'clone.episodes': 0})
    data = jax.device_get(cloning.find_demonstrations(file_run))
    text = run.tokenizer.decode(data.tokens[data.mask], show_special=True)
    assert text == 'inventory<|im_end|>'


def test_the_reference_of_a_report_has_random_play_and_the_planner(run):
    reference = report.reference(run.validation.task)
    assert reference['oracle'] == 1.0 and 0 < reference['random'] < 0.5
    task = run.validation.task
    short = reference_success(task.env, task.env_params, 1, rollouts=1)
    assert short == {'random': 0.0, 'oracle': 0.0}
    again = task.replace(agent=Agent(plans=True, trials=3), max_turns=6)
    assert report.reference(again)['oracle'] == 0.0  # one turn in each of three trials acts
