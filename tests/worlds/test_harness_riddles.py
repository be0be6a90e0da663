"""The harness of riddles: which things it asks for, and what its episodes earn."""

import threading

import pytest

from agentrl_jax.envs.hosts.harness import riddles
from agentrl_jax.envs.hosts.harness.episode import Episode
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.hosts.harness.world import endpoint
from agentrl_jax.envs.hosts.world import Answer
from agentrl_jax.envs.splits import SPLITS, level_split


def said(episode, *names):
    """Answers the requests of an episode in turn, and returns the texts that they brought."""
    found = []
    for name in names:
        request = episode.events.get(timeout=10)
        found += [message['content'] for message in request.new.messages]
        answer = Answer(name)
        answer.closed, answer.finish = True, 'stop'
        episode.answer(answer)
    return found


@pytest.mark.parametrize(
    ('names', 'reward'), [((0,), 1.0), ((1, 0), 0.7), ((1, 1, 0), 0.4), ((1, 2, 3), 0.0)]
)
def test_the_box_of_the_things_colour_earns_the_less_the_later_it_is_named(names, reward):
    server, episode = endpoint('127.0.0.1', 0), Episode()
    item = next(i for i in range(100) if level_split(str(i).encode()) == 'train')
    colour, thing = riddles.riddle(item)
    assert (colour, thing) in riddles.listed('train') and riddles.expert([], [], item) == colour
    order = [colour, *(one for one in riddles.COLOURS if one != colour)]
    task, found = Task(item, f'{server.open(episode)}/v1', episode.secret), []
    player = threading.Thread(target=lambda: found.append(riddles.play(task)))
    player.start()
    heard = said(episode, *(order[number].title() for number in names))
    player.join(10)
    server.close(episode)
    assert thing in heard[0] and heard[1:] == [riddles.EMPTY] * (len(names) - 1)
    assert found == [{'reward': pytest.approx(reward), 'success': reward > 0}]


def test_things_of_a_split_are_in_no_other_and_of_every_colour():
    listed = {split: riddles.listed(split) for split in SPLITS}
    assert [len(listed[split]) for split in SPLITS] == [96, 24, 24]
    everything = [thing for things in listed.values() for _, thing in things]
    assert len(set(everything)) == len(everything) == 144
    for things in listed.values():
        assert [colour for colour, _ in things[:6]] == list(riddles.COLOURS)
