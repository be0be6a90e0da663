"""A world of OpenEnv: a session over a WebSocket, one message a call (openenv 0.10).

Only `websockets` is needed here. The library answers pings in a thread of its own, so a session
lives through whatever time the policy takes. OpenEnv's HTTP routes make a fresh environment with
each call and are of no use for episodes.
"""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment, hashed
from agentrl_jax.envs.hosts.connection import number_of, parsed, split, text_of, truth_of
from agentrl_jax.envs.hosts.world import LARGEST, Reply, WorldDown, WorldError, shown
from agentrl_jax.settings.marks import MANY, POSITIVE

ROOM = 'CAPACITY_REACHED'  # all of max_concurrent_envs sessions are taken: ask again later
MOST_BYTES = 2**20  # of a message
OF_AN_ACTION = ('EXECUTION_ERROR', 'VALIDATION_ERROR')  # the session lives on after these


@dataclasses.dataclass(frozen=True)
class Play:
    """Of a session."""

    url: str = ''  # of the server: http://host:port
    action_field: str = ''  # of its Action that takes what the policy writes
    observation_field: str = ''  # of its Observation that is shown; '' = all of it, as JSON
    item_field: str = 'seed'  # of reset that takes the item
    instruction: str = ''  # what the task is
    deterministic: bool = False  # the same item and actions give the same replies
    errors_are_shown: bool = False  # what an action raises there is an observation, and no fault
    timeout_s: Annotated[float, POSITIVE] = 60.0  # of a call


class OpenEnv:
    """One session; opened by the first reset, kept over episodes until it fails."""

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
        data = self._ask('reset', {self.play.item_field: item})
        return self._shown('reset', data)

    def step(self, action: str) -> Reply:
        if self._session is None:
            raise WorldError('step: the session has failed or was never reset')
        data = self._ask('step', {self.play.action_field: action})
        if 'code' in data:
            return Reply(text_of(data['message'], 'step'), valid=False)
        with self._ending():
            if 'done' not in data:
                raise WorldError(f'step: no done in {data!r:.200}')
            done = truth_of(data['done'], 'step')
            given = data['reward'] if 'reward' in data else None
            reward = 0.0 if given is None else number_of(given, (-LARGEST, LARGEST), 'step')
        return Reply(self._shown('step', data), reward=reward, done=done)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            from websockets.exceptions import WebSocketException

            with contextlib.suppress(OSError, WebSocketException):
                session.send('{"type": "close"}')
            self._opened.close()

    def _open(self) -> None:
        from websockets.exceptions import WebSocketException
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
        except (OSError, WebSocketException) as error:
            raise WorldDown(f'{self.url} cannot be reached: {error}') from error

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """A session that failed is not used again: an answer that is late would answer the next."""
        from websockets.exceptions import WebSocketException

        whole = False
        try:
            yield
            whole = True
        except TimeoutError:
            raise WorldError(f'{self.url}: no answer within {self.play.timeout_s:g} s') from None
        except (OSError, WebSocketException) as error:
            raise WorldError(f'{self.url}: {error!r}'[:400]) from error
        finally:
            if not whole:
                self.close()

    def _ask(self, kind: str, data: dict) -> dict:
        """Data of the answer: an observation's, or of an error that is shown."""
        from websockets.exceptions import ConnectionClosed

        with self._ending():
            with contextlib.suppress(ConnectionClosed):  # a full server says so and closes
                self._session.send(json.dumps({'type': kind, 'data': data}, allow_nan=False))
            message = parsed(self._session.recv(timeout=self.play.timeout_s), kind)
            if not isinstance(message, dict) or not isinstance(message.get('data'), dict):
                raise WorldError(f'{kind}: no message of OpenEnv: {message!r:.200}')
            answer, said = message['data'], message.get('type')
            code = answer.get('code') if said == 'error' else None
            if code == ROOM:
                raise WorldDown(f'{self.url}: {answer.get("message")!s:.200}')
            shown = self.play.errors_are_shown and kind == 'step' and code in OF_AN_ACTION
            if said != 'observation' and not shown:
                raise WorldError(f'{kind}: {answer!r:.400}')
            return answer

    def _shown(self, kind: str, data: dict) -> str:
        with self._ending():
            seen = data.get('observation')
            field = self.play.observation_field
            if not field:
                return json.dumps(seen, ensure_ascii=False)
            if not isinstance(seen, dict) or field not in seen:
                raise WorldError(f'{kind}: no {field} in {seen!r:.200}')
            return text_of(seen[field], kind)


@dataclasses.dataclass(frozen=True)
class OpenEnvEnvironment(Play, HostEnvironment):
    """Any environment of OpenEnv behind a server."""

    num_items: Annotated[int, MANY] = 1000  # items 0 .. num_items - 1

    name, here = 'openenv', False  # Play comes first: its instruction is a field

    def check(self) -> None:
        importlib.import_module('websockets')

    def make(self) -> OpenEnv:
        return OpenEnv(self)

    def item_range(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)
