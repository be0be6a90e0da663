"""An OpenEnv environment: a session over a WebSocket, one message per call (openenv 0.10).

Only `websockets` is required. It answers pings in a background thread, so a session survives a slow
policy. OpenEnv's HTTP routes create a new environment per call, so they cannot play episodes.
"""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pydantic

from agentrl_jax.envs.hosts.base import HostEnvironment, hashed
from agentrl_jax.envs.hosts.connection import StepReply, Text, parsed, read, split
from agentrl_jax.envs.hosts.world import Reply, WorldDown, WorldError, shown
from agentrl_jax.settings.marks import MANY, POSITIVE, ConfigName

FULL = 'CAPACITY_REACHED'  # all max_concurrent_envs sessions are in use: retry later
MOST_BYTES = 2**20  # per message
OF_AN_ACTION = ('EXECUTION_ERROR', 'VALIDATION_ERROR')  # the session survives these errors


@dataclasses.dataclass(frozen=True)
class Play:
    """Settings of a session."""

    url: str = ''  # of the server: http://host:port
    action_field: str = ''  # field of Action for the policy's text
    observation_field: str = ''  # field of Observation for the policy; '' = all of it, as JSON
    item_field: str = 'seed'  # field of reset for the item
    instruction: Annotated[str, ConfigName('hosts.instruction')] = ''
    deterministic: Annotated[bool, ConfigName('hosts.deterministic')] = False
    errors_are_shown: bool = False  # errors of an action become observations
    timeout_s: Annotated[float, POSITIVE, ConfigName('hosts.call_s')] = 60.0


def failures() -> tuple[type[Exception], ...]:
    """Return the errors of a session; websockets is imported only if it is used."""
    return OSError, importlib.import_module('websockets.exceptions').WebSocketException


class Message(pydantic.BaseModel):
    type: str
    data: dict[str, Any]


class OpenEnv:
    """One session; the first reset opens it, and it is reused for all episodes until it fails."""

    def __init__(self, play: Play):
        scheme = split(play.url, ('http', 'https', 'ws', 'wss')).scheme
        place = play.url.rstrip('/').partition('://')[2]
        self._address = f'{scheme.replace("http", "ws")}://{place}/ws'
        self.url = shown(self._address)  # in errors
        self.play, self.instruction, self.deterministic = play, play.instruction, play.deterministic
        self._session: Any = None
        self._opened = contextlib.ExitStack()

    def reset(self, item: int) -> str:
        if self._session is None:
            self._open()
        with self._tried():
            return self._text('reset', self._call('reset', {self.play.item_field: item}))

    def step(self, action: str) -> Reply:
        if self._session is None:
            raise WorldError('step: the session has failed or was never reset')
        with self._tried():
            data = self._call('step', {self.play.action_field: action})
            if 'code' in data:
                return Reply(read(Text, data['message'], 'step'), valid=False)
            data |= {'observation': self._text('step', data), 'reward': data.get('reward')}
            step = read(StepReply, data, 'step')
            return Reply(step.observation, step.reward or 0.0, step.done)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(*failures()):
                session.send('{"type": "close"}')
            self._opened.close()

    def _open(self) -> None:
        from websockets.sync.client import connect

        try:
            opening = connect(
                self._address,
                open_timeout=self.play.timeout_s,
                close_timeout=2,
                max_size=MOST_BYTES,
                compression=None,
            )
            self._session = self._opened.enter_context(opening)
        except failures() as error:
            raise WorldDown(f'{self.url} cannot be reached: {error}') from error

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """Close a failed session: a late answer would be taken for the answer to the next call."""
        complete = False
        try:
            yield
            complete = True
        except TimeoutError:
            raise WorldError(f'{self.url}: no answer within {self.play.timeout_s:g} s') from None
        except failures() as error:
            raise WorldError(f'{self.url}: {error!r}'[:400]) from error
        finally:
            if not complete:
                self.close()

    def _call(self, kind: str, data: dict) -> dict:
        """Send a call; return the data of an observation, or of an error for the policy."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a full server reports it and closes
            self._session.send(json.dumps({'type': kind, 'data': data}, allow_nan=False))
        message = read(Message, parsed(self._session.recv(self.play.timeout_s), kind), kind)
        code = message.data.get('code') if message.type == 'error' else None
        if code == FULL:
            raise WorldDown(f'{self.url}: {message.data.get("message")!s:.200}')
        is_observed = self.play.errors_are_shown and kind == 'step' and code in OF_AN_ACTION
        if message.type != 'observation' and not is_observed:
            raise WorldError(f'{kind}: {message.data!r:.400}')
        return message.data

    def _text(self, kind: str, data: dict) -> str:
        """Return the observation's text: the configured field, or all of it as JSON."""
        observation, field = data.get('observation'), self.play.observation_field
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or field not in observation:
            raise WorldError(f'{kind}: no {field} in {observation!r:.200}')
        return read(Text, observation[field], kind)


@dataclasses.dataclass(frozen=True)
class OpenEnvEnvironment(Play, HostEnvironment):
    """Any OpenEnv environment on a server."""

    num_items: Annotated[int, MANY, ConfigName('hosts.num_items')] = 1000

    name, here = 'openenv', False  # Play is the first base: its instruction is a field

    def check(self) -> None:
        importlib.import_module('websockets')

    def make(self) -> OpenEnv:
        return OpenEnv(self)

    def item_range(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)
