"""What a rollout asks of its worlds: who is asked, until when, how often again, and when it ends.

Late replies, faults and outages are settled here, so that a rollout sees replies and episodes that
are lost. The clock decides nothing else.
"""

import collections
import dataclasses
import math
import queue
import time
from collections.abc import Callable
from typing import Annotated, Any

from agentrl_jax.envs.hosts.world import shown
from agentrl_jax.machine import files, processes
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.settings.marks import ONE, POSITIVE, SHARE, ZERO

RETRY_S, LONGEST_RETRY_S = 0.25, 30.0  # between questions whether a world is there again
LOOK_S = 0.5  # between looks at whether the run was asked to stop


class WorldsFailed(files.Failure):
    """No world was there for too long, or too few episodes came through: the run cannot go on.

    What is wrong is outside of the program, so commands say it in a line.
    """


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """What is tolerated of worlds before an episode, or the run, is given up."""

    timeout_s: Annotated[float, POSITIVE] = 120.0  # a world that is later is given up, and a fresh
    # one takes over
    tries: Annotated[int, ONE] = 3  # of a step, each in a fresh world, before its episode is a
    # faulty one
    outage_s: Annotated[float, ZERO] = 3600.0  # the run waits this long when no world can be
    # reached
    min_healthy: Annotated[float, SHARE] = 0.5  # share of a rollout's episodes that must not be
    # faulty


@dataclasses.dataclass
class Call:
    """A request under way."""

    request: Request
    asked: float  # when it begins
    deadline: float
    tries: int = 0  # that failed
    downs: int = 0  # times in a row that nobody was there


@dataclasses.dataclass(eq=False)
class WorldCalls:
    """The requests of one rollout, at most one for each slot."""

    pool: Any
    policy: RetryPolicy
    _: dataclasses.KW_ONLY
    log: Any
    say: Callable[[str], None]
    asked: Callable[[], bool]  # whether the run should stop: ends a rollout that waits for worlds
    under_way: dict[int, Call] = dataclasses.field(default_factory=dict)  # of slots
    deterministic: set[int] = dataclasses.field(default_factory=set)  # slots of such worlds
    down: dict[int, str] = dataclasses.field(default_factory=dict)  # slots without a world, and why
    down_since: float = math.inf
    reply_s: float = 0.0  # running mean
    last_fault: str = ''
    counted: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def ask(self, request: Request) -> None:
        """Asks the world of a slot for the reply to the last of the request's actions."""
        now = time.monotonic()
        self._submit(Call(request, now, now + self.policy.timeout_s))

    def _submit(self, call: Call) -> None:
        self.under_way[call.request.slot] = call
        self.pool.submit(call.request)

    def _ask_again(self, call: Call, delay: float) -> None:
        """Asks after a delay, in a fresh world, which takes the steps so far once more."""
        request = dataclasses.replace(call.request, delay=delay)
        asked = time.monotonic() + delay
        deadline = asked + (1 + len(request.actions)) * self.policy.timeout_s
        self._submit(dataclasses.replace(call, request=request, asked=asked, deadline=deadline))

    def next(self, until: float, sampling: bool) -> Response | None:
        """The next reply, or the fault of an episode that is lost; None if none comes by `until`.

        sampling: whether the device has rows that sample.
        """
        while self.under_way:
            first = min(self.under_way.values(), key=lambda call: call.deadline)
            response = self._take(min(until, first.deadline))
            if response is None and first.deadline <= time.monotonic():
                response = self._time_out(first)
            if response is None:
                if self.down_since < math.inf or time.monotonic() >= until:
                    return None
                continue
            call = self.under_way.get(response.request.slot)
            if call is None or call.request is not response.request:
                continue  # of a world that was abandoned, or of another rollout
            if self._settle(call, response, sampling):
                return response
        return None

    def _take(self, until: float) -> Response | None:
        wait = until - time.monotonic()
        if self.asked():
            down = ' while all worlds are down' if self.down_since < math.inf else ''
            self.say(f'asked to stop{down}: the step is played later')
            raise processes.Interrupted
        wait = min(wait, LOOK_S)
        try:
            return self.pool.done.get(timeout=wait) if wait > 0 else self.pool.done.get_nowait()
        except queue.Empty:
            return None

    def _time_out(self, call: Call) -> Response:
        self.pool.abandon(call.request.slot)
        self.counted['timeouts'] += 1
        reason = f'TimeoutError: no reply within {self.policy.timeout_s:g} s'
        return Response(call.request, fault=reason, seconds=time.monotonic() - call.asked)

    def _settle(self, call: Call, response: Response, sampling: bool) -> bool:
        """Whether the response is final; otherwise the world is asked again."""
        slot = call.request.slot
        del self.under_way[slot]
        if response.deterministic is not None:
            (self.deterministic.add if response.deterministic else self.deterministic.discard)(slot)
        if response.fault:
            return self._settle_fault(call, response, sampling)
        if self.down.pop(slot, None) and self.down_since < math.inf:
            self.say(f'worlds answer again, after {time.monotonic() - self.down_since:.0f} s')
            self.down_since = math.inf
        self.log.write(response, '', call.tries + 1)
        self.counted['replies'] += 1
        self.counted['reply_s'] += response.seconds
        self.counted['slowest_s'] = max(self.counted['slowest_s'], response.seconds)
        self.reply_s += 0.1 * (response.seconds - self.reply_s)
        return True

    def _settle_fault(self, call: Call, response: Response, sampling: bool) -> bool:
        """Asks again as often as the policy allows; then the episode is lost."""
        self.last_fault = shown(response.fault)  # older logs may hold other text
        # At the beginning nothing has been shown or said; later a world must repeat itself.
        repeats = not call.request.actions or call.request.slot in self.deterministic
        repeats = repeats and not call.request.cut
        if response.down and repeats:
            call.downs += 1
            self.down[call.request.slot] = response.fault
            self._ask_again(call, min(RETRY_S * 2 ** min(call.downs, 10), LONGEST_RETRY_S))
            self._look_for_outage(sampling)
            return False
        self.down.pop(call.request.slot, None)
        call.tries += 1
        if repeats and call.tries < self.policy.tries:
            self.counted['retries'] += 1
            self._ask_again(call, RETRY_S * (call.tries - 1))
            return False
        self.log.write(response, response.fault, call.tries)
        self.counted['faults'] += 1
        return True

    def _look_for_outage(self, sampling: bool) -> None:
        """Says when no world is there, and ends the run when that has lasted too long."""
        now = time.monotonic()
        if sampling or self.down.keys() < self.under_way.keys():
            self.down_since = math.inf
        elif self.down_since == math.inf:
            self.down_since = now
            self.say(
                f'paused: all {len(self.down)} worlds are down ({self.last_fault}); they are asked '
                f'again for {self.policy.outage_s:.0f} s'
            )
        elif now - self.down_since > self.policy.outage_s:
            raise WorldsFailed(
                f'all worlds have been down for {now - self.down_since:.0f} s '
                f'(hosts.outage_s={self.policy.outage_s:g}): {self.last_fault}'
            )
