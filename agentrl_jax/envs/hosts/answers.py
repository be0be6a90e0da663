"""The action in what a policy wrote, as AgentGym's clients find it (arXiv:2406.04151).

A reader takes the whole text of a turn and returns the action for the world, or raises Unreadable
with what the policy is shown instead; the world is not asked then and no reward is given.
"""

import re
from collections.abc import Callable, Iterable

from agentrl_jax.envs.hosts.world import Reply, World


class Unreadable(ValueError):
    """Its message is the observation."""


Reader = Callable[[str], str]


def whole(text: str) -> str:
    """The text as it is."""
    return text


def only_action(text: str) -> str:
    """The line after the one `Action:`, of letters, digits, commas and single blanks alone."""
    found = re.findall(r'Action:\s*(.*?)(?=\n|$)', text, re.DOTALL)
    if len(found) > 1:
        raise Unreadable(
            "Error: Only one 'Action' is allowed per response. Please adjust your response."
        )
    kept = re.sub('[^A-Za-z0-9, ]+', '', found[0]) if found else ''
    return ' '.join(kept.split())


def last_action(text: str) -> str:
    """All after the last `Action:`; without it nothing, or everything that holds a web action."""
    _, mark, tail = text.rpartition('Action:')
    return tail.strip() if mark or 'search[' in tail or 'click[' in tail else ''


def first_action(text: str) -> str:
    """After the first `Action:` up to the second one, or everything."""
    parts = text.split('Action:')
    return parts[min(1, len(parts) - 1)].strip()


def sql_block(text: str) -> str:
    """The last block of SQL."""
    return text.split('```sql')[-1].split('```')[0].strip()


def with_backticks(text: str) -> str:
    """The text as it is, if an action between triple backticks is in it."""
    if not re.search('```.*?```', text, re.DOTALL):
        raise Unreadable(
            'Cannot parse action from response. Your action should be inside triple backticks '
            '(```). Please adjust accordingly.'
        )
    return text


def in_backticks(text: str) -> str:
    """What is in the first pair of triple backticks."""
    return re.search('```(.*?)```', with_backticks(text), re.DOTALL)[1].strip()


READERS: dict[str, Reader] = {
    'whole': whole,
    'only_action': only_action,
    'last_action': last_action,
    'first_action': first_action,
    'sql_block': sql_block,
    'with_backticks': with_backticks,
    'in_backticks': in_backticks,
}

FRAMES = {'whole': '', 'sql_block': '```sql\n', 'with_backticks': '```', 'in_backticks': '```'}


def framed(reader: str, actions: Iterable[str]) -> tuple[str, ...]:
    """The shortest answers in which a reader finds actions; those may be forms (text.forms)."""
    before = FRAMES.get(reader, 'Action: ')
    return tuple(before + action + '```' * before.startswith('```') for action in actions)


class Read:
    """A world that is given whole answers, in front of one that takes bare actions."""

    def __init__(self, world: World, reader: str):
        self.world, self.reader_name, self.reader = world, reader, READERS[reader]
        self.deterministic = world.deterministic
        self.success: bool | None = False  # so far; what cannot be read does not change it

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
        except Unreadable as shown:
            return Reply(str(shown), success=self.success, valid=False)
        reply = self.world.step(action)
        self.success = reply.success
        return reply

    def close(self) -> None:
        self.world.close()
