"""Requests of a rollout to its environments, with deadlines, retries and outage handling.

Late replies, faults and outages are handled here: a rollout only receives replies and failed
episodes. Nothing else depends on the clock.
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

RETRY_S, LONGEST_RETRY_S = 0.25, 30.0  # first and longest delay between retries
OUTAGE_POLL_S = 0.5  # how often to check whether the run should stop


class WorldsFailed(files.Failure):
    """An outage lasted too long, or too few episodes were healthy: the run cannot continue.

    The cause is outside of the program, so commands report it in one line.
    """


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Limits on timeouts, retries, outages and faulty episodes."""

    timeout_s: Annotated[float, POSITIVE] = 120.0  # an environment that takes longer is replaced by
    # a fresh one
    tries: Annotated[int, ONE] = 3  # attempts at a step, each in a fresh environment, before its
    # episode is faulty
    outage_s: Annotated[float, ZERO] = 3600.0  # how long the run waits if no environment can be
    # reached
    min_healthy: Annotated[float, SHARE] = 0.5  # fraction of a rollout's episodes that must be
    # healthy


@dataclasses.dataclass
class Call:
    """A pending request."""

    request: Request
    asked: float  # start time
    deadline: float
    tries: int = 0  # failed attempts
    downs: int = 0  # consecutive attempts with an unreachable server


@dataclasses.dataclass(eq=False)
class WorldCalls:
    """The pending requests of a rollout, at most one per slot."""

    pool: Any
    policy: RetryPolicy
    _: dataclasses.KW_ONLY
    log: Any
    say: Callable[[str], None]
    asked: Callable[[], bool]  # whether the run should stop: interrupts a waiting rollout
    under_way: dict[int, Call] = dataclasses.field(default_factory=dict)  # by slot
    deterministic: set[int] = dataclasses.field(default_factory=set)  # slots
    down: dict[int, str] = dataclasses.field(default_factory=dict)  # unreachable: slot -> reason
    down_since: float = math.inf
    reply_s: float = 0.0  # running mean
    last_fault: str = ''
    counted: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def ask(self, request: Request) -> None:
        """Send a request to the environment of its slot."""
        now = time.monotonic()
        self._submit(Call(request, now, now + self.policy.timeout_s))

    def _submit(self, call: Call) -> None:
        self.under_way[call.request.slot] = call
        self.pool.submit(call.request)

    def _ask_again(self, call: Call, delay: float) -> None:
        """Retry after a delay, in a fresh environment that replays the steps so far."""
        request = dataclasses.replace(call.request, delay=delay)
        start = time.monotonic() + delay
        deadline = start + (1 + len(request.actions)) * self.policy.timeout_s
        self._submit(dataclasses.replace(call, request=request, asked=start, deadline=deadline))

    def next(self, until: float, sampling: bool) -> Response | None:
        """Return the next reply or final fault; None if none arrives before `until`.

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
                continue  # from an abandoned environment, or for another rollout
            if self._settle(call, response, sampling):
                return response
        return None

    def _take(self, until: float) -> Response | None:
        wait = until - time.monotonic()
        if self.asked():
            down = ' while all environments are down' if self.down_since < math.inf else ''
            self.say(f'stop requested{down}: a resumed run repeats this step')
            raise processes.Interrupted
        wait = min(wait, OUTAGE_POLL_S)
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
        """Return whether a response is final. If it is not, the request has been retried."""
        slot = call.request.slot
        del self.under_way[slot]
        if response.deterministic is not None:
            (self.deterministic.add if response.deterministic else self.deterministic.discard)(slot)
        if response.fault:
            return self._settle_fault(call, response, sampling)
        if self.down.pop(slot, None) and self.down_since < math.inf:
            self.say(f'environments are back after {time.monotonic() - self.down_since:.0f} s')
            self.down_since = math.inf
        self.log.write(response, '', call.tries + 1)
        self.counted['replies'] += 1
        self.counted['reply_s'] += response.seconds
        self.counted['slowest_s'] = max(self.counted['slowest_s'], response.seconds)
        self.reply_s += 0.1 * (response.seconds - self.reply_s)
        return True

    def _settle_fault(self, call: Call, response: Response, sampling: bool) -> bool:
        """Retry as often as the policy allows; return True when the episode has failed."""
        self.last_fault = shown(response.fault)  # logs of older versions may hold unescaped text
        # A first observation can always be requested again; later turns need determinism.
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
        """Report the start of an outage, and raise WorldsFailed when it lasts too long."""
        now = time.monotonic()
        if sampling or self.down.keys() < self.under_way.keys():
            self.down_since = math.inf
        elif self.down_since == math.inf:
            self.down_since = now
            self.say(
                f'paused: all {len(self.down)} environments are down ({self.last_fault}); retrying '
                f'for {self.policy.outage_s:.0f} s'
            )
        elif now - self.down_since > self.policy.outage_s:
            raise WorldsFailed(
                f'all environments have been down for {now - self.down_since:.0f} s '
                f'(hosts.outage_s={self.policy.outage_s:g}): {self.last_fault}'
            )
