"""The host's loop of a rollout against hosts: episodes, their worlds, and when to do what.

A turn's answer comes down as token ids, its text goes to the world, and whenever enough replies are
there they are read while the other rows go on sampling. So caches stay on the device between turns,
nothing is read twice, and nobody waits for a straggler.
"""

import collections
import dataclasses
import math
import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from agentrl_jax.envs.hosts.world import Reply, shown
from agentrl_jax.rollout.keepers import Job, Outcome
from agentrl_jax.rollout.programs import HEAD, TALE, Ends, Programs
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Conversation, HostTask, Prompt, action_hash
from agentrl_jax.types import EpisodeStop, Params, TurnStop

NO_LIMIT = 2**30
RETRY_S, LONGEST_RETRY_S = 0.25, 30.0  # between questions whether a world is there again
LOOK_S = 0.5  # between looks, in an outage, at whether the run was asked to stop
FIRST_STEP_S = 0.01  # that a step of all rows takes, until one has been measured
ROUNDS = 3  # times that faulty episodes are played before too few healthy ones are an error


class Interrupted(Exception):
    """The run was asked to stop while all worlds were down: nothing came of the rollout."""


class WorldsFailed(ValueError):
    """No world was there for too long, or too few episodes came through: the run cannot go on.

    What is wrong is outside of the program, so commands say it in a line.
    """


@dataclasses.dataclass(frozen=True)
class Patience:
    """What is borne of worlds before an episode, or the run, is given up."""

    timeout_s: float = 120.0  # a reply may take; a world that is later is left behind
    tries: int = 3  # of a step, each in a fresh world
    outage_s: float = 3600.0  # all worlds may be down
    min_healthy: float = 0.5  # share of the episodes that must not be faulty


@dataclasses.dataclass
class Seat:
    """A row of the device, the world beside it, and the episode they play."""

    number: int
    episode: int = -1  # row of the rollout; -1 = none
    turn: int = 0  # that is being answered
    length: int = 0  # tokens of the episode
    now: agents.Progress | None = None  # where the episode is
    actions: tuple[str, ...] = ()  # of the trial
    replies: tuple = ()
    heard: Outcome | None = None  # the last one with a reply
    chunks: collections.deque = dataclasses.field(default_factory=collections.deque)
    job: Job | None = None  # under way
    asked: float = 0.0  # when the job under way begins
    deadline: float = math.inf
    tries: int = 0  # of the job that failed
    downs: int = 0  # times in a row that nobody was there
    deterministic: bool = False


def empty_record(task: HostTask, level: np.ndarray, max_tokens: int) -> dict[str, np.ndarray]:
    """A Rollout's fields on the host: episodes of levels int32 [E] that hold the prefix alone."""
    prefix = np.asarray(task.prefix)
    grid, turns = (len(level), max_tokens), (len(level), task.max_turns)
    out = {
        'tokens': np.full(grid, task.pad_id, np.int32),
        'logprobs': np.zeros(grid, np.float32),
        'attention_mask': np.zeros(grid, bool),
        'action_mask': np.zeros(grid, bool),
        'turn': np.full(grid, -1, np.int32),
        'begin': np.zeros(turns, np.int32),
        'part': np.zeros(turns, np.int32),
        'trial': np.zeros(turns, np.int32),
        'anchor': np.zeros(turns, np.uint32),
        'rewards': np.zeros(turns, np.float32),
        'penalties': np.zeros(turns, np.float32),
        'turn_stop': np.zeros(turns, np.int32),
        'valid': np.zeros(turns, bool),
        'judged': np.zeros(turns, bool),
        'num_actions': np.zeros(turns, np.int32),
        'actions': np.full((*turns, 1), -1, np.int32),
        'num_turns': np.zeros(len(level), np.int32),
        'episode_stop': np.zeros(len(level), np.int32),
        'success': np.zeros(len(level), bool),
        'level': np.array(level, np.int32),
    }
    if task.env.FIGURES:
        out['figures'] = np.zeros((len(level), len(task.env.FIGURES)), np.float32)
    out['tokens'][:, : len(prefix)] = prefix
    out['attention_mask'][:, : len(prefix)] = True
    out['turn'][:, : len(prefix)] = 0
    return out


def figures_of(reply: Reply, env: Any) -> tuple[float, ...]:
    """What a reply measures; nan where the server, another than ours, measures nothing."""
    if len(reply.figures) not in (0, len(env.FIGURES)):
        raise ValueError(
            f'{env.name}: a reply measures {len(reply.figures)} figures, which should be '
            f'{", ".join(env.FIGURES)}: settings of the run and of its server differ'
        )
    return reply.figures or (np.nan,) * len(env.FIGURES)


class InFlight(NamedTuple):
    """Where a rollout is, at one moment."""

    waiting: int  # episodes, for their worlds
    playing: int  # that the device works on
    left: int  # that have not begun
    slowest_s: float  # of the worlds that are waited for
    retries: int
    faults: int


class Game:
    """One rollout while it is played; `play` returns when every episode is over."""

    def __init__(
        self,
        programs: Programs,
        pool: Any,
        conversation: Conversation,
        *,
        params: Params,
        key: jax.Array,
        task: HostTask,
        ends: Ends,
        level: np.ndarray,
        stream: np.ndarray,
        max_tokens: int,
        window: int,
        poll: int,
        patience: Patience,
        log: Any,
        say: Callable[[str], None],
        asked: Callable[[], bool] = lambda: False,
        remember: bool = False,
    ):
        """asked: whether the run should stop, which ends a rollout that waits for its worlds.

        remember: what happened in each episode is kept in `events`, for rewards.episode_of.
        """
        self.programs, self.pool, self.conversation = programs, pool, conversation
        self.params, self.key = params, key
        self.task, self.ends, self.stream = task, ends, stream
        self.window, self.poll, self.patience = window, poll, patience
        self.log, self.say, self.asked = log, say, asked
        self.prefix = np.asarray(task.prefix)
        self.turn_limit = int(task.turn_limit)
        self.items = np.asarray(task.env_params.items)
        self.out = empty_record(task, level, max_tokens)
        self.state = programs.start(params, self.prefix)
        self.seats = [Seat(number) for number in range(programs.shards * programs.slots)]
        self.episodes: collections.deque = collections.deque()
        self.remember, self.events = remember, {}  # of rows of the rollout
        self.under_way: set[int] = set()  # seats whose world is asked
        self.down: dict[int, str] = {}  # ... of those whose world was not there, and why
        self.down_since = math.inf
        self.ready = [collections.deque() for _ in range(programs.shards)]  # seats with chunks
        self.live = np.zeros(programs.shards, int)
        self.left = np.zeros(programs.shards, int)  # stopped rows that were not reported
        self.reply_s, self.step_s = 0.0, FIRST_STEP_S  # running means
        self.last_fault = ''
        self.counted: collections.Counter = collections.Counter()

    def in_flight(self) -> InFlight:
        """May be called from another thread."""
        now, seats = time.monotonic(), list(self.under_way)  # at once, for the set changes
        waiting, seated = len(seats), sum(seat.episode >= 0 for seat in self.seats)
        return InFlight(
            waiting=waiting,
            playing=max(seated - waiting, 0),
            left=len(self.episodes),
            slowest_s=max([now - self.seats[number].asked for number in seats], default=0.0),
            retries=self.counted['retries'],
            faults=self.counted['faults'],
        )

    def play(self, episodes: list[int]) -> None:
        """Plays the given rows of the rollout."""
        self.episodes.extend(episodes)
        for seat in self.seats:
            self.begin(seat)
        while self.under_way or self.live.any() or self.left.any() or any(self.ready):
            self.hear()
            while self.is_due():
                self.read()
            if self.live.any() or self.left.any():
                self.decode()

    def play_until_healthy(self, episodes: list[int]) -> None:
        """play, and faulty episodes again while too few are healthy."""
        again = episodes
        for turn in range(1, ROUNDS + 1):
            self.play(again)
            stop = self.out['episode_stop']
            faulty = [b for b in again if stop[b] == EpisodeStop.ENV_ERROR]
            lost = f'{len(faulty)} of {len(episodes)} episodes were lost to their worlds'
            if len(episodes) - len(faulty) >= self.patience.min_healthy * len(episodes):
                return
            if turn == ROUNDS:
                raise WorldsFailed(
                    f'{lost}, and {ROUNDS - 1} times more when they were played again '
                    f'(hosts.min_healthy={self.patience.min_healthy:g}): {self.last_fault}'
                )
            self.say(f'{lost} and are played again: {self.last_fault}')
            level, length = self.out['level'][faulty], self.out['tokens'].shape[1]
            for name, x in empty_record(self.task, level, length).items():
                self.out[name][faulty] = x
            again = faulty

    # -- episodes and worlds

    def begin(self, seat: Seat) -> None:
        """Gives a seat the next episode of the list, if there is one."""
        seat.episode = self.episodes.popleft() if self.episodes else -1
        seat.turn, seat.length, seat.actions, seat.replies = 0, len(self.prefix), (), ()
        seat.now = agents.begin(self.task.agent)
        if seat.episode >= 0:
            self.events[seat.episode] = []
            self.ask(seat)

    def note(self, seat: Seat, event: Any) -> None:
        if self.remember:
            self.events[seat.episode].append(event)

    def ask(self, seat: Seat, delay: float = 0.0, again: bool = False) -> None:
        """Asks the world of a seat for the reply to the last of its actions."""
        b = seat.episode
        seat.job = Job(
            seat=seat.number,
            stream=int(self.stream[b]),
            item=int(self.items[self.out['level'][b]]),
            actions=seat.actions,
            replies=seat.replies,
            delay=delay,
            trial=int(seat.now.trial),
            turn=seat.turn + bool(seat.actions),
        )
        if not again:
            seat.tries = seat.downs = 0
        # A fresh world takes the steps so far once more.
        steps = 1 + len(seat.actions) if again else 1
        seat.asked = time.monotonic() + delay
        seat.deadline = seat.asked + steps * self.patience.timeout_s
        self.under_way.add(seat.number)
        self.pool.submit(seat.job)

    def hear(self) -> None:
        """Takes the replies that are there, and looks at deadlines.

        Waits for one where the device has nothing to do, and otherwise for as long as `grace`.
        """
        busy = self.live.any() or self.left.any() or self.is_due()
        began = time.monotonic()
        until = began + self.grace()
        while self.under_way:
            now = time.monotonic()
            due = min(self.seats[number].deadline for number in self.under_way)
            wait = until - now if busy else due - now
            if self.down_since < math.inf:
                wait = min(wait, LOOK_S)
                if self.asked():
                    self.say('asked to stop while all worlds are down: the step is played later')
                    raise Interrupted
            try:
                outcome = (
                    self.pool.done.get(timeout=wait) if wait > 0 else self.pool.done.get_nowait()
                )
            except queue.Empty:
                if due <= time.monotonic():
                    self.give_up_late_ones()
                    continue
                break
            seat = self.seats[outcome.job.seat] if outcome.job.seat < len(self.seats) else None
            if seat is None or seat.job is not outcome.job:
                continue  # of a world that was left behind, or of another rollout
            self.heard(seat, outcome)
            busy = busy or self.is_due()
            until = time.monotonic() + self.grace()
        if not (self.live.any() or self.left.any()):
            self.counted['waited_s'] += time.monotonic() - began

    def grace(self) -> float:
        """Seconds that rows which could sample wait for one more reply: a step's time, or none.

        They wait where worlds answer within a step, and where most rows wait for worlds that are
        not much slower: rows that go on together need fewer steps than rows one after another.
        """
        most = len(self.under_way) > self.live.sum()
        return self.step_s if self.reply_s < self.step_s * (self.poll if most else 1) else 0.0

    def give_up_late_ones(self) -> None:
        now = time.monotonic()
        for number in [n for n in self.under_way if self.seats[n].deadline <= now]:
            seat = self.seats[number]
            self.pool.abandon(number)
            self.counted['timeouts'] += 1
            reason = f'TimeoutError: no reply within {self.patience.timeout_s:g} s'
            self.heard(seat, Outcome(seat.job, fault=reason, seconds=now - seat.asked))

    def heard(self, seat: Seat, outcome: Outcome) -> None:
        """An answer of the world of a seat, or a fault."""
        self.under_way.discard(seat.number)
        if outcome.deterministic is not None:
            seat.deterministic = outcome.deterministic
        if outcome.fault:
            self.failed(seat, outcome)
            return
        if self.down.pop(seat.number, None) and self.down_since < math.inf:
            self.say(f'worlds answer again, after {time.monotonic() - self.down_since:.0f} s')
            self.down_since = math.inf
        self.log.write(outcome, '', seat.tries + 1)
        self.note(seat, outcome)
        self.counted['replies'] += 1
        self.counted['reply_s'] += outcome.seconds
        self.counted['slowest_s'] = max(self.counted['slowest_s'], outcome.seconds)
        self.counted['cut'] += outcome.prompt.cut
        self.reply_s += 0.1 * (outcome.seconds - self.reply_s)
        seat.heard, stop, fresh = outcome, EpisodeStop.NONE, False
        if seat.actions:
            stop, fresh = self.take(seat, outcome)
        seat.replies += (outcome.reply,)
        self.go_on(seat, stop, fresh)

    def failed(self, seat: Seat, outcome: Outcome) -> None:
        """Asks again, in a fresh world, as often as it may; then the episode is a faulty one."""
        self.last_fault = shown(outcome.fault)  # logs of before may hold others
        # At the beginning nothing has been shown or said; later a world must repeat itself.
        repeats = not seat.actions or seat.deterministic
        if outcome.down and repeats:
            seat.downs += 1
            self.down[seat.number] = outcome.fault
            self.ask(seat, min(RETRY_S * 2 ** min(seat.downs, 10), LONGEST_RETRY_S), again=True)
            self.look_for_outage()
            return
        self.down.pop(seat.number, None)
        seat.tries += 1
        if repeats and seat.tries < self.patience.tries:
            self.counted['retries'] += 1
            self.ask(seat, RETRY_S * (seat.tries - 1), again=True)
            return
        self.log.write(outcome, outcome.fault, seat.tries)
        self.counted['faults'] += 1
        self.out['episode_stop'][seat.episode] = EpisodeStop.ENV_ERROR
        self.out['success'][seat.episode] = False
        self.out['num_turns'][seat.episode] = seat.turn + bool(seat.actions)
        self.begin(seat)

    def look_for_outage(self) -> None:
        """Says when no world is there, and ends the run when that has lasted too long."""
        now = time.monotonic()
        if self.live.any() or self.down.keys() < self.under_way:
            self.down_since = math.inf
        elif self.down_since == math.inf:
            self.down_since = now
            self.say(
                f'paused: all {len(self.down)} worlds are down ({self.last_fault}); they are asked '
                f'again for {self.patience.outage_s:.0f} s'
            )
        elif now - self.down_since > self.patience.outage_s:
            raise WorldsFailed(
                f'all worlds have been down for {now - self.down_since:.0f} s '
                f'(hosts.outage_s={self.patience.outage_s:g}): {self.last_fault}'
            )

    def take(self, seat: Seat, outcome: Outcome) -> tuple[EpisodeStop, bool]:
        """Records what the world said to the last answer; as turn_over."""
        reply, b, k, out = outcome.reply, seat.episode, seat.turn, self.out
        out['rewards'][b, k] = reply.reward
        out['valid'][b, k], out['judged'][b, k] = bool(reply.valid), reply.valid is not None
        out['num_actions'][b, k] = 1
        of_trial = out['trial'][b, : k + 1] == seat.now.trial
        returned = self.task.env.solved(out['rewards'][b, : k + 1][of_trial].sum())
        out['success'][b] = returned if reply.success is None else reply.success
        if 'figures' in out:
            out['figures'][b] = figures_of(reply, self.task.env)
        return self.turn_over(seat, reply.done)

    def turn_over(self, seat: Seat, done: bool) -> tuple[EpisodeStop, bool]:
        """(why the episode ends behind this turn, whether a trial begins behind it)."""
        agent, now, b = self.task.agent, seat.now, seat.episode
        seat.turn += 1
        self.out['num_turns'][b] = seat.turn
        over = seat.turn >= self.turn_limit
        if now.part != agents.REFLECT:
            over |= now.turns + 1 >= agent.trial_turns(self.turn_limit)
        stop = EpisodeStop.TURN_BUDGET if over else EpisodeStop.NONE
        stop = EpisodeStop.TERMINATED if done else stop
        more = now.trial + 1 < agent.trials and seat.turn < self.turn_limit
        again = stop != EpisodeStop.NONE and more and not self.out['success'][b]
        seat.now, fresh = agents.follow(agent, now, again, agent.trial_turns(self.turn_limit))
        return EpisodeStop.NONE if again else stop, fresh

    def go_on(self, seat: Seat, stop: EpisodeStop, fresh: bool) -> None:
        """The next turn of an episode, its next trial, or the next episode."""
        if stop == EpisodeStop.NONE and fresh:
            seat.actions, seat.replies = (), ()
            self.ask(seat)
            return
        if stop == EpisodeStop.NONE:
            prompt = self.prompt(seat)
            longest = self.prompt_length(seat, prompt) + self.programs.max_response
            if seat.length + longest <= self.out['tokens'].shape[1]:
                self.show(seat, prompt)
                return
            stop = EpisodeStop.TOKEN_BUDGET
        self.out['episode_stop'][seat.episode] = stop
        self.begin(seat)

    def prompt(self, seat: Seat) -> Prompt:
        """Of the turn about to be answered: what the world last said, and what is asked for."""
        heard, now = seat.heard, seat.now
        if now.part == agents.ACT and not now.begins_again:
            return heard.prompt
        made = self.conversation.prompt(heard.reply.observation, heard.instruction, now)
        self.counted['cut'] += made.cut and not heard.prompt.cut
        return made

    def has_end(self, seat: Seat) -> bool:
        """Whether the row ends in the end of a turn: the prefix does, and answers that have one."""
        return not seat.turn or self.out['turn_stop'][seat.episode, seat.turn - 1] == TurnStop.EOS

    def prompt_length(self, seat: Seat, prompt: Prompt) -> int:
        return len(prompt.tokens) + (not self.has_end(seat))

    # -- rows

    def show(self, seat: Seat, prompt: Prompt) -> None:
        """Writes the prompt of a turn into the record and has it read, in chunks."""
        b, k, out = seat.episode, seat.turn, self.out
        missing = [] if self.has_end(seat) else [self.conversation.chat.end_id]
        begin = seat.length + len(missing)
        new = [*missing, *prompt.tokens]
        place = slice(seat.length, seat.length + len(new))
        out['tokens'][b, place] = new
        out['attention_mask'][b, place] = True
        out['turn'][b, place] = k
        out['begin'][b, k] = begin
        out['part'][b, k], out['trial'][b, k] = seat.now.part, seat.now.trial
        out['anchor'][b, k] = prompt.anchor ^ agents.kind(seat.now)
        first, at, kept = seat.length, seat.length, slice(0)
        seat.length += len(new)
        if self.window:
            oldest = max(k - self.window + 1, 0)
            first, at = out['begin'][b, oldest], len(self.prefix)
            written = np.flatnonzero(out['part'][b, :k])  # as in windows.kept
            if len(written) and written[-1] < oldest:
                kept = slice(*out['begin'][b, written[-1] :][:2])
        row = out['tokens'][b]
        unread = np.concatenate([row[kept], row[first : seat.length]])
        width = self.programs.width
        for i in range(0, len(unread), width):
            seat.chunks.append((at + i, unread[i : i + width]))
        self.ready[seat.number // self.programs.slots].append(seat)

    def is_due(self) -> bool:
        """Whether a block of some shard is as full as it will soon be."""
        enough = np.minimum(self.programs.serve_rows, np.maximum(self.live, 1))
        return any(len(seats) >= least for seats, least in zip(self.ready, enough, strict=True))

    def read(self) -> None:
        """Reads the next chunk of up to serve_rows seats of each shard."""
        slots, lines = self.programs.slots, self.programs.serve_rows
        block = np.zeros((self.programs.shards, lines, HEAD + self.programs.width), np.int32)
        block[:, :, 0] = slots
        for shard, seats in enumerate(self.ready):
            unfinished = []
            for line in range(min(lines, len(seats))):
                seat = seats.popleft()
                at, tokens = seat.chunks.popleft()
                head = seat.number % slots, at, len(tokens), seat.length
                head += int(self.stream[seat.episode]), not seat.chunks
                block[shard, line, :HEAD] = head
                block[shard, line, HEAD : HEAD + len(tokens)] = tokens
                self.live[shard] += not seat.chunks
                unfinished += [seat] if seat.chunks else []
            seats.extendleft(reversed(unfinished))
        blocks = block.reshape(-1, block.shape[2])
        self.state = self.programs.read(self.state, self.params, blocks)
        self.counted['reads'] += 1

    def decode(self) -> None:
        """Samples for a while and takes the answers that are complete."""
        until = self.programs.serve_rows - min(
            max(map(len, self.ready)), self.programs.serve_rows - 1
        )
        limit = NO_LIMIT
        if self.under_way:  # looks at replies now and then
            limit = min(max(math.ceil(self.reply_s / self.step_s), 1), self.poll)
        began = time.monotonic()
        self.state, report = self.programs.decode(
            self.state, self.params, self.ends, self.key, np.int32(until), np.int32(limit)
        )
        shards, lines = self.programs.shards, self.programs.serve_rows + 1
        report = np.asarray(report).reshape(shards, lines, -1)
        steps, self.live, self.left = (report[:, -1, i].astype(int) for i in range(TALE))
        if most := int(steps.max()):
            each = (time.monotonic() - began) / most
            # Falls at once, for a program's first call has compiled it
            self.step_s = min(each, self.step_s + 0.1 * (each - self.step_s))
        self.counted['steps'] += most
        for shard in range(shards):
            for line in report[shard, :-1]:
                if line[0] < self.programs.slots:
                    self.answered(self.seats[shard * self.programs.slots + line[0]], line)

    def answered(self, seat: Seat, line: np.ndarray) -> None:
        """Records the answer of a turn and hands its text to the world."""
        count, stop = int(line[1]), int(line[2])
        ids, bits = line[TALE : TALE + count], line[TALE + self.programs.max_response :][:count]
        b, k, out = seat.episode, seat.turn, self.out
        place = slice(seat.length, seat.length + count)
        out['tokens'][b, place] = ids
        out['logprobs'][b, place] = bits.view(np.float32)
        out['attention_mask'][b, place] = True
        out['action_mask'][b, place] = True
        out['turn'][b, place] = k
        out['turn_stop'][b, k] = stop
        seat.length += count
        self.counted['generated'] += count
        action = self.conversation.said(ids[: count - (stop == TurnStop.EOS)].tolist())
        self.note(seat, (seat.now.part, action))
        if seat.now.part == agents.ACT:
            out['actions'][b, k, 0] = action_hash(action)
            seat.actions += (action,)
            self.ask(seat)
        else:
            out['valid'][b, k] = agents.WRITTEN[seat.now.part].closing in action
            out['judged'][b, k] = True
            self.go_on(seat, *self.turn_over(seat, done=False))
