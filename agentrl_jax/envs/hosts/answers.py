"""Readers that extract the action from a policy's text, as in AgentGym (arXiv:2406.04151).

A reader takes the full text of a turn and returns the action. If it raises Unreadable, the message
becomes the observation, the world is not stepped, and there is no reward.
"""

import re
from collections.abc import Callable, Iterable

from agentrl_jax.envs.hosts.world import Reply, World


class Unreadable(ValueError):
    """Its message is the observation."""


Reader = Callable[[str], str]


def whole(text: str) -> str:
    """Return the text unchanged."""
    return text


def only_action(text: str) -> str:
    """Return the line after the only `Action:`, reduced to letters, digits, commas and blanks."""
    lines = re.findall(r'Action:\s*(.*?)(?=\n|$)', text, re.DOTALL)
    if len(lines) > 1:
        raise Unreadable(
            "Error: Only one 'Action' is allowed per response. Please adjust your response."
        )
    action = re.sub('[^A-Za-z0-9, ]+', '', lines[0]) if lines else ''
    return ' '.join(action.split())


def last_action(text: str) -> str:
    """Return the text after the last `Action:`, or all of a text with a web action, else ''."""
    _, mark, tail = text.rpartition('Action:')
    return tail.strip() if mark or 'search[' in tail or 'click[' in tail else ''


def first_action(text: str) -> str:
    """Return the text between the first and second `Action:`; without one, the full text."""
    parts = text.split('Action:')
    return parts[min(1, len(parts) - 1)].strip()


def sql_block(text: str) -> str:
    """Return the last SQL block."""
    return text.split('```sql')[-1].split('```')[0].strip()


def with_backticks(text: str) -> str:
    """Return the text unchanged if it has an action between triple backticks."""
    if not re.search('```.*?```', text, re.DOTALL):
        raise Unreadable(
            'Cannot parse action from response. Your action should be inside triple backticks '
            '(```). Please adjust accordingly.'
        )
    return text


def in_backticks(text: str) -> str:
    """Return the text in the first pair of triple backticks."""
    return re.search('```(.*?)```', with_backticks(text), re.DOTALL)[1].strip()


_ALL = (whole, only_action, last_action, first_action, sql_block, with_backticks, in_backticks)
READERS: dict[str, Reader] = {reader.__name__: reader for reader in _ALL}
FRAMES = {'whole': '', 'sql_block': '```sql\n', 'with_backticks': '```', 'in_backticks': '```'}


def framed(reader: str, actions: Iterable[str]) -> tuple[str, ...]:
    """Return the shortest answers from which a reader extracts actions or forms (text.forms)."""
    before = FRAMES.get(reader, 'Action: ')
    return tuple(before + action + '```' * before.startswith('```') for action in actions)


class Read:
    """Wrap a world that takes bare actions into one that takes full answers."""

    def __init__(self, world: World, reader: str):
        self.world, self.reader_name, self.reader = world, reader, READERS[reader]
        self.deterministic = world.deterministic
        self.success: bool | None = False  # so far; unreadable answers do not change it

    @property
    def instruction(self) -> str:
        return self.world.instruction

    @property
    def offers(self) -> tuple[str, ...]:
        return framed(self.reader_name, getattr(self.world, 'offers', ()))

    def reset(self, item: int) -> str:
        self.success = False
        return self.world.reset(item)

    def step(self, action: str) -> Reply:
        try:
            action = self.reader(action)
        except Unreadable as unreadable:
            return Reply(str(unreadable), success=self.success, valid=False)
        reply = self.world.step(action)
        self.success = reply.success
        return reply

    def close(self) -> None:
        self.world.close()
