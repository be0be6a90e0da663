"""Question answering with search: AgentGym's SearchQA (DeepSearch) and MT-GRPO's TriviaQA.

An episode is a question. A turn searches or answers, in one of four dialects (dialects.py), and is
rewarded by one of four rules (scoring.py). Documents come from an index in this process or from any
server with Search-R1's protocol (retrieval.py). Questions come from published files (questions.py),
or are about countries (countries.py, the default) or invented regions (drawn.py).
"""

import dataclasses
import functools
import re
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts.connection import token_in
from agentrl_jax.envs.hosts.search import countries, drawn, questions, retrieval, scoring
from agentrl_jax.envs.hosts.search.dialects import DIALECTS
from agentrl_jax.envs.hosts.search.questions import Question
from agentrl_jax.envs.hosts.search.scoring import ERROR, NORMALISERS, REWARDS, Golds, Step
from agentrl_jax.envs.hosts.served import Calls, Served, checked
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.envs.splits import SPLITS, level_split
from agentrl_jax.settings.marks import ZERO, In, NameIn, Neutral, OnlyIf
from agentrl_jax.settings.rules import must

NAME = r'[A-Z]\w*(?: [A-Z]\w*)*|\d+'
DRAWN = OnlyIf(lambda play: play.questions == (drawn.NAME,), f"search.questions=('{drawn.NAME}',)")
FIGURES = ('tool_success', 'answer_presence', 'exact_match', 'format')


@functools.cache
def bank(files: tuple[str, ...] = (), known: int = 0) -> tuple[Question, ...]:
    """Return the questions of all files, or about countries; an item is an index into them."""
    if not files:
        return countries.questions()
    if files == (drawn.NAME,):
        return drawn.questions(known)
    return tuple(question for path in files for question in questions.read(path))


@dataclasses.dataclass(frozen=True)
class Play(Calls):
    """Settings of a world."""

    dialect: Annotated[str, NameIn(DIALECTS)] = 'plain'  # of calls and answers
    rewards: Annotated[str, NameIn(REWARDS)] = 'exact'  # exact match; format: Search-R1 v0.3's
    normaliser: Annotated[str, NameIn(NORMALISERS)] = 'squad'  # for comparing answers
    retries: bool = True  # the policy may answer again after a wrong answer, as in AgentGym
    turns: Annotated[int, ZERO] = 0  # the last of them earns the outcome; 0: env.max_turns cuts
    calls: Annotated[int, ZERO] = 0  # this call ends an episode unanswered (MT-GRPO: 2); 0 = none
    topk: Annotated[int, ZERO] = 0  # documents per result; 0 = the dialect's: 3, MT-GRPO 1
    corpus: str = ''  # http://... of a retriever, folder of an index, or file; '' = countries
    questions: tuple[str, ...] = ()  # train, validation and test files; () = about countries
    known: Annotated[int, In(0, len(drawn.REGIONS)), Neutral(0), DRAWN] = 0  # regions of drawn
    # questions with a fixed country


class Search:
    """One question at a time; actions are full answers of the policy."""

    deterministic = True
    PLAY = Play

    def __init__(self, **settings: Any):
        play = self.play = checked('search', Play(**settings))
        self.dialect = DIALECTS[play.dialect]
        self.instruction = self.dialect.instruction
        self.bank = bank(play.questions, play.known)
        self.corpus = None  # None: the question's documents, or those about countries
        if play.corpus:
            token = token_in(play.token)
            self.corpus = retrieval.open_corpus(play.corpus, play.timeout_s, token)

    def reset(self, item: int) -> str:
        if not 0 <= item < len(self.bank):
            raise ValueError(f'item {item} is not in 0..{len(self.bank) - 1}')
        self.question = self.bank[item]
        self.golds = Golds(self.question.answers, self.play.normaliser)
        self.searcher = self.corpus or (
            retrieval.Index.build(self.question.documents)
            if self.question.documents
            else countries.index()
        )
        self.steps: list[Step] = []
        self.calls, self.asked = 0, set()  # of the episode: number of calls, queries
        return self.dialect.question.format(question=self.question.text)

    def step(self, action: str) -> Reply:
        act, play, dialect = self.dialect.read(action), self.play, self.dialect
        done = len(self.steps) + 1 == play.turns
        result = answer = None
        observation, right = dialect.invalid, False
        if act.kind == 'answer':
            answer, right = act.content, self.golds.equal(act.content)
            done = done or right or not play.retries
            observation = dialect.right if right else dialect.wrong
        elif act.kind:
            self.calls += 1
            done = done or self.calls == play.calls
            if not done and act.kind == 'failed':
                result = f'{ERROR} {act.content}'
            elif not done:
                hits = self.searcher.search(act.content, play.topk or dialect.topk)
                result = dialect.show(hits)
            self.asked.add(act.content)
            observation = '' if done else dialect.result.format(result)
        self.steps.append(Step(action, result, answer))
        measured = scoring.measured(self.steps, dialect.tags, self.golds)
        return Reply(
            observation,
            reward=REWARDS[play.rewards](self.steps, dialect.tags, self.golds, done),
            done=done,
            success=right,
            figures=tuple(measured[name] for name in FIGURES),
            valid=act.kind not in ('', 'failed'),
        )

    def close(self) -> None:
        if isinstance(self.corpus, retrieval.Client):
            self.corpus.close()

    def plan(self) -> list[str]:
        """Return the expert's turns: the remaining queries of the question, then its answer.

        Without known queries it searches for the question itself.
        """
        queries = self.question.queries or (self.question.text,)
        left = [query for query in queries if query not in self.asked]
        if self.play.calls:  # the last call ends an episode without an answer
            left = left[: max(self.play.calls - 1 - self.calls, 0)]
        answer = self.dialect.answering(self.question.answers[0])
        return [*map(self.dialect.searching, left), answer]

    def best(self) -> str:
        """Return the first turn of the plan."""
        return self.plan()[0]

    def random(self, generator: np.random.Generator) -> str:
        """Search for up to three words of the text so far, or answer a name or a fixed fact."""
        context = '\n'.join([self.question.text, *(step.result or '' for step in self.steps)])
        known = self.question.answers if self.question.by_heart else ()

        def drawn(among: list[str], count: int) -> str:
            among = among or ['nothing']
            return ' '.join(among[number] for number in generator.integers(len(among), size=count))

        if generator.random() < 0.5:
            words = re.findall(r'\w+', context)
            return self.dialect.searching(drawn(words, int(generator.integers(1, 4))))
        return self.dialect.answering(drawn([*re.findall(NAME, context), *known], 1))


class SearchQA(Search):
    """SearchQA with AgentGym's dialect."""

    def __init__(self, *, dialect: str = 'agentgym', **settings: Any):
        super().__init__(dialect=dialect, **settings)


@dataclasses.dataclass(frozen=True)
class SearchEnvironment(Served, Play):
    hops: tuple[int, ...] = (1, 2)  # of questions about countries

    name, WORLD, FIGURES = 'search', Search, FIGURES
    RULES = (
        must(
            'questions',
            f'up to {len(SPLITS)} files ({", ".join(SPLITS)}), or search.item_files to theirs',
            lambda world: len(world.questions) <= len(SPLITS) or world.item_files,
        ),
    )
    RUN_RULES = (
        must(
            'search.turns',
            lambda run: (
                f'at most {run.acting_turns}, the turns of a trial that act (env.max_turns)'
            ),
            lambda run: run.worlds[0].turns <= run.acting_turns,
        ),
    )

    @property
    def instruction(self) -> str:
        return DIALECTS[self.dialect].instruction

    @property
    def accepted(self) -> str:
        return DIALECTS[self.dialect].accepted

    @property
    def forms(self) -> tuple[str, ...]:
        return DIALECTS[self.dialect].forms

    @property
    def quick(self) -> bool:
        """Whether search is fast, with documents in this process."""
        return not self.corpus.startswith('http')

    def needs(self) -> None:
        if self.quick:
            retrieval.check()

    def near(self) -> Search:
        return self.world()

    def player(self) -> Search:
        return self.world()

    def our_items(self, split: str) -> np.ndarray:
        """Return the items of a split; two or three files are train, validation and test.

        A single file and the questions about countries are split by a digest of the subject.
        """
        if len(self.questions) > 1:
            sizes = [len(questions.read(path)) for path in self.questions]
            place = SPLITS.index(split)
            return np.arange(sum(sizes[:place]), sum(sizes[: place + 1]), dtype=np.int32)
        every = bank(self.questions, self.known)
        chosen = [
            level_split((question.subject or question.text).encode()) == split
            and (bool(self.questions) or question.hops in self.hops)
            for question in every
        ]
        return np.flatnonzero(chosen).astype(np.int32)
