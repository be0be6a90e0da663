"""Harnesses for tests, with only Python's HTTP client.

A harness whose name ends with the name of a dialect, such as two_turns_messages, plays in it.
"""

import functools
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse

from agentrl_jax.envs.hosts.harness.clients import FORMATS, PATHS

DIALECTS = tuple(PATHS)
NOW = threading.local()  # dialect: of the harness in this thread
TOOL = {
    'type': 'function',
    'function': {
        'name': 'look',
        'description': 'Looks.',
        'parameters': {'type': 'object', 'properties': {'place': {'type': 'string'}}},
    },
}


class Client:
    """A client of one episode."""

    def __init__(self, task):
        parts = urllib.parse.urlsplit(task.base_url)
        self.path = parts.path
        self.http = http.client.HTTPConnection(parts.hostname, parts.port)

    def post(self, where, body, **headers):
        """Return (status, body)."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.http.request('POST', where, raw, headers)
        response = self.http.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data[:1] in b'{[' else data

    def ask(self, messages, **more):
        dialect = dialect_now()
        write, read = FORMATS[dialect]
        status, reply = self.post(
            f'{self.path}/{PATHS[dialect]}', write(messages, {'model': 'm'} | more)
        )
        if status != 200:
            raise RuntimeError(f'{status} {reply["error"]["code"]}')
        return read(reply)

    def reward(self, **body):
        return self.post(self.path.replace('/v1', '/reward'), body)


def dialect_now():
    return getattr(NOW, 'dialect', 'chat')


def user(text):
    return {'role': 'user', 'content': text}


def body(*messages, dialect='', **more):
    """Return the bytes of a request."""
    write, _ = FORMATS[dialect or dialect_now()]
    return json.dumps(write(list(messages), {'model': 'm'} | more)).encode()


def two_turns(task):
    """Send a system message and two questions; reward short answers."""
    client = Client(task)
    messages = [{'role': 'system', 'content': 'Be brief.'}, user(f'Item {task.item}.')]
    total = 0.0
    for turn in range(2):
        answer = client.ask(messages)
        total += 1.0 / (1 + len(answer['content']))
        messages += [answer, user(f'More {turn}.')]
    return total


def branching(task):
    """Play two conversations, then the first one again; rewrite one answer."""
    client = Client(task)
    first = [user(f'Item {task.item}.')]
    first.append(client.ask(first))
    other = [{'role': 'system', 'content': 'A helper.'}, user('Help.')]
    other.append(client.ask(other, tools=[TOOL]))
    first.append(user('Go on.'))
    first.append(client.ask(first))
    rewritten = [first[0], {'role': 'assistant', 'content': 'something else'}, user('So?')]
    client.ask(rewritten)
    return {'reward': 0.5, 'success': task.item % 2 == 0}


def talkative(task):
    """Continue until it is rejected; the reward depends on its turns."""
    client, messages, turns = Client(task), [user('Go.')], 0
    try:
        while True:
            messages += [client.ask(messages), user('On.' * 5)]
            turns += 1
    except RuntimeError:
        return turns / 10


def compacting(task):
    """Collect seven answers; if the conversation is too long, summarise it and start another."""
    client, messages, turns = Client(task), [user(f'Item {task.item}.')], 0
    while turns < 7:
        try:
            messages += [client.ask(messages), user('On.' * 5)]
            turns += 1
        except RuntimeError as error:
            assert 'context_length_exceeded' in str(error) and turns
            summary = client.ask([user(f'Sum up {task.item}.')])['content']
            messages = [user(f'So far: {summary}')]
    return turns / 10


def swallowing(task):
    """Skip rejected requests."""
    client = Client(task)
    try:
        client.ask([user('Go.')], stop=['unknown'])
    except RuntimeError:
        pass
    client.ask([user('Go.')])
    return True


def polite(messages, tools, item):
    """An expert: answer with the number of messages, including its own."""
    return f'Yes {len(messages) + 1}.'


def mute(messages, tools, item):
    """An expert without an answer."""


def hot(task):
    """Request its own temperature."""
    Client(task).ask([user('Go.')], temperature=2.0)
    return 1.0


def limited(task):
    """Request few tokens, and send the answer back with additional text."""
    client, messages = Client(task), [user('Go.')]
    answer = client.ask(messages, max_tokens=2)
    answer['content'] += ' (cut)'
    client.ask([*messages, answer, user('On.')])
    return 1.0


def crashing(task):
    Client(task).ask([user('Go.')])
    if task.item % 2:
        raise OverflowError('too much for me')
    return 1.0


BLAMED = 4


def fault_of(item):
    """Return 0 to 5: how one item in ten fails."""
    return item // 10 % 6


def deadly(task):
    """Fail like `faulty`, but kill its process, and leave children when it hangs or dies."""
    if task.item % 10 == 0 and fault_of(task.item) < 2:
        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)  # left_by_deadly'])
        if fault_of(task.item):
            os._exit(1)
    return faulty(task)


def faulty(task):
    """Hang, crash, flood, misreport, leave or fail on an answer, for one item in ten (fault_of)."""
    if task.item % 10:
        return two_turns(task)
    kind, client = fault_of(task.item), Client(task)
    if kind == 0:
        time.sleep(40)
    elif kind == 1:
        client.ask([user('Go.')])
        raise OSError('crashed on purpose')
    elif kind == 2:
        for _ in range(3):
            client.post(f'{client.path}/chat/completions', b'[' * 2**22)
        return None
    elif kind == 3:
        client.ask([user('Go.')])
        client.reward(reward=float('nan'))
        client.reward(success='maybe')
        return 'a thousand'
    elif kind == BLAMED:
        client.ask([user('Go.')])
        raise OverflowError('what was answered is too much')
    else:
        client.http.connect()
        client.http.sock.sendall(b'POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf')
        client.http.sock.close()
    return None


def interleaved(task, order):
    """Play two two-turn conversations interleaved; a third one starts like the first."""
    client = Client(task)
    talks = {name: [user(f'Item {task.item}, {name}.')] for name in 'ab'}
    for name in order:
        talks[name].append(client.ask(talks[name]))
        talks[name].append(user('Go on.'))
    client.ask(talks['a'][:1])
    return 1.0


in_turn = functools.partial(interleaved, order='abab')
the_other_first = functools.partial(interleaved, order='baba')
one_after_the_other = functools.partial(interleaved, order='bbaa')


def dangers(item):
    """Return 0 to 3; all of them occur among the items of the tests."""
    return item % 23 % 4


def dangerous(task):
    """Depending on the item, play two_turns, die or hang with a child, or raise."""
    kind = dangers(task.item)
    if kind == 0:
        return two_turns(task)
    Client(task).ask([user('Go.')])
    if kind == 3:
        raise OverflowError('too much for me')
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)  # left_by_worker'])
    if kind == 1:
        os._exit(7)
    time.sleep(99)


def alone(task):
    """Send no request; odd items hang, with a child."""
    if task.item % 2:
        subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)  # left_by_alone'])
    return 0.25, True


def __getattr__(name):
    """Return a harness that plays in the dialect at the end of the name."""
    harness, _, dialect = name.rpartition('_')
    if dialect not in DIALECTS or harness not in globals():
        raise AttributeError(name)

    def play(task):
        NOW.dialect = dialect
        return globals()[harness](task)

    return play
