"""The host's loop of a rollout against hosts: episodes, their worlds, and when to do what.

A turn's answer comes down as token ids, its text goes to the world, and whenever enough replies are
there they are read while the other rows go on sampling. So caches stay on the device between turns,
nothing is read twice, and nobody waits for a straggler.
"""

import collections
import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs.hosts.world import Answer, Reply, Sampling
from agentrl_jax.rollout import windows
from agentrl_jax.rollout.host_slots import (
    NOTHING,
    Slot,
    branch_places,
    empty_record,
    figures_of,
)
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.rollout.programs import READ_HEADER, REPORT_HEADER, Ends, Programs
from agentrl_jax.rollout.world_calls import WorldCalls, WorldsFailed
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Conversation, HostTask, Prompt, action_hash
from agentrl_jax.types import EpisodeStop, Params, TurnStop

NO_LIMIT = 2**30
FIRST_STEP_S = 0.01  # that a step of all rows takes, until one has been measured
ROUNDS = 3  # times that faulty episodes are played before too few healthy ones are an error


@dataclasses.dataclass(eq=False)
class HostRollout:
    """One rollout while it is played; `play` returns when every episode is over."""

    programs: Programs
    conversation: Conversation
    calls: WorldCalls
    _: dataclasses.KW_ONLY
    params: Params
    key: jax.Array
    task: HostTask
    ends: Ends
    level: np.ndarray
    stream: np.ndarray
    poll: int
    remember: bool = False  # what happened in each episode, in `events`, for rewards.episode_of
    step_s: float = FIRST_STEP_S  # running mean

    def __post_init__(self):
        shards, self.settings = self.programs.shards, self.programs.settings
        self.counted = self.calls.counted
        self.items = np.asarray(self.task.env_params.items)
        self.words, self.offers = self.ends.words
        self.out = empty_record(self.task, self.level, self.settings.max_tokens, self.words)
        self.state = self.programs.start(self.params, np.asarray(self.task.prefix), self.ends)
        self.slots = [Slot(number) for number in range(shards * self.settings.slots)]
        self.episodes: collections.deque = collections.deque()
        self.events: dict[int, list] = {}  # of rows of the rollout
        self.opens_at = len(self.task.prefix)  # where conversations begin in the cache
        self.ready = [collections.deque() for _ in range(shards)]  # slots with chunks
        self.copy([[] for _ in self.ready])  # compiled with the others, not when first wanted
        self.live = np.zeros(shards, int)
        self.left = np.zeros(shards, int)  # stopped rows that were not reported

    def in_flight(self) -> dict[str, Any]:
        """Where the rollout is, for a live line; may be called from another thread."""
        now = time.monotonic()
        calls = list(self.calls.under_way.values())  # at once, for it changes
        seated = sum(slot.episode >= 0 for slot in self.slots)
        return {
            'waited for': len(calls),
            'slowest': f'{max([now - call.asked for call in calls], default=0.0):.1f} s',
            'on the device': max(seated - len(calls), 0),
            'to begin': len(self.episodes),
            'retries': self.counted['retries'],
            'faults': self.counted['faults'],
        }

    def play(self, episodes: list[int]) -> None:
        """Plays the given rows of the rollout."""
        self.episodes.extend(episodes)
        self.seat()
        while not self.is_over():
            self.advance()

    def seat(self) -> None:
        """Slots without an episode begin the next ones."""
        for slot in self.slots:
            if slot.episode < 0:
                self.begin_episode(slot)

    def is_over(self) -> bool:
        """Whether all that is waited for has been played."""
        return not (self.calls.under_way or self.is_sampling() or any(self.ready))

    def advance(self) -> None:
        """Takes replies, reads what is due, and samples for a while."""
        self.poll_replies()
        while self.is_due():
            self.read()
        if self.is_sampling():
            self.decode()

    def play_until_healthy(self, episodes: list[int]) -> None:
        """play, and faulty episodes again while too few are healthy."""
        again, least = episodes, self.calls.policy.min_healthy
        for turn in range(1, ROUNDS + 1):
            self.play(again)
            faulty = [b for b in again if self.out.episode_stop[b] == EpisodeStop.ENV_ERROR]
            lost = f'{len(faulty)} of {len(episodes)} episodes were lost to their worlds'
            if len(episodes) - len(faulty) >= least * len(episodes):
                return
            if turn == ROUNDS:
                raise WorldsFailed(
                    f'{lost}, and {ROUNDS - 1} times more when they were played again '
                    f'(hosts.min_healthy={least:g}): {self.calls.last_fault}'
                )
            self.calls.say(f'{lost} and are played again: {self.calls.last_fault}')
            self.empty(faulty, self.out.level[faulty])
            again = faulty

    def empty(self, rows: Any, level: np.ndarray) -> None:
        """Empties rows of the record for episodes of levels int32."""
        fresh = empty_record(self.task, level, self.out.tokens.shape[1], self.words)
        for x, new in zip(jax.tree.leaves(self.out), jax.tree.leaves(fresh), strict=True):
            x[rows] = new

    # -- episodes and worlds

    def begin_episode(self, slot: Slot) -> None:
        """Gives a slot the next episode of the list, if there is one."""
        slot.episode = self.next_episode()
        slot.turn, slot.length, slot.actions, slot.replies = 0, len(self.task.prefix), (), ()
        slot.now = agents.begin(self.task.agent)
        slot.cut, slot.cuts = EpisodeStop.NONE, 0
        slot.branch, slot.opening, slot.read = 0, NOTHING, 0
        if slot.episode >= 0:
            self.events[slot.episode] = []
            self.ask(slot)

    def next_episode(self) -> int:
        """Takes an episode from the list; -1 if none may begin."""
        return self.episodes.popleft() if self.episodes else -1

    def note(self, slot: Slot, event: Any) -> None:
        if self.remember:
            self.events[slot.episode].append(event)

    def ask(self, slot: Slot) -> None:
        """Asks the world of a slot for the reply to the last of its actions."""
        request = Request(
            slot=slot.number,
            stream=int(self.stream[slot.episode]),
            item=int(self.items[self.out.level[slot.episode]]),
            actions=slot.actions,
            replies=slot.replies,
            trial=int(slot.now.trial),
            turn=slot.turn + bool(slot.actions and not slot.cut),
            cut=slot.cut.name if slot.cut else '',
            cuts=slot.cuts if slot.cut else 0,
        )
        self.calls.ask(request)

    def poll_replies(self) -> None:
        """Takes the replies that are there.

        Waits for one where the device has nothing to do, and otherwise for as long as `grace`.
        """
        began = time.monotonic()
        until = began + self.grace()
        busy = self.is_sampling() or self.is_due()
        while not self.is_over():
            response = self.calls.next(until if busy else math.inf, bool(self.live.any()))
            if response is None:
                break
            slot = self.slots[response.request.slot]
            if response.fault:
                self.on_fault(slot)
            else:
                self.on_reply(slot, response)
            busy = self.is_sampling() or self.is_due()  # a row that copied a cache samples at once
            until = time.monotonic() + self.grace()
        if not self.is_sampling():
            self.counted['waited_s'] += time.monotonic() - began

    def grace(self) -> float:
        """Seconds that rows which could sample wait for one more reply: a step's time, or none.

        They wait where worlds answer within a step, and where most rows wait for worlds that are
        not much slower: rows that go on together need fewer steps than rows one after another.
        """
        steps = self.poll if len(self.calls.under_way) > self.live.sum() else 1
        return self.step_s if self.calls.reply_s < self.step_s * steps else 0.0

    def on_fault(self, slot: Slot) -> None:
        """The episode is lost to its world."""
        b = slot.episode
        self.out.episode_stop[b], self.out.success[b] = EpisodeStop.ENV_ERROR, False
        self.out.num_turns[b] = slot.turn + bool(slot.actions and not slot.cut)
        self.begin_episode(slot)

    def on_reply(self, slot: Slot, response: Response) -> None:
        """Records what the world said, to the last answer if there was one."""
        reply, b, k, out = response.reply, slot.episode, slot.turn, self.out
        if slot.cut and reply.done:
            self.on_earned(slot, response)
            return
        self.note(slot, response)
        self.counted['cut'] += response.prompt.cut
        slot.heard, stop, fresh = response, EpisodeStop.NONE, False
        if slot.actions and not slot.cut:
            out.rewards[b, k] = reply.reward
            out.valid[b, k], out.judged[b, k] = bool(reply.valid), reply.valid is not None
            out.num_actions[b, k] = 1
            of_trial = out.trial[b, : k + 1] == slot.now.trial
            self.record_outcome(b, reply, out.rewards[b, : k + 1][of_trial])
            stop, fresh = self.end_turn(slot, reply.done)
        slot.replies += (reply,)
        slot.cut = EpisodeStop.NONE
        self.go_on(slot, stop, fresh)

    def record_outcome(self, b: int, reply: Reply, rewards: np.ndarray) -> None:
        """Success and figures of an episode by its last reply; rewards: of its trial."""
        returned = self.task.env.solved(rewards.sum())
        self.out.success[b] = returned if reply.success is None else reply.success
        if self.out.figures is not None:
            self.out.figures[b] = figures_of(reply, self.task.env)

    def end_turn(self, slot: Slot, done: bool) -> tuple[EpisodeStop, bool]:
        """(why the episode ends after this turn, whether a trial begins after it)."""
        slot.turn += 1
        self.out.num_turns[slot.episode] = slot.turn
        stop, slot.now, fresh = agents.end_turn(
            self.task.agent,
            slot.now,
            turn=slot.turn,
            turn_limit=int(self.task.turn_limit),
            done=done,
            success=self.out.success[slot.episode],
            xp=np,
        )
        return EpisodeStop(int(stop)), bool(fresh)

    def go_on(self, slot: Slot, stop: EpisodeStop, fresh: bool) -> None:
        """The next turn of an episode, its next trial, or the next episode."""
        if stop == EpisodeStop.NONE and fresh:
            slot.actions, slot.replies = (), ()
            self.ask(slot)
            return
        if stop == EpisodeStop.NONE:
            prompt = self.prompt(slot)
            missing = self.missing_end(slot, prompt)
            longest = len(missing) + len(prompt.tokens) + self.most(prompt)
            if longest <= self.room(slot, prompt):
                self.write_prompt(slot, prompt, missing)
                return
            stop = EpisodeStop.TOKEN_BUDGET
        if self.task.env.finishes and stop != EpisodeStop.TERMINATED:
            slot.cut, slot.cuts = stop, slot.cuts + 1
            self.ask(slot)
            return
        self.out.episode_stop[slot.episode] = stop
        self.begin_episode(slot)

    def room(self, slot: Slot, prompt: Prompt) -> int:
        """Tokens that are left to the episode, and to the conversation of the prompt."""
        left = self.out.tokens.shape[1] - slot.length
        if not self.task.env.context:
            return left
        prefix = len(self.task.prefix)
        held = prefix + len(branch_places(self.out, slot.episode, prompt.branch, prefix))
        return min(left, self.task.env.context - held)

    def missing_end(self, slot: Slot, prompt: Prompt) -> list[int]:
        """The end of the last answer of the prompt's conversation, where nobody has written it.

        The prefix ends in the end of a turn, and so do answers that have one.
        """
        before = slot.turn - 1
        if self.out.branch is not None:
            earlier = self.out.branch[slot.episode, : slot.turn] == prompt.branch
            before = int(np.flatnonzero(earlier).max(initial=-1)) if not prompt.opens else -1
        ended = before < 0 or self.out.turn_stop[slot.episode, before] == TurnStop.EOS
        return [] if ended or prompt.ends else [self.conversation.chat.end_id]

    def most(self, prompt: Prompt) -> int:
        """Tokens that an answer may have."""
        longest = self.settings.max_response
        return min(prompt.most or longest, longest)

    def on_earned(self, slot: Slot, response: Response) -> None:
        """Pay an episode that was cut, on its last turn; one without a turn is lost."""
        reply, b, out = response.reply, slot.episode, self.out
        if not slot.turn:
            context = self.task.env.context
            self.calls.say(
                'an episode is lost: its first request and an answer do not fit into '
                f'rollout.max_tokens={out.tokens.shape[1]}'
                + (f' and harness.context={context}' if context else '')
            )
            self.counted['faults'] += 1
            self.on_fault(slot)
            return
        self.note(slot, response)
        out.rewards[b, slot.turn - 1] += reply.reward
        self.record_outcome(b, reply, out.rewards[b])
        out.episode_stop[b] = slot.cut
        self.begin_episode(slot)

    def prompt(self, slot: Slot) -> Prompt:
        """Of the turn about to be answered: what the world last said, and what is asked for."""
        heard, now = slot.heard, slot.now
        if now.part == agents.ACT and not now.begins_again:
            return heard.prompt
        made = self.conversation.prompt(heard.reply.observation, heard.instruction, now)
        self.counted['cut'] += made.cut and not heard.prompt.cut
        return made

    # -- rows

    def write_prompt(self, slot: Slot, prompt: Prompt, missing: list[int]) -> None:
        """Writes the prompt of a turn into the record and has it read, in chunks.

        missing: the end of the turn before, where that was not sampled.
        """
        b, k, out, at = slot.episode, slot.turn, self.out, slot.length
        unread = np.array([*missing, *prompt.tokens], np.int32)
        place = slice(at, at + len(unread))
        out.tokens[b, place] = unread
        out.attention_mask[b, place] = True
        out.turn[b, place] = k
        out.begin[b, k] = at + len(missing)
        out.part[b, k], out.trial[b, k] = slot.now.part, slot.now.trial
        out.anchor[b, k] = prompt.anchor ^ agents.kind(slot.now)
        slot.length += len(unread)
        if out.branch is not None:
            at, unread = self.unread(slot, prompt, unread)
        if self.settings.window:
            tokens, (at,), (count,) = windows.read_again(
                out,
                np.array([b]),
                np.array([k]),
                self.settings.context(self.task),
                pad_id=self.task.pad_id,
                xp=np,
            )
            unread = tokens[0, :count]
        self.enqueue(slot, at, unread)

    def enqueue(self, slot: Slot, at: int, unread: np.ndarray) -> None:
        """Has a prompt read from a position of the cache on, or copied from another slot."""
        width, begins = self.programs.width, at == self.opens_at
        shares = begins and not self.settings.window
        donor, shared = self.donor(slot, unread) if shares else (None, 0)
        for i in range(shared, len(unread), width):
            slot.chunks.append((at + i, unread[i : i + width]))
        if begins:
            slot.opening, slot.read = unread, 0
        if not donor:
            self.ready[slot.number // self.settings.slots].append(slot)
            return
        donor.followers.append((slot, shared))
        self.release([donor])

    def donor(self, slot: Slot, unread: np.ndarray) -> tuple[Slot | None, int]:
        """(a slot of the same shard whose conversation begins in the same way, tokens of that).

        All of them, or whole chunks, so that the rest is read as it would be without a donor, and
        not the last one, which the row has to read itself.
        """
        width, rows = self.programs.width, self.settings.slots
        first = slot.number // rows * rows
        best, most = None, 0
        for other in self.slots[first : first + rows]:
            size = min(len(other.opening), len(unread))
            # Who waits for all of another's opening is no donor: the other one is
            waits = not other.chunks and other.read < len(other.opening)
            if other is slot or waits or size <= most:
                continue
            differ = np.flatnonzero(other.opening[:size] != unread[:size])
            same = int(differ[0]) if len(differ) else size
            if not same == len(unread) == len(other.opening):
                same = min(same, len(unread) - 1) // width * width
            if same > most:
                best, most = other, same
        return best, most

    def release(self, donors: list[Slot]) -> None:
        """Followers of slots that have read enough copy their caches, and read on or sample."""
        rows, lines = self.settings.slots, self.settings.serve_rows
        copies: list[list] = [[] for _ in self.ready]
        for donor in donors:
            waiting, donor.followers = donor.followers, []
            for slot, shared in waiting:
                if donor.read < shared:
                    donor.followers.append((slot, shared))
                    continue
                shard = slot.number // rows
                head = self.head(slot, self.opens_at, shared)
                copies[shard].append((donor.number % rows, *head))
                if slot.chunks:
                    self.ready[shard].append(slot)
                self.live[shard] += not slot.chunks
                slot.read = shared
                self.counted['shared'] += shared
        while any(copies):
            self.copy([own[:lines] for own in copies])
            copies = [own[lines:] for own in copies]

    def copy(self, copies: list[list[tuple[int, ...]]]) -> None:
        """Copies caches of rows, at most serve_rows of each shard: lines of programs.copy."""
        lines = self.settings.serve_rows
        block = np.zeros((len(copies), lines, 1 + READ_HEADER + self.offers), np.int32)
        block[:, :, 1] = self.settings.slots
        for shard, own in enumerate(copies):
            if own:
                block[shard, : len(own)] = own
        self.state = self.programs.copy(self.state, self.ends, block.reshape(-1, block.shape[2]))

    def head(self, slot: Slot, at: int, count: int) -> tuple[int, ...]:
        """Of a line for the device: `count` tokens from position `at` on are in a row's cache."""
        last = int(not slot.chunks)
        whole = at + count == self.opens_at + len(slot.opening)
        numbers = slot.number % self.settings.slots, at, count, *self.draws(slot)
        numbers += last + (last and whole), int(slot.now.part)
        numbers += self.most(slot.heard.prompt), *self.sampling(slot.heard.prompt)
        return (*numbers, *(self.task.offered(slot.heard.offers) if self.offers else ()))

    def sampling(self, prompt: Prompt) -> list[int]:
        """Bits of the temperature and top_p of an answer."""
        own = prompt.sampling or Sampling()
        of_run = self.settings.sampler
        given = (own.temperature, of_run.temperature), (own.top_p, of_run.top_p)
        values = [default if value is None else value for value, default in given]
        return np.array(values, np.float32).view(np.int32).tolist()

    def draws(self, slot: Slot) -> tuple[int, int]:
        """(position, random stream) of the next draw.

        Of one of several conversations a function of its own tokens and its beginning alone: those
        of an episode may take turns in any order.
        """
        stream, inner = int(self.stream[slot.episode]), slot.heard.prompt.stream
        own = slot.heard.prompt.sampling
        if own is not None and own.seed is not None:
            return slot.context, action_hash(f'seed {own.seed}')
        if not inner:
            return slot.length, stream
        return slot.context, action_hash(f'{stream} {inner}')

    def unread(self, slot: Slot, prompt: Prompt, fresh: np.ndarray) -> tuple[int, np.ndarray]:
        """(position in the cache, tokens) of what is to be read of the prompt's conversation.

        fresh: what was written of it last; all of it where the cache holds another one.
        """
        b, prefix = slot.episode, len(self.task.prefix)
        self.out.branch[b, slot.turn] = prompt.branch
        own = branch_places(self.out, b, prompt.branch, prefix)
        held = slot.branch == prompt.branch and not prompt.opens
        slot.branch, slot.context = prompt.branch, prefix + len(own)
        fresh = fresh if held else self.out.tokens[b, own]
        return prefix + len(own) - len(fresh), fresh

    def is_sampling(self) -> bool:
        return bool(self.live.any() or self.left.any())

    def is_due(self) -> bool:
        """Whether a block of some shard is as full as it will soon be."""
        enough = np.minimum(self.settings.serve_rows, np.maximum(self.live, 1))
        return any(len(slots) >= least for slots, least in zip(self.ready, enough, strict=True))

    def read(self) -> None:
        """Reads the next chunk of up to serve_rows slots of each shard."""
        lines, text = self.settings.serve_rows, READ_HEADER + self.offers
        block = np.zeros((self.programs.shards, lines, text + self.programs.width), np.int32)
        block[:, :, 0] = self.settings.slots
        readers = []
        for shard, slots in enumerate(self.ready):
            unfinished = []
            for line in range(min(lines, len(slots))):
                slot = slots.popleft()
                at, tokens = slot.chunks.popleft()
                block[shard, line, :text] = self.head(slot, at, len(tokens))
                block[shard, line, text : text + len(tokens)] = tokens
                slot.read = max(slot.read, at + len(tokens) - self.opens_at)
                readers.append(slot)
                self.live[shard] += not slot.chunks
                unfinished += [slot] if slot.chunks else []
            slots.extendleft(reversed(unfinished))
        blocks = block.reshape(-1, block.shape[2])
        self.state = self.programs.read(self.state, self.params, self.ends, blocks)
        self.counted['reads'] += 1
        self.release([slot for slot in readers if slot.followers])

    def decode(self) -> None:
        """Samples for a while and takes the answers that are complete."""
        until = self.settings.serve_rows - min(
            max(map(len, self.ready)), self.settings.serve_rows - 1
        )
        limit = NO_LIMIT
        if self.calls.under_way:  # looks at replies now and then
            limit = min(max(math.ceil(self.calls.reply_s / self.step_s), 1), self.poll)
        began = time.monotonic()
        self.state, report = self.programs.decode(
            self.state, self.params, self.ends, self.key, np.int32(until), np.int32(limit)
        )
        shards, lines = self.programs.shards, self.settings.serve_rows + 1
        report = np.asarray(report).reshape(shards, lines, -1)
        steps, self.live, self.left = (report[:, -1, i].astype(int) for i in range(REPORT_HEADER))
        if most := int(steps.max()):
            each = (time.monotonic() - began) / most
            # Falls at once, for a program's first call has compiled it
            self.step_s = min(each, self.step_s + 0.1 * (each - self.step_s))
        self.counted['steps'] += most
        for shard in range(shards):
            for line in report[shard, :-1]:
                if line[0] < self.settings.slots:
                    self.on_answer(self.slots[shard * self.settings.slots + line[0]], line)

    def on_answer(self, slot: Slot, line: np.ndarray) -> None:
        """Records the answer of a turn and hands its text to the world."""
        count, stop = int(line[1]), int(line[2])
        longest = self.settings.max_response
        ids, bits = line[REPORT_HEADER : REPORT_HEADER + 2 * longest].reshape(2, -1)[:, :count]
        b, k, out = slot.episode, slot.turn, self.out
        place = slice(slot.length, slot.length + count)
        out.tokens[b, place] = ids
        out.logprobs[b, place] = bits.view(np.float32)
        out.attention_mask[b, place] = True
        out.action_mask[b, place] = True
        out.turn[b, place] = k
        if self.words:
            allowed = line[REPORT_HEADER + 2 * longest :].view(np.uint32)
            out.allowed[b, place] = allowed.reshape(longest, -1)[:count]
        out.turn_stop[b, k] = stop
        slot.length += count
        self.counted['generated'] += count
        sampled = ids[: count - (stop == TurnStop.EOS)].tolist()
        action = self.conversation.said(sampled, slot.now.part)
        self.note(slot, (slot.now.part, action))
        if self.task.env.chats:
            action = self.as_answer(slot, action, place)
        if slot.now.part == agents.ACT:
            out.actions[b, k, 0] = action_hash(action)
            slot.actions += (action,)
            self.ask(slot)
        else:
            out.valid[b, k] = agents.WRITTEN[int(slot.now.part)].closing in action
            out.judged[b, k] = True
            self.go_on(slot, *self.end_turn(slot, done=False))

    def as_answer(self, slot: Slot, text: str, place: slice) -> Answer:
        """The answer that was written there, with what clients of a model want to know of it."""
        b, out, prefix = slot.episode, self.out, len(self.task.prefix)
        answer, decode = Answer(text), self.conversation.chat.tokenizer.decode_bytes
        answer.ids = tuple(out.tokens[b, place].tolist())
        answer.logprobs = tuple(out.logprobs[b, place].tolist())
        answer.pieces = tuple(decode([token]) for token in answer.ids)
        own = branch_places(out, b, slot.branch, prefix)
        before = np.r_[np.arange(prefix), own[own < place.start]]
        answer.prompt = tuple(out.tokens[b, before].tolist())
        stop = out.turn_stop[b, slot.turn]
        answer.closed = bool(stop == TurnStop.EOS)
        answer.finish = 'length' if stop == TurnStop.LENGTH else 'stop'
        answer.calls = self.conversation.chat.wording.calls
        return answer
