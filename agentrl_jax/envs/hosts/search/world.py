"""Questions answered with a search engine: AgentGym's SearchQA (DeepSearch), MT-GRPO's TriviaQA.

An episode is a question. A turn searches or answers, in one of four dialects (dialects.py), and is
rewarded by one of four rules (scoring.py). What is found comes from an index of this process or
from any server of Search-R1's protocol (retrieval.py), the questions from published files
(questions.py); without either, countries and their regions are asked about (countries.py), or
regions that do not exist (drawn.py).
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_jax.envs.hosts.connection import token_in
from agentrl_jax.envs.hosts.search import countries, drawn, questions, retrieval, scoring
from agentrl_jax.envs.hosts.search.dialects import DIALECTS
from agentrl_jax.envs.hosts.search.questions import Question
from agentrl_jax.envs.hosts.search.scoring import ERROR, NORMALISERS, REWARDS, Golds, Step
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.envs.splits import SPLITS, level_split

NAME = r'[A-Z]\w*(?: [A-Z]\w*)*|\d+'
KINDS = (countries.COUNTRY, countries.REGION)
FIGURES = ('tool_success', 'answer_presence', 'exact_match', 'format')


@functools.cache
def bank(files: tuple[str, ...] = ()) -> tuple[Question, ...]:
    """The questions of files one after another, or about countries; an item is a place in here."""
    if not files:
        return countries.questions()
    if files == (drawn.NAME,):
        return drawn.questions()
    return tuple(question for path in files for question in questions.read(path))


def items(
    split: str,
    *,
    files: tuple[str, ...] = (),
    hops: Sequence[int] = (1, 2),
    about: Sequence[str] = KINDS,
    longest_name: int = 0,
) -> list[int]:
    """Items of a split; of questions about countries those of some hops, and about some of KINDS.

    longest_name: letters from A to Z of which a subject's name may be, in one word; 0 = any name.

    Several files are those of train, validation and test, in this order. A single one, and the
    questions about countries, are divided by a digest of what a question is about.
    """
    known = bank(files)
    if len(files) > 1:
        sizes = [len(questions.read(path)) for path in files]
        place = SPLITS.index(split)
        found = range(sum(sizes[:place]), sum(sizes[: place + 1]))
    else:
        found = [
            number
            for number, question in enumerate(known)
            if level_split((question.subject or question.text).encode()) == split
        ]
    if files:
        return list(found)
    short = re.compile(f'[A-Za-z]{{1,{longest_name}}}' if longest_name else '.*')
    return [
        number
        for number in found
        if known[number].hops in hops
        and known[number].kind in about
        and short.fullmatch(known[number].subject)
    ]


class Search:
    """One reader with a question; actions are whole answers of the policy."""

    deterministic = True

    def __init__(
        self,
        *,
        dialect: str = 'plain',
        rewards: str = 'exact',
        normaliser: str = 'squad',  # of answers that are compared
        retries: bool = True,  # a wrong answer may be followed by another, as in AgentGym
        turns: int = 0,  # of an episode, the last of which earns its outcome; 0 = any number
        calls: int = 0,  # an episode ends with so many, the last not carried out: MT-GRPO 2
        topk: int = 0,  # documents of a result; 0 = as many as in the dialect
        corpus: str = '',  # '' = countries, or what retrieval.open_corpus takes
        questions: Sequence[str] = (),  # files
        timeout_s: float = 30.0,  # of a search on a server
        token: str = '',  # file whose first line the server asks for
    ):
        for name, value, known in (
            ('dialect', dialect, DIALECTS),
            ('rewards', rewards, REWARDS),
            ('normaliser', normaliser, NORMALISERS),
        ):
            if value not in known:
                raise ValueError(f'search.{name}={value!r} is one of {", ".join(known)}')
        for name, value in (('turns', turns), ('calls', calls), ('topk', topk)):
            if value < 0:
                raise ValueError(f'search.{name}={value} is negative')
        self.dialect, self.rewards = DIALECTS[dialect], REWARDS[rewards]
        self.instruction = self.dialect.instruction
        self.normaliser, self.retries = normaliser, retries
        self.turns, self.most_calls, self.topk = turns, calls, topk or self.dialect.topk
        self.bank = bank(tuple(questions))
        # None: that of each question, or about countries
        self.corpus = retrieval.open_corpus(corpus, timeout_s, token_in(token)) if corpus else None
        self.steps: list[Step] = []
        self.calls, self.asked = 0, set()  # of the episode: number, queries

    def reset(self, item: int) -> str:
        if not 0 <= item < len(self.bank):
            raise ValueError(f'item {item} is not in 0..{len(self.bank) - 1}')
        self.question = self.bank[item]
        self.golds = Golds(self.question.answers, self.normaliser)
        self.searcher = self.corpus or self._own()
        self.steps, self.calls, self.asked = [], 0, set()
        return self.dialect.question.format(question=self.question.text)

    def step(self, action: str) -> Reply:
        act = self.dialect.read(action)
        done = len(self.steps) + 1 == self.turns
        result = answer = None
        observation, right = self.dialect.invalid, False
        if act.kind == 'answer':
            answer, right = act.content, self.golds.equal(act.content)
            done = done or right or not self.retries
            observation = self.dialect.right if right else self.dialect.wrong
        elif act.kind:
            self.calls += 1
            done = done or self.calls == self.most_calls
            result = None if done else self._called(act.kind, act.content)
            self.asked.add(act.content)
            observation = '' if done else self.dialect.result.format(result)
        self.steps.append(Step(action, result, answer))
        reward = self.rewards(self.steps, self.dialect.tags, self.golds, done)
        measured = scoring.measured(self.steps, self.dialect.tags, self.golds)
        figures = tuple(measured[name] for name in FIGURES)
        return Reply(
            observation,
            reward=reward,
            done=done,
            success=right,
            figures=figures,
            valid=act.kind not in ('', 'failed'),
        )

    def _own(self) -> retrieval.Index:
        """Where a question is looked up that no corpus was named for."""
        documents = self.question.documents
        return retrieval.Index.build(documents) if documents else countries.index()

    def _called(self, kind: str, content: str) -> str:
        """The result of a call."""
        if kind == 'failed':
            return f'{ERROR} {content}'
        return self.dialect.show(self.searcher.search([content], self.topk)[0])

    def close(self) -> None:
        if isinstance(self.corpus, retrieval.Client):
            self.corpus.close()

    def plan(self) -> list[str]:
        """The oracle's turns from here: what was not yet searched of the question's chain, then its
        answer.

        Where the chain is not known it searches for the question itself.
        """
        queries = self.question.queries or (self.question.text,)
        left = [query for query in queries if query not in self.asked]
        if self.most_calls:  # the last call ends an episode without an answer
            left = left[: max(self.most_calls - 1 - self.calls, 0)]
        answer = self.dialect.answering(self.question.answers[0])
        return [*map(self.dialect.searching, left), answer]

    def best(self) -> str:
        """The first turn of the plan."""
        return self.plan()[0]

    def random(self, generator: np.random.Generator) -> str:
        """A search for up to three words of what was shown, or a name out of it as the answer."""
        shown = '\n'.join([self.question.text, *(step.result or '' for step in self.steps)])

        def drawn(pattern: str, count: int) -> str:
            among = re.findall(pattern, shown) or ['nothing']
            return ' '.join(among[number] for number in generator.integers(len(among), size=count))

        if generator.random() < 0.5:
            return self.dialect.searching(drawn(r'\w+', int(generator.integers(1, 4))))
        return self.dialect.answering(drawn(NAME, 1))


class SearchQA(Search):
    """AgentGym's, in its words."""

    def __init__(self, *, dialect: str = 'agentgym', **settings: Any):
        super().__init__(dialect=dialect, **settings)
