"""Host loop of a rollout: tracks episodes and their environments, and schedules the device.

Answers arrive as token ids, and their text goes to the environments. Replies are read as soon as
enough of them have arrived, while the other rows keep sampling. Caches stay on the device between
turns, so no conversation is read twice and no row waits for a straggler.
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
from agentrl_jax.rollout.host_slots import NOTHING, Slot, branch_places, empty_record, figures_of
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.rollout.programs import READ_HEADER, REPORT_HEADER, Programs, StopRules
from agentrl_jax.rollout.world_calls import WorldCalls, WorldsFailed
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Conversation, HostTask, Prompt, action_hash
from agentrl_jax.types import EpisodeStop, Params, TurnStop

NO_LIMIT = 2**30
FIRST_STEP_S = 0.01  # assumed time of one decoding step of all rows until one has been measured
ROUNDS = 3  # attempts at an episode before too few healthy episodes are an error


@dataclasses.dataclass(eq=False)
class HostRollout:
    """A rollout in progress. `play` returns when all of its episodes are over."""

    programs: Programs
    conversation: Conversation
    calls: WorldCalls
    _: dataclasses.KW_ONLY
    params: Params
    key: jax.Array
    task: HostTask
    ends: StopRules
    level: np.ndarray
    stream: np.ndarray
    poll: int
    remember: bool = False  # record what happens in each episode in `events`, for rewards
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
        self.events: dict[int, list] = {}  # by row of the rollout
        self.opens_at = len(self.task.prefix)  # cache position where conversations start
        self.ready = [collections.deque() for _ in range(shards)]  # slots with chunks to read
        self.copy([[] for _ in self.ready])  # compile it now rather than at its first use
        self.live = np.zeros(shards, int)
        self.left = np.zeros(shards, int)  # stopped rows that were not reported yet

    def in_flight(self) -> dict[str, Any]:
        """Return the progress of the rollout for a status line. Other threads may call it."""
        now = time.monotonic()
        calls = list(self.calls.under_way.values())  # a copy, because the loop changes it
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
        """Play the given rows of the rollout."""
        self.episodes.extend(episodes)
        self.seat()
        while not self.is_over():
            self.advance()

    def seat(self) -> None:
        """Start the next episodes in slots without one."""
        for slot in self.slots:
            if slot.episode < 0:
                self.begin_episode(slot)

    def is_over(self) -> bool:
        """Return whether all requested episodes have been played."""
        return not (self.calls.under_way or self.is_sampling() or any(self.ready))

    def advance(self) -> None:
        """Take replies, read the blocks that are due and sample for a while."""
        self.poll_replies()
        while self.is_due():
            self.read()
        if self.is_sampling():
            self.decode()

    def play_until_healthy(self, episodes: list[int]) -> None:
        """Play episodes, and replay the faulty ones while too few are healthy."""
        again, least = episodes, self.calls.policy.min_healthy
        for turn in range(1, ROUNDS + 1):
            self.play(again)
            faulty = [b for b in again if self.out.episode_stop[b] == EpisodeStop.ENV_ERROR]
            summary = f'{len(faulty)} of {len(episodes)} episodes failed in their environments'
            if len(episodes) - len(faulty) >= least * len(episodes):
                return
            if turn == ROUNDS:
                raise WorldsFailed(
                    f'{summary}, also after {ROUNDS - 1} replays '
                    f'(hosts.min_healthy={least:g}): {self.calls.last_fault}'
                )
            self.calls.say(f'{summary} and are replayed: {self.calls.last_fault}')
            self.empty(faulty, self.out.level[faulty])
            again = faulty

    def empty(self, rows: Any, level: np.ndarray) -> None:
        """Reset rows of the record for episodes of the given levels, int32."""
        fresh = empty_record(self.task, level, self.out.tokens.shape[1], self.words)
        for x, new in zip(jax.tree.leaves(self.out), jax.tree.leaves(fresh), strict=True):
            x[rows] = new

    # -- episodes and environments

    def begin_episode(self, slot: Slot) -> None:
        """Start the next episode of the list in a slot, if there is one."""
        slot.episode = self.next_episode()
        slot.turn, slot.length, slot.actions, slot.replies = 0, len(self.task.prefix), (), ()
        slot.now = agents.begin(self.task.agent)
        slot.cut, slot.cuts = EpisodeStop.NONE, 0
        slot.branch, slot.opening, slot.read = 0, NOTHING, 0
        if slot.episode >= 0:
            self.events[slot.episode] = []
            self.ask(slot)

    def next_episode(self) -> int:
        """Take an episode from the list; -1 if none may start."""
        return self.episodes.popleft() if self.episodes else -1

    def note(self, slot: Slot, event: Any) -> None:
        if self.remember:
            self.events[slot.episode].append(event)

    def ask(self, slot: Slot) -> None:
        """Request the environment's reply to the last action of a slot."""
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
        """Take the replies that have arrived.

        Wait for a reply if the device is idle, and otherwise for up to `reply_wait_s` seconds.
        """
        began = time.monotonic()
        until = began + self.reply_wait_s()
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
            busy = self.is_sampling() or self.is_due()  # copied rows sample immediately
            until = time.monotonic() + self.reply_wait_s()
        if not self.is_sampling():
            self.counted['waited_s'] += time.monotonic() - began

    def reply_wait_s(self) -> float:
        """Return how long rows that could sample wait for another reply: one step, or 0 seconds.

        They wait if replies take less than a step or, if most rows are waiting, less than `poll`
        steps: rows that sample together need fewer steps in total.
        """
        steps = self.poll if len(self.calls.under_way) > self.live.sum() else 1
        return self.step_s if self.calls.reply_s < self.step_s * steps else 0.0

    def on_fault(self, slot: Slot) -> None:
        """Record that the environment of a slot failed, and start the next episode."""
        b = slot.episode
        self.out.episode_stop[b], self.out.success[b] = EpisodeStop.ENV_ERROR, False
        self.out.num_turns[b] = slot.turn + bool(slot.actions and not slot.cut)
        self.begin_episode(slot)

    def on_reply(self, slot: Slot, response: Response) -> None:
        """Record a reply as the outcome of the last answer, if there was one."""
        reply, b, k, out = response.reply, slot.episode, slot.turn, self.out
        if slot.cut and reply.done:
            self.on_final_reward(slot, response)
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
        """Record success and figures from an episode's last reply; rewards: of its trial."""
        returned = self.task.env.solved(rewards.sum())
        self.out.success[b] = returned if reply.success is None else reply.success
        if self.out.figures is not None:
            self.out.figures[b] = figures_of(reply, self.task.env)

    def end_turn(self, slot: Slot, done: bool) -> tuple[EpisodeStop, bool]:
        """Return (why the episode ends after this turn, whether a new trial follows)."""
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
        """Start the next turn of an episode, its next trial, or the next episode."""
        if stop == EpisodeStop.NONE and fresh:
            slot.actions, slot.replies = (), ()
            self.ask(slot)
            return
        if stop == EpisodeStop.NONE:
            prompt = self.prompt(slot)
            missing = self.missing_eos(slot, prompt)
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
        """Return the remaining tokens of the episode and of the prompt's conversation."""
        left = self.out.tokens.shape[1] - slot.length
        if not self.task.env.context:
            return left
        prefix = len(self.task.prefix)
        held = prefix + len(branch_places(self.out, slot.episode, prompt.branch, prefix))
        return min(left, self.task.env.context - held)

    def missing_eos(self, slot: Slot, prompt: Prompt) -> list[int]:
        """Return the end token of the conversation's last answer if it was not sampled, else [].

        The prefix already ends with an end token.
        """
        before = slot.turn - 1
        if self.out.branch is not None:
            earlier = self.out.branch[slot.episode, : slot.turn] == prompt.branch
            before = int(np.flatnonzero(earlier).max(initial=-1)) if not prompt.opens else -1
        ended = before < 0 or self.out.turn_stop[slot.episode, before] == TurnStop.EOS
        return [] if ended or prompt.ends else [self.conversation.chat.end_id]

    def most(self, prompt: Prompt) -> int:
        """Return the maximum number of tokens of an answer."""
        longest = self.settings.max_response
        return min(prompt.most or longest, longest)

    def on_final_reward(self, slot: Slot, response: Response) -> None:
        """Add a truncated episode's final reward to its last turn; without a turn it is faulty."""
        reply, b, out = response.reply, slot.episode, self.out
        if not slot.turn:
            context = self.task.env.context
            self.calls.say(
                'episode failed: its first request and an answer do not fit into '
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
        """Return the prompt of the next turn: the last observation and the turn's instruction."""
        response, now = slot.heard, slot.now
        if now.part == agents.ACT and not now.begins_again:
            return response.prompt
        prompt = self.conversation.prompt(response.reply.observation, response.instruction, now)
        self.counted['cut'] += prompt.cut and not response.prompt.cut
        return prompt

    # -- rows

    def write_prompt(self, slot: Slot, prompt: Prompt, missing: list[int]) -> None:
        """Write the prompt of a turn into the record and queue it for reading, in chunks.

        missing: the end token of the previous turn if it was not sampled.
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
        """Queue a prompt for reading at a cache position, or for copying from another slot."""
        width, is_start = self.programs.width, at == self.opens_at
        shares = is_start and not self.settings.window
        donor, shared = self.donor(slot, unread) if shares else (None, 0)
        for i in range(shared, len(unread), width):
            slot.chunks.append((at + i, unread[i : i + width]))
        if is_start:
            slot.opening, slot.read = unread, 0
        if not donor:
            self.ready[slot.number // self.settings.slots].append(slot)
            return
        donor.followers.append((slot, shared))
        self.release([donor])

    def donor(self, slot: Slot, unread: np.ndarray) -> tuple[Slot | None, int]:
        """Return (a slot of the same shard with the same first tokens, the number of these).

        The number covers the full prompt, or only complete chunks without the last token. The rest
        is then read in the same chunks as without a donor.
        """
        width, rows = self.programs.width, self.settings.slots
        first = slot.number // rows * rows
        best, longest = None, 0
        for other in self.slots[first : first + rows]:
            size = min(len(other.opening), len(unread))
            # A slot that waits to copy its full opening is not a donor; its own donor is.
            waits = not other.chunks and other.read < len(other.opening)
            if other is slot or waits or size <= longest:
                continue
            differ = np.flatnonzero(other.opening[:size] != unread[:size])
            same = int(differ[0]) if len(differ) else size
            if not same == len(unread) == len(other.opening):
                same = min(same, len(unread) - 1) // width * width
            if same > longest:
                best, longest = other, same
        return best, longest

    def release(self, donors: list[Slot]) -> None:
        """Let followers copy the caches of donors that have read enough, then read on or sample."""
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
            self.copy([lines_of_shard[:lines] for lines_of_shard in copies])
            copies = [lines_of_shard[lines:] for lines_of_shard in copies]

    def copy(self, copies: list[list[tuple[int, ...]]]) -> None:
        """Copy caches of up to serve_rows rows of each shard; copies: lines of programs.copy."""
        lines = self.settings.serve_rows
        block = np.zeros((len(copies), lines, 1 + READ_HEADER + self.offers), np.int32)
        block[:, :, 1] = self.settings.slots
        for shard, shard_copies in enumerate(copies):
            if shard_copies:
                block[shard, : len(shard_copies)] = shard_copies
        self.state = self.programs.copy(self.state, self.ends, block.reshape(-1, block.shape[2]))

    def head(self, slot: Slot, at: int, count: int) -> tuple[int, ...]:
        """Return the head of a line for the device, for `count` tokens at cache position `at`."""
        last = int(not slot.chunks)
        is_opening_end = at + count == self.opens_at + len(slot.opening)
        numbers = slot.number % self.settings.slots, at, count, *self.draws(slot)
        numbers += last + (last and is_opening_end), int(slot.now.part)
        numbers += self.most(slot.heard.prompt), *self.sampling(slot.heard.prompt)
        return (*numbers, *(self.task.offered(slot.heard.offers) if self.offers else ()))

    def sampling(self, prompt: Prompt) -> list[int]:
        """Return the bits of an answer's temperature and top_p."""
        overrides = prompt.sampling or Sampling()
        of_run = self.settings.sampler
        pairs = (overrides.temperature, of_run.temperature), (overrides.top_p, of_run.top_p)
        values = [default if value is None else value for value, default in pairs]
        return np.array(values, np.float32).view(np.int32).tolist()

    def draws(self, slot: Slot) -> tuple[int, int]:
        """Return (position, random stream) of the next draw.

        With several conversations, both depend only on the tokens and the start of the prompt's
        conversation, because the conversations of an episode may take turns in any order.
        """
        stream, inner = int(self.stream[slot.episode]), slot.heard.prompt.stream
        overrides = slot.heard.prompt.sampling
        if overrides is not None and overrides.seed is not None:
            return slot.context, action_hash(f'seed {overrides.seed}')
        if not inner:
            return slot.length, stream
        return slot.context, action_hash(f'{stream} {inner}')

    def unread(self, slot: Slot, prompt: Prompt, fresh: np.ndarray) -> tuple[int, np.ndarray]:
        """Return (cache position, tokens) of the unread part of the prompt's conversation.

        fresh: its last tokens. If the cache holds another conversation, all tokens are unread.
        """
        b, prefix = slot.episode, len(self.task.prefix)
        self.out.branch[b, slot.turn] = prompt.branch
        positions = branch_places(self.out, b, prompt.branch, prefix)
        held = slot.branch == prompt.branch and not prompt.opens
        slot.branch, slot.context = prompt.branch, prefix + len(positions)
        fresh = fresh if held else self.out.tokens[b, positions]
        return prefix + len(positions) - len(fresh), fresh

    def is_sampling(self) -> bool:
        return bool(self.live.any() or self.left.any())

    def is_due(self) -> bool:
        """Return whether a block of some shard is as full as can be expected soon."""
        enough = np.minimum(self.settings.serve_rows, np.maximum(self.live, 1))
        return any(len(slots) >= least for slots, least in zip(self.ready, enough, strict=True))

    def read(self) -> None:
        """Read the next chunk of up to serve_rows slots of each shard."""
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
        """Sample for a while and take the answers that are complete."""
        until = self.settings.serve_rows - min(
            max(map(len, self.ready)), self.settings.serve_rows - 1
        )
        limit = NO_LIMIT
        if self.calls.under_way:  # return in time to check for replies
            limit = min(max(math.ceil(self.calls.reply_s / self.step_s), 1), self.poll)
        began = time.monotonic()
        self.state, report = self.programs.decode(
            self.state, self.params, self.ends, self.key, np.int32(until), np.int32(limit)
        )
        shards, lines = self.programs.shards, self.settings.serve_rows + 1
        report = np.asarray(report).reshape(shards, lines, -1)
        steps, self.live, self.left = (report[:, -1, i].astype(int) for i in range(REPORT_HEADER))
        if num_steps := int(steps.max()):
            each = (time.monotonic() - began) / num_steps
            # Decreases immediately, because the first call includes compilation.
            self.step_s = min(each, self.step_s + 0.1 * (each - self.step_s))
        self.counted['steps'] += num_steps
        for shard in range(shards):
            for line in report[shard, :-1]:
                if line[0] < self.settings.slots:
                    self.on_answer(self.slots[shard * self.settings.slots + line[0]], line)

    def on_answer(self, slot: Slot, line: np.ndarray) -> None:
        """Record the answer of a turn and pass its text to the environment."""
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
            action = self.with_token_info(slot, action, place)
        if slot.now.part == agents.ACT:
            out.actions[b, k, 0] = action_hash(action)
            slot.actions += (action,)
            self.ask(slot)
        else:
            out.valid[b, k] = agents.WRITTEN[int(slot.now.part)].closing in action
            out.judged[b, k] = True
            self.go_on(slot, *self.end_turn(slot, done=False))

    def with_token_info(self, slot: Slot, text: str, place: slice) -> Answer:
        """Return the answer at `place` with the details that model clients need."""
        b, out, prefix = slot.episode, self.out, len(self.task.prefix)
        answer, decode = Answer(text), self.conversation.chat.tokenizer.decode_bytes
        answer.ids = tuple(out.tokens[b, place].tolist())
        answer.logprobs = tuple(out.logprobs[b, place].tolist())
        answer.pieces = tuple(decode([token]) for token in answer.ids)
        positions = branch_places(out, b, slot.branch, prefix)
        before = np.r_[np.arange(prefix), positions[positions < place.start]]
        answer.prompt = tuple(out.tokens[b, before].tolist())
        stop = out.turn_stop[b, slot.turn]
        answer.closed = bool(stop == TurnStop.EOS)
        answer.finish = 'length' if stop == TurnStop.LENGTH else 'stop'
        answer.calls = self.conversation.chat.wording.calls
        return answer
