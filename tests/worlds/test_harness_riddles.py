"""The riddles harness: its things and the rewards of its episodes."""

import contextlib

import pytest

from agentrl_jax.envs.hosts.harness import riddles
from agentrl_jax.envs.hosts.harness.world import HarnessEnvironment
from agentrl_jax.envs.hosts.world import Answer
from agentrl_jax.envs.splits import SPLITS, level_split


@pytest.mark.parametrize(
    ('names', 'reward'), [((0,), 1.0), ((1, 0), 0.7), ((1, 1, 0), 0.4), ((1, 2, 3), 0.0)]
)
def test_the_box_of_the_things_colour_earns_less_if_it_is_named_later(names, reward):
    item = next(i for i in range(100) if level_split(str(i).encode()) == 'train')
    colour, thing = riddles.riddle(item)
    assert (colour, thing) in riddles.listed('train') and riddles.expert([], [], item) == colour
    order = [colour, *(one for one in riddles.COLOURS if one != colour)]
    env = HarnessEnvironment(run='agentrl_jax.envs.hosts.harness.riddles:play')
    with contextlib.closing(env.make()) as world:
        assert thing in str(world.reset(item))
        *wrong, last = [world.step(Answer(order[number].title())) for number in names]
    assert all(reply.observation.messages[-1]['content'] == riddles.EMPTY for reply in wrong)
    assert last.done and (last.reward, last.success) == (pytest.approx(reward), reward > 0)


def test_splits_share_no_thing_and_contain_every_colour():
    listed = {split: riddles.listed(split) for split in SPLITS}
    assert [len(listed[split]) for split in SPLITS] == [96, 24, 24]
    everything = [thing for things in listed.values() for _, thing in things]
    assert len(set(everything)) == len(everything) == 144
    for things in listed.values():
        assert [colour for colour, _ in things[:6]] == list(riddles.COLOURS)
