"""Answers compared and episodes of search rewarded, as the papers' codes do it.

  exact      1 for a right answer: Search-R1 (arXiv:2503.09516), AgentGym's SearchQA
  format     Search-R1 v0.3: 1 right, .8 right in a bad format, .2 wrong, .1 wrong in that
  mt_grpo    MT-GRPO (arXiv:2505.11821 v1): a turn reward of up to .7 for the search, an outcome of
             up to 1.9 for answer and format
  mt_ppo     its second version: a reward for each search, an outcome of 1, .2 or -1

What is read is what the policy wrote and what was shown to it, a Step for each turn.
"""

import dataclasses
import itertools
import re
import string
from collections.abc import Callable, Sequence

ARTICLES = re.compile(r'\b(a|an|the)\b')
# TriviaQA's script v1.0 takes these marks for blanks too
MARKS = str.maketrans(dict.fromkeys(string.punctuation + '\u2018\u2019\u00b4`', ' '))
WEIGHT = 0.2  # of mt_grpo's tool success, of its format and of its tags
PRESENT, EXACT = 0.5, 1.0
FOUND, WELL_FORMED, ILL_FORMED, SEARCH_COST = 0.3, 0.1, -0.2, 0.1  # of mt_ppo's turns
RIGHT, WRONG, MALFORMED = 1.0, 0.2, -1.0  # its outcomes
ERROR = 'Error:'  # how the result of a call that failed begins


@dataclasses.dataclass(frozen=True)
class Tags:
    """Names of the tags around what is thought, asked, shown and answered."""

    think: str  # '' = a turn does not begin with a thought
    call: str
    result: str
    answer: str

    @property
    def turn(self) -> tuple[tuple[str, ...], ...]:
        """What a turn has, one after another, each by one of some tags."""
        thought = ((self.think,),) if self.think else ()
        return (*thought, (self.call, self.answer))

    def within(self, name: str, text: str) -> str | None:
        """What is in the first pair of tags of a name; None without one."""
        found = re.search(rf'<{name}>(.*?)</{name}>', text, re.DOTALL)
        return None if found is None else found[1].strip()

    def last_answer(self, text: str) -> str | None:
        found = re.findall(rf'<{self.answer}>(.*?)</{self.answer}>', text, re.DOTALL)
        return found[-1].strip() if found else None


@dataclasses.dataclass(frozen=True)
class Step:
    """A turn: what the policy wrote, and what its call was answered by."""

    text: str
    result: str | None = None  # text between the tags of a result; None: no call was carried out
    answer: str | None = None  # where the turn was taken as one


# ---- answers -----------------------------------------------------------------------------------


def squad(text: str) -> str:
    """Lower case, ASCII punctuation deleted, articles and superfluous blanks left out.

    SQuAD's normalisation, which NQ, HotpotQA and Search-R1 use too.
    """
    kept = text.lower().translate(str.maketrans('', '', string.punctuation))
    return ' '.join(ARTICLES.sub(' ', kept).split())


def triviaqa(text: str) -> str:
    """TriviaQA's: punctuation separates words."""
    return ' '.join(ARTICLES.sub(' ', text.lower().translate(MARKS)).split())


def as_written(text: str) -> str:
    """MT-GRPO's: case alone; so 'Paris.' is not 'paris', nor 'The Beatles' 'beatles'."""
    return text.lower().strip()


NORMALISERS: dict[str, Callable[[str], str]] = {
    'squad': squad,
    'triviaqa': triviaqa,
    'as_written': as_written,
}


@dataclasses.dataclass(frozen=True)
class Golds:
    """The right answers to a question, compared by a name of NORMALISERS."""

    answers: tuple[str, ...]
    normaliser: str = 'squad'

    @property
    def normalised(self) -> list[str]:
        """'' for an answer of articles and punctuation only."""
        return list(map(NORMALISERS[self.normaliser], self.answers))

    def equal(self, answer: str | None) -> bool:
        """Exact match with one of them, as SQuAD's script v1.1 has it: '' matches ''."""
        return answer is not None and NORMALISERS[self.normaliser](answer) in self.normalised

    def within(self, text: str | None) -> bool:
        """Whether one of them is part of a text, without '', which is part of every text."""
        text = NORMALISERS[self.normaliser](text or '')
        return any(answer in text for answer in self.normalised if answer)


# ---- what MT-GRPO measures ---------------------------------------------------------------------


def tool_success(steps: Sequence[Step], tags: Tags) -> float:
    """Calls whose result is no error / calls that were answered; 0 without any."""
    called = [step for step in steps if tags.within(tags.call, step.text) is not None]
    results = [step.result for step in called if step.result is not None]
    return sum(not result.startswith(ERROR) for result in results) / max(len(results), 1)


def answer_presence(steps: Sequence[Step], golds: Golds) -> bool:
    """Whether an answer is part of the first result."""
    results = [step.result for step in steps if step.result is not None]
    return bool(results) and golds.within(results[0])


def last_answer(steps: Sequence[Step], tags: Tags) -> str | None:
    """The first answer of the last turn that has one, as MT-GRPO's parser finds it."""
    answers = (tags.within(tags.answer, step.text) for step in reversed(steps))
    return next((answer for answer in answers if answer is not None), None)


def format_score(steps: Sequence[Step], tags: Tags) -> float:
    """Mean over turns: .4 for the tags that it should have, .2 each for the right beginning and the
    right end, and .2 in any case, which is what a turn without tags gets."""
    return sum(_format_score(step.text.strip(), tags) for step in steps) / max(len(steps), 1)


def _format_score(text: str, tags: Tags) -> float:
    sets = tags.turn
    present = sum(any(f'<{tag}>' in text or f'</{tag}>' in text for tag in one) for one in sets)
    whole = any(tags.within(tag, text) is not None for one in sets for tag in one)
    begins = text.startswith(tuple(f'<{tag}>' for tag in sets[0]))
    ends = text.endswith(tuple(f'</{tag}>' for tag in sets[-1]))
    return 0.4 * whole * present / len(sets) + 0.2 + 0.2 * begins + 0.2 * ends


def tag_count(steps: Sequence[Step], tags: Tags) -> float:
    """Mean over turns of how near to one opening and one closing the used tags are; at least 0."""
    return max(sum(_tag_count(step.text, tags) for step in steps) / max(len(steps), 1), 0.0)


def _tag_count(text: str, tags: Tags) -> float:
    scores = []
    for tag in itertools.chain(*tags.turn):
        counts = text.count(f'<{tag}>'), text.count(f'</{tag}>')
        scores += [1 - abs(count - 1) for count in counts] if any(counts) else []
    return sum(scores) / max(len(scores), 1)


def measured(steps: Sequence[Step], tags: Tags, golds: Golds) -> dict[str, float]:
    """The four figures of MT-GRPO's tables as shares; there the rewards for them are .2, .5, 1, .2
    times as large."""
    return {
        'tool_success': tool_success(steps, tags),
        'answer_presence': float(answer_presence(steps, golds)),
        'exact_match': float(golds.equal(last_answer(steps, tags))),
        'format': format_score(steps, tags),
    }


# ---- rewards -----------------------------------------------------------------------------------

Rewards = Callable[[Sequence[Step], Tags, Golds, bool], float]  # of the last of the steps


def exact(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    return float(golds.equal(steps[-1].answer))


def format_too(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    """1 or .2 by the answer, .8 or .1 in a bad format, 0 without an answer."""
    answer = tags.last_answer(''.join(step.text for step in steps))
    if not done or answer is None:
        return 0.0
    good = is_sequence(steps, tags)
    if golds.equal(answer):
        return 1.0 if good else 0.8
    return 0.2 if good else 0.1


def is_sequence(steps: Sequence[Step], tags: Tags) -> bool:
    """Whether an episode is think, call, result again and again, then think, answer, all closed."""
    names = '|'.join((*itertools.chain(*tags.turn), tags.result))

    def one(tag: str) -> str:
        return rf'\s*<{tag}>(?:(?!</?(?:{names})>).)*</{tag}>'

    thought = one(tags.think) if tags.think else ''
    searches = thought + one(tags.call) + one(tags.result)
    if any(step.result is None for step in steps[:-1]):
        return False
    shown = f'<{tags.result}></{tags.result}>'
    whole = shown.join(step.text for step in steps)
    pattern = rf'(?:{searches})*{thought}{one(tags.answer)}\s*'
    return re.fullmatch(pattern, whole, re.DOTALL) is not None


def mt_grpo_turn(steps: Sequence[Step], tags: Tags, golds: Golds) -> float:
    """R_T: tool success and the answer in the first result."""
    return WEIGHT * tool_success(steps, tags) + PRESENT * answer_presence(steps, golds)


def mt_grpo_outcome(steps: Sequence[Step], tags: Tags, golds: Golds) -> float:
    """R_O: an answer that contains a right one, is one, and the format; it needs no search."""
    answer = last_answer(steps, tags)
    score = PRESENT * golds.within(answer) + EXACT * golds.equal(answer)
    return score + WEIGHT * (format_score(steps, tags) + tag_count(steps, tags))


def mt_grpo(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    """What R_T has grown by in this turn; with the last one R_O."""
    grown = mt_grpo_turn(steps, tags, golds) - mt_grpo_turn(steps[:-1], tags, golds)
    return grown + (mt_grpo_outcome(steps, tags, golds) if done else 0.0)


def mt_ppo(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    """A turn: .3 for an answer in its result, .1 or -.2 for its format, less .1 for each search so
    far. The last one: 1 or .2 by its answer, -1 in a bad format."""
    text, result = steps[-1].text, steps[-1].result
    if done:
        if not _once(text, tags.think, tags.answer):
            return MALFORMED
        return RIGHT if golds.equal(tags.within(tags.answer, text)) else WRONG
    searches = sum(step.result is not None for step in steps)
    good = result is not None and _once(text, tags.think, tags.call)
    for_form = WELL_FORMED if good else ILL_FORMED
    return FOUND * golds.within(result) + for_form - SEARCH_COST * searches


def _once(text: str, first: str, second: str) -> bool:
    """Whether pairs of these tags, or of the second where the first is '', stand in a text once
    each, in this order."""
    names = [name for name in (first, second) if name]
    marks = re.findall(rf'</?(?:{"|".join(names)})>', text)
    return marks == [mark for name in names for mark in (f'<{name}>', f'</{name}>')]


REWARDS: dict[str, Rewards] = {
    'exact': exact,
    'format': format_too,
    'mt_grpo': mt_grpo,
    'mt_ppo': mt_ppo,
}
