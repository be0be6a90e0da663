"""An example harness: find the box with the prize, using a tool, in up to three calls.

It uses only Python's standard library. A hint describes the right box; a wrong box names it.
`play` calls chat completions, `play_responses` and `play_messages` the other dialects.
"""

import functools
import json

from agentrl_jax.envs.hosts.harness.clients import Client
from agentrl_jax.envs.hosts.harness.task import Task

BOXES = ('red', 'green', 'blue', 'black', 'white', 'gold')
HINTS = ('blood', 'grass', 'the sky', 'night', 'snow', 'the sun')
TOOL = {
    'type': 'function',
    'function': {
        'name': 'open',
        'description': 'Opens a box.',
        'parameters': {'type': 'object', 'properties': {'box': {'type': 'string'}}},
    },
}


def expert(messages: list[dict], tools: list[dict], item: int) -> str:
    """Open the box that the hint describes, or that a wrong box named."""
    known = [
        box
        for box, hint in zip(BOXES, HINTS, strict=True)
        if f'like {hint}.' in messages[0]['content'] or f'The {box} one.' in messages[-1]['content']
    ]
    call = {'name': 'open', 'arguments': {'box': (known or BOXES)[0]}}
    return f'<tool_call>\n{json.dumps(call)}\n</tool_call>'


def play(task: Task, dialect: str = 'chat') -> dict:
    """Play an episode; the reward is 1 for the prize in the first box, then .7 and .4."""
    prize, key = task.item % len(BOXES), task.item // len(BOXES) % 2
    hint = f'It is like {HINTS[prize]}.' if key else 'Nobody knows which.'
    client = Client(task, f'Find the prize. {hint}', dialect, tools=[TOOL])
    for opened in range(3):
        message = client.ask()
        calls = message and message.get('tool_calls')
        if not calls:
            break
        try:
            box = json.loads(calls[0]['function']['arguments'])['box']
        except (ValueError, KeyError, TypeError):
            break
        if box == BOXES[prize]:
            return {'reward': 1.0 - 0.3 * opened, 'success': True}
        result = f'Empty. The {BOXES[prize]} one.' if box in BOXES else 'No such box.'
        client.messages.append({'role': 'tool', 'tool_call_id': calls[0]['id'], 'content': result})
    return {'reward': 0.0, 'success': False}


play_responses = functools.partial(play, dialect='responses')
play_messages = functools.partial(play, dialect='messages')
