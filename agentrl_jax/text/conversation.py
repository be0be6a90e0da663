"""Host environments as conversations: each text is converted to token ids once, on the host.

Environment texts are data. They are tokenised with special tokens disabled and without control
characters, and truncated in the middle if they exceed max_observation tokens. The policy's answers
are never tokenised again: the environment receives the text of their tokens.
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

CUT = '\n[...]\n'  # replaces the middle of a long observation
BYTES = 32  # bytes per allowed token to keep of each end of a long text before it is tokenised
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]+')


@struct.dataclass
class HostTask:
    """Host environments as text, and their budgets. Arrays are leaves; the rest is static."""

    env_params: Any  # items of the pool
    prefix: jax.Array  # int32 [P]  tokens in front of every first observation
    eos_ids: jax.Array  # int32 [n]  tokens that end a turn
    turn_limit: jax.Array  # int32 []  turns of an episode, up to max_turns (see curriculum)
    grammar: grammars.Grammar | None  # restricts sampling; None = any token
    env: Any = struct.field(pytree_node=False)
    pad_id: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)  # tokens of the longest prompt of a turn
    max_turns: int = struct.field(pytree_node=False)
    agent: agents.Agent = struct.field(pytree_node=False)
    forms: tuple[str, ...] = struct.field(pytree_node=False)  # of the grammar
    answer: AnswerTable | None = None  # parser of answers, if a device environment is served

    def offered(self, forms: tuple[str, ...]) -> np.ndarray:
        """Return the bits of offered forms, int32 [words]; ValueError if a form is unknown."""
        strangers = set(forms) - set(self.forms)
        if strangers:
            raise ValueError(
                f'{self.env.name} offers {sorted(strangers)[0]!r}, which is not one of its forms'
            )
        through = self.grammar.through
        count = 1 if through is None else through.shape[2]
        bits = np.zeros(count * grammars.WORD, bool)
        bits[[self.forms.index(form) for form in forms]] = True
        return np.packbits(bits, bitorder='little').view(np.int32)


Task = TextTask | HostTask  # an environment as text, on the device or on hosts


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The prompt of a turn, after the end of the previous turn."""

    tokens: list[int]
    anchor: int  # hash of the observation, uint32
    cut: bool = False  # it was longer than allowed and has been truncated
    branch: int = 0  # conversation of the episode that it belongs to
    opens: bool = False  # it starts that conversation
    stream: int = 0  # random stream of that conversation; 0 = the episode's
    ends: bool = False  # it includes the end of the previous answer
    most: int = 0  # maximum number of tokens of the answer; 0 = the run's
    sampling: Sampling | None = None  # of the answer; None = the run's


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Converts between texts of an environment and token ids."""

    chat: chats.Chat
    answer_prefix: str  # forced in front of every answer, such as '<think>'
    max_observation: int  # tokens of a text
    preamble: str = ''  # the instruction in front of all items
    agent: agents.Agent = agents.ONLY_ACTS

    def __post_init__(self) -> None:
        agent, encode = self.agent, self.chat.tokenizer.encode
        plan, reflection = (len(encode(self.request(x))) for x in (agents.PLAN, agents.REFLECT))
        again = len(encode(RAGEN.again.format(trial=agent.trials)))
        agent_tokens = max(
            plan * agent.plans + again * (agent.trials > 1), reflection * agent.reflects
        )
        least = len(encode(CUT)) + agent_tokens if agent_tokens else 0
        if self.max_observation < least:
            raise ValueError(
                f'hosts.max_observation={self.max_observation} is too small for the requests of '
                f'the agent, {agent_tokens} tokens: set it to at least {least}'
            )

    @property
    def opening(self) -> str:
        """The text forced in front of every sampled answer that acts."""
        return self.chat.forced(self.answer_prefix)

    @staticmethod
    def request(part: int) -> str:
        """Return the request for a plan or reflection, which follows the observation."""
        return f'\n{getattr(RAGEN, agents.WRITTEN[part].asks)}'

    @property
    def width(self) -> int:
        """Tokens of the longest prompt, including a missing end of the previous turn."""
        openings = (self.opening, *agents.openings(self.agent))
        answers = [self.chat.answer_open(text) for text in openings]
        return 1 + len(self.chat.user_open('')) + max(map(len, answers)) + self.max_observation

    def prompt(
        self, observation: str | Messages, instruction: str = '', now: agents.Progress | None = None
    ) -> Prompt:
        """Return the user message with an observation, and the opening of the answer.

        instruction: of the item, in front of the first observation; omitted if it is '' or equal to
        the preamble. now: progress of the episode; None: a turn of the first trial that acts.
        """
        if isinstance(observation, Messages):
            return self.messages_prompt(observation)
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
        text, long = cut_middle(text, BYTES * self.max_observation)
        # Tokenise with the role, because the tokenizer may merge across the newline between them.
        ids = opened(text)
        over = len(ids) - role > self.max_observation
        if over:
            mark, first, last = map(self.chat.tokenizer.encode, (CUT, before, after))
            rest = max(self.max_observation - len(mark), 0)
            end = min(max(rest // 2, len(last)), rest - len(first))  # never cut `before` or `after`
            ids = [*ids[: role + rest - end], *mark[: self.max_observation], *ids[len(ids) - end :]]
        return Prompt(
            tokens=[*ids, *self.chat.answer_open(opening)],
            anchor=zlib.crc32(observation.encode()),
            cut=long or over,
        )

    def messages_prompt(self, said: Messages) -> Prompt:
        """Return the prompt of a harness's messages, without truncation."""
        written = json.dumps([said.messages, said.tools])  # keeps the order of keys for templates
        ids = list(_tokens(self.chat, written, said.opens))
        if said.opens:  # drop the first token, which every row already has
            if ids[:1] != [self.chat.first_id]:
                raise ValueError('the chat template starts with another token than its family')
            ids = ids[1:]
        forced = self.opening.removeprefix(self.chat.thought)  # rendered by the template
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
        """Return the tokens of an answer after its forced prefix, without the end of the turn."""
        return self.chat.tokenizer.encode(self.rest(text, 'a demonstration'))

    def rest(self, text: str, whose: str) -> str:
        """Remove the forced prefix from a text; ValueError, naming `whose` text, if it has none."""
        if not text.startswith(self.opening):
            raise ValueError(
                f'{whose} does not start with hosts.answer_prefix={self.opening!r}: {text!r:.60}'
            )
        return text.removeprefix(self.opening)

    def said(self, ids: list[int], part: int = agents.ACT) -> str:
        """Return the text of an answer with its forced prefix, without the end-of-turn token."""
        part = int(part)
        opening = self.opening if part == agents.ACT else agents.WRITTEN[part].opening
        return opening + self.chat.said(ids)


@functools.lru_cache(maxsize=4096)
def _tokens(chat: chats.Chat, written: str, opens: bool) -> tuple[int, ...]:
    """Tokenise JSON [messages, tools]; cached, because members of a group share their start."""
    messages, tools = chats.map_texts(plain, json.loads(written))
    return tuple((chat.opening if opens else chat.following)(messages, tools))


def plain(text: str) -> str:
    """Remove control characters, except newlines and tabs, and lone surrogates."""
    return CONTROLS.sub('', text)


def cut_middle(text: str, most_bytes: int) -> tuple[str, bool]:
    """Return (the text, or its first and last most_bytes of UTF-8 around CUT; whether it was cut).

    The bound is in bytes, because a character may be many tokens. Without a bound, a hostile text
    of one megabyte takes seconds to tokenise.
    """
    if len(text) <= most_bytes // 2:  # up to four bytes per character
        return text, False
    spelled = text.encode()
    if len(spelled) <= 2 * most_bytes:
        return text, False
    first, last = spelled[:most_bytes], spelled[-most_bytes:]
    return first.decode(errors='ignore') + CUT + last.decode(errors='ignore'), True


def action_hash(action: str) -> int:
    """Return a non-negative int32 hash of a text action."""
    return zlib.crc32(action.encode()) & 0x7FFFFFFF


def prefix_of(chat: chats.Chat, system: str, instruction: str, accepted: str) -> list[int]:
    """Return the tokens in front of every first observation.

    The instruction is part of the system message or, with `accepted`, a user message with this
    fixed answer. Without a system message, the default one of the checkpoint's template is used.
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
        if ids[0] != chat.first_id:  # there is no system message
            ids = [*chat.begin, *ids[len(encode(chat.wording.after)) :]]
    if not ids:
        raise ValueError(
            'a host environment without an instruction has no text in front of its first '
            'observation: give it an instruction'
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
    """Build the text task for a pool of a host environment.

    forms: allowed forms of answers, including the forced prefix, in up to max_response tokens;
    () = any text. spelling: see text.grammar; 'own' requires forms without free text.
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
        width=0 if env.chats else conversation.width,  # unknown for the prompts of a harness
        grammar=grammar,
        max_turns=max_turns,
        agent=conversation.agent,
        forms=forms,
    )
    return jax.tree.map(np.asarray, task)
