"""A world on a host as a conversation: its texts become token ids on the host, once each.

What a world says is data: it is tokenised with special tokens disabled, without control characters
and cut in the middle where it has more than max_observation tokens. What the policy said is never
tokenised again; the world gets the text of its tokens.
"""

import dataclasses
import functools
import json
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.hosts.world import Messages, Sampling
from agentrl_jax.text import agents
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text.answer import AnswerTable
from agentrl_jax.text.forms import build_forms
from agentrl_jax.text.prompts import RAGEN
from agentrl_jax.text.task import TextTask
from agentrl_jax.tokens import chat as chats

CUT = '\n[...]\n'  # in place of the middle of an observation
BYTES = 32  # kept of either end for each allowed token, before a long text is tokenised
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]+')


@struct.dataclass
class HostTask:
    """Worlds on hosts as text, and their budgets. Arrays are leaves; the rest is static."""

    env_params: Any  # items of the pool
    prefix: jax.Array  # int32 [P]  tokens in front of every first observation
    eos_ids: jax.Array  # int32 [n]  tokens that end a turn
    turn_limit: jax.Array  # int32 []  turns of an episode, at most max_turns (see curriculum)
    grammar: grammars.Grammar | None  # what is sampled from; None = the vocabulary
    env: Any = struct.field(pytree_node=False)
    pad_id: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)  # tokens of the longest prompt of a turn
    max_turns: int = struct.field(pytree_node=False)
    agent: agents.Agent = struct.field(pytree_node=False)
    forms: tuple[str, ...] = struct.field(pytree_node=False)  # of the grammar
    answer: AnswerTable | None = None  # parses answers to worlds on the device, which are served

    def offered(self, forms: tuple[str, ...]) -> np.ndarray:
        """int32 [words]: bits of forms, as a line that is read has them; ValueError for others."""
        strangers = set(forms) - set(self.forms)
        if strangers:
            raise ValueError(
                f'{self.env.name} offers {sorted(strangers)[0]!r}, which is none of its forms'
            )
        through = self.grammar.through
        count = 1 if through is None else through.shape[2]
        bits = np.zeros(count * grammars.WORD, bool)
        bits[[self.forms.index(form) for form in forms]] = True
        return np.packbits(bits, bitorder='little').view(np.int32)


Task = TextTask | HostTask  # a world as text, wherever it is


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a turn shows after the end of the turn before."""

    tokens: list[int]
    anchor: int  # hash of the observation, uint32
    cut: bool = False  # it was longer than allowed
    branch: int = 0  # conversation of the episode that it goes on with
    opens: bool = False  # it begins that conversation
    stream: int = 0  # random stream of that conversation; 0 = the episode's own
    ends: bool = False  # it ends the answer before by itself
    most: int = 0  # tokens of the answer; 0 = as many as any
    sampling: Sampling | None = None  # of the answer; None = the run's


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Between texts of a world and token ids."""

    chat: chats.Chat
    answer_prefix: str  # forced in front of every answer, such as '<think>'
    max_observation: int  # tokens of a text
    preamble: str = ''  # the instruction in front of all items
    agent: agents.Agent = agents.ONLY_ACTS

    def __post_init__(self) -> None:
        agent, encode = self.agent, self.chat.tokenizer.encode
        plan, reflection = (len(encode(self.request(x))) for x in (agents.PLAN, agents.REFLECT))
        again = len(encode(RAGEN.again.format(trial=agent.trials)))
        own = max(plan * agent.plans + again * (agent.trials > 1), reflection * agent.reflects)
        least = len(encode(CUT)) + own if own else 0
        if self.max_observation < least:
            raise ValueError(
                f'hosts.max_observation={self.max_observation} has no room for what the agent is '
                f'told beside an observation, {own} tokens: set it to {least} or more'
            )

    @property
    def opening(self) -> str:
        """The text in front of every sampled answer that acts."""
        return self.chat.forced(self.answer_prefix)

    @staticmethod
    def request(part: int) -> str:
        """The request between an observation and an answer that is text."""
        return f'\n{getattr(RAGEN, agents.WRITTEN[part].asks)}'

    @property
    def width(self) -> int:
        """Tokens of the longest prompt, the end of a turn that has none included."""
        openings = (self.opening, *agents.openings(self.agent))
        answers = [self.chat.answer_open(text) for text in openings]
        return 1 + len(self.chat.user_open('')) + max(map(len, answers)) + self.max_observation

    def prompt(
        self, observation: str | Messages, instruction: str = '', now: agents.Progress | None = None
    ) -> Prompt:
        """The user message around an observation, and the opening of the answer.

        instruction: what the item is about, in front of the first observation; '', or what has
        been told = nothing. now: where the episode is; None: at a turn that acts, of the first
        trial.
        """
        if isinstance(observation, Messages):
            return self.prompt_of(observation)
        observation = plain(observation)
        known = instruction in ('', self.preamble)
        text = observation if known else f'{plain(instruction)}\n{observation}'
        part, opening = agents.ACT if now is None else now.part, self.opening
        before = after = ''
        if part != agents.ACT:
            after, opening = self.request(part), agents.WRITTEN[part].opening
        if now is not None and now.begins_again:
            before = RAGEN.again.format(trial=now.trial + 1)
        text = before + text + after
        opened, role = self.chat.user_open, len(self.chat.user_open(''))
        text, long = ends_of(text, BYTES * self.max_observation)
        # In one piece with the role, for a tokenizer may merge over the newline between them
        ids = opened(text)
        over = len(ids) - role > self.max_observation
        if over:
            mark, first, last = map(self.chat.tokenizer.encode, (CUT, before, after))
            rest = max(self.max_observation - len(mark), 0)
            end = min(max(rest // 2, len(last)), rest - len(first))  # what we say is kept whole
            ids = [*ids[: role + rest - end], *mark[: self.max_observation], *ids[len(ids) - end :]]
        return Prompt(
            tokens=[*ids, *self.chat.answer_open(opening)],
            anchor=zlib.crc32(observation.encode()),
            cut=long or over,
        )

    def prompt_of(self, said: Messages) -> Prompt:
        """The messages around an answer, whole: they are the harness's own."""
        written = json.dumps([said.messages, said.tools])  # the template shows keys in their order
        ids = list(_tokens(self.chat, written, said.opens))
        if said.opens:  # after the token that every row begins with
            if ids[:1] != [self.chat.first_id]:
                raise ValueError('the chat template does not begin as others of its family do')
            ids = ids[1:]
        forced = self.opening.removeprefix(self.chat.thought)  # the template renders the thought
        if said.appended:
            ids = [*self.chat.tokenizer.encode(plain(said.appended)), self.chat.end_id, *ids]
        return Prompt(
            tokens=[*ids, *self.chat.tokenizer.encode(forced)],
            anchor=zlib.crc32(written.encode()),
            branch=said.branch,
            opens=said.opens,
            stream=said.stream,
            ends=bool(said.appended),
            most=said.most,
            sampling=said.sampling,
        )

    def answer(self, text: str) -> list[int]:
        """Tokens of an answer after its forced prefix, without the end of the turn."""
        return self.chat.tokenizer.encode(self.rest(text, 'a demonstration'))

    def rest(self, text: str, whose: str) -> str:
        """A text after the prefix that is forced in front of it."""
        if not text.startswith(self.opening):
            raise ValueError(
                f'hosts.answer_prefix={self.opening!r} is not how {whose} begins: {text!r:.60}'
            )
        return text.removeprefix(self.opening)

    def said(self, ids: list[int], part: int = agents.ACT) -> str:
        """An answer with what is forced in front of it, without the end-of-turn token."""
        part = int(part)
        opening = self.opening if part == agents.ACT else agents.WRITTEN[part].opening
        return opening + self.chat.said(ids)


@functools.lru_cache(maxsize=4096)
def _tokens(chat: chats.Chat, written: str, opens: bool) -> tuple[int, ...]:
    """Tokens of JSON [messages, tools]; members of a group begin with the same ones."""
    messages, tools = _plainly(json.loads(written))
    return tuple((chat.opening if opens else chat.following)(messages, tools))


def _plainly(value: Any) -> Any:
    """A value of JSON with `plain` texts."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {key: _plainly(one) for key, one in value.items()}
    return [_plainly(one) for one in value] if isinstance(value, list) else value


def plain(text: str) -> str:
    """The text without control characters (newlines and tabs stay) and lone surrogates."""
    return CONTROLS.sub('', text)


def ends_of(text: str, most_bytes: int) -> tuple[str, bool]:
    """(the text, or its ends, most_bytes of UTF-8 each, around CUT; whether it was cut).

    Of bytes, since a character may be many tokens: without a bound a hostile text of a megabyte
    takes seconds to tokenise.
    """
    if len(text) <= most_bytes // 2:  # at most four bytes each
        return text, False
    spelled = text.encode()
    if len(spelled) <= 2 * most_bytes:
        return text, False
    first, last = spelled[:most_bytes], spelled[-most_bytes:]
    return first.decode(errors='ignore') + CUT + last.decode(errors='ignore'), True


def action_hash(action: str) -> int:
    """A number for an action that is any text: equal for equal ones, int32 and not negative."""
    return zlib.crc32(action.encode()) & 0x7FFFFFFF


def prefix_of(chat: chats.Chat, system: str, instruction: str, accepted: str) -> list[int]:
    """Tokens in front of every first observation.

    The instruction is part of the system message, or with `accepted` a user message that this
    fixed answer follows. Without a system message of ours that of the checkpoint's template is
    used, if it has one.
    """
    encode = chat.tokenizer.encode
    if not accepted:
        system, instruction = '\n'.join(filter(None, (system, instruction))), ''
    if system:
        ids = chat.system_message(system)
    else:
        ids = chat.default_prefix('')
        opening = chat.user_open('')
        ids = ids[: -len(opening)] if len(ids) > len(opening) else []
    if accepted:
        ids += [*chat.user_open(instruction), *chat.answer_open(''), *encode(accepted), chat.end_id]
        if ids[0] != chat.first_id:  # that message is the first one
            ids = [*chat.begin, *ids[len(encode(chat.wording.after)) :]]
    if not ids:
        raise ValueError(
            'a conversation with a world on a host needs something in front of its first '
            'observation: give the world an instruction'
        )
    return ids


def build_host_task(
    env: Any,
    env_params: Any,
    conversation: Conversation,
    *,
    max_turns: int,
    forms: tuple[str, ...] = (),
    spelling: str = 'any',
    max_response: int = 0,
) -> HostTask:
    """A pool of a host environment as text.

    forms: what answers of at most max_response tokens must look like, the forced prefix included;
    () = any text. spelling: of text.grammar; 'own' is for forms without free text.
    """
    chat, grammar = conversation.chat, None
    if forms:
        rests = tuple(conversation.rest(form, 'a form of answers') for form in forms)
        sizes = dict(longest=max_response, offers=len(forms) > 1)
        if spelling == 'own':
            grammar = grammars.build_grammar(
                chat.tokenizer,
                rests,
                max_actions=1,
                opening='',
                spelling=spelling,
                writes=True,
                **sizes,
            )
        else:
            grammar = build_forms(chat.tokenizer, rests, **sizes)
    task = HostTask(
        env_params=env_params,
        prefix=jnp.asarray(
            [chat.first_id]
            if env.chats
            else prefix_of(chat, env.system, env.instruction, env.accepted),
            jnp.int32,
        ),
        eos_ids=jnp.asarray(chat.tokenizer.eos_ids, jnp.int32),
        turn_limit=jnp.int32(max_turns),
        env=env,
        pad_id=chat.tokenizer.pad_id,
        width=0 if env.chats else conversation.width,  # nobody knows what a harness will show
        grammar=grammar,
        max_turns=max_turns,
        agent=conversation.agent,
        forms=forms,
    )
    return jax.tree.map(np.asarray, task)
