"""Answer comparison and rewards for search episodes, as in the papers' code.

  exact      1 for a right answer: Search-R1 (arXiv:2503.09516), AgentGym's SearchQA
  format     Search-R1 v0.3: 1 right, .8 right in a bad format, .2 wrong, .1 wrong in a bad format
  mt_grpo    MT-GRPO (arXiv:2505.11821 v1): a turn reward of up to .7 for the search, an outcome of
             up to 1.9 for answer and format
  mt_ppo     its second version: a reward for each search, an outcome of 1, .2 or -1

The input is one Step per turn: the policy's text and the result it received.
"""

import dataclasses
import itertools
import re
import string
from collections.abc import Callable, Sequence

ARTICLES = re.compile(r'\b(a|an|the)\b')
# TriviaQA's script v1.0 also replaces these marks by blanks
MARKS = str.maketrans(dict.fromkeys(string.punctuation + '\u2018\u2019\u00b4`', ' '))
WEIGHT = 0.2  # of mt_grpo's tool success, format and tags
PRESENT, EXACT = 0.5, 1.0
FOUND, WELL_FORMED, ILL_FORMED, SEARCH_COST = 0.3, 0.1, -0.2, 0.1  # of mt_ppo's turns
RIGHT, WRONG, MALFORMED = 1.0, 0.2, -1.0  # mt_ppo's outcomes
ERROR = 'Error:'  # prefix of a failed call's result


@dataclasses.dataclass(frozen=True)
class Tags:
    """Names of the tags around thoughts, calls, results and answers."""

    think: str  # '' = turns have no thought
    call: str
    result: str
    answer: str

    @property
    def turn(self) -> tuple[tuple[str, ...], ...]:
        """The parts of a turn in order, each as its possible tags."""
        thought = ((self.think,),) if self.think else ()
        return (*thought, (self.call, self.answer))

    def within(self, name: str, text: str) -> str | None:
        """Return the text inside the first pair of tags with this name; None without one."""
        match = re.search(rf'<{name}>(.*?)</{name}>', text, re.DOTALL)
        return None if match is None else match[1].strip()

    def last_answer(self, text: str) -> str | None:
        answers = re.findall(rf'<{self.answer}>(.*?)</{self.answer}>', text, re.DOTALL)
        return answers[-1].strip() if answers else None


@dataclasses.dataclass(frozen=True)
class Step:
    """A turn: the policy's text, and the result of its call."""

    text: str
    result: str | None = None  # text between the result tags; None: no call was made
    answer: str | None = None  # if the turn was read as an answer


# ---- answers -----------------------------------------------------------------------------------


def squad(text: str) -> str:
    """Apply SQuAD's normalisation, also used by NQ, HotpotQA and Search-R1.

    It lowercases and removes ASCII punctuation, articles and extra blanks.
    """
    letters = text.lower().translate(str.maketrans('', '', string.punctuation))
    return ' '.join(ARTICLES.sub(' ', letters).split())


def triviaqa(text: str) -> str:
    """Apply TriviaQA's normalisation, where punctuation separates words."""
    return ' '.join(ARTICLES.sub(' ', text.lower().translate(MARKS)).split())


def as_written(text: str) -> str:
    """Lowercase and strip only, as MT-GRPO does: 'Paris.' differs from 'paris'."""
    return text.lower().strip()


NORMALISERS = {rule.__name__: rule for rule in (squad, triviaqa, as_written)}


@dataclasses.dataclass(frozen=True)
class Golds:
    """The right answers to a question, compared with the named normaliser of NORMALISERS."""

    answers: tuple[str, ...]
    normaliser: str = 'squad'

    @property
    def normalised(self) -> list[str]:
        """The normalised answers; '' for an answer of only articles and punctuation."""
        return list(map(NORMALISERS[self.normaliser], self.answers))

    def equal(self, answer: str | None) -> bool:
        """Return whether an answer matches exactly; '' matches '', as in SQuAD's script v1.1."""
        return answer is not None and NORMALISERS[self.normaliser](answer) in self.normalised

    def within(self, text: str | None) -> bool:
        """Return whether a text contains one of them; '' is ignored, as every text contains it."""
        text = NORMALISERS[self.normaliser](text or '')
        return any(answer in text for answer in self.normalised if answer)


# ---- MT-GRPO's measures ------------------------------------------------------------------------


def tool_success(steps: Sequence[Step], tags: Tags) -> float:
    """Return the fraction of answered calls without an error; 0 if no call was answered."""
    called = [step for step in steps if tags.within(tags.call, step.text) is not None]
    results = [step.result for step in called if step.result is not None]
    return sum(not result.startswith(ERROR) for result in results) / max(len(results), 1)


def answer_presence(steps: Sequence[Step], golds: Golds) -> bool:
    """Return whether the first result contains an answer."""
    results = [step.result for step in steps if step.result is not None]
    return bool(results) and golds.within(results[0])


def last_answer(steps: Sequence[Step], tags: Tags) -> str | None:
    """Return the first answer of the last turn that has one, as MT-GRPO's parser does."""
    answers = (tags.within(tags.answer, step.text) for step in reversed(steps))
    return next((answer for answer in answers if answer is not None), None)


def format_score(steps: Sequence[Step], tags: Tags) -> float:
    """Return the mean over turns of .4 for the required tags, .2 for the right start, .2 for the
    right end, and .2 unconditionally. A turn without tags scores .2."""
    return sum(_format_score(step.text.strip(), tags) for step in steps) / max(len(steps), 1)


def _format_score(text: str, tags: Tags) -> float:
    sets = tags.turn
    present = sum(any(f'<{tag}>' in text or f'</{tag}>' in text for tag in one) for one in sets)
    any_pair = any(tags.within(tag, text) is not None for one in sets for tag in one)
    starts = text.startswith(tuple(f'<{tag}>' for tag in sets[0]))
    ends = text.endswith(tuple(f'</{tag}>' for tag in sets[-1]))
    return 0.4 * any_pair * present / len(sets) + 0.2 + 0.2 * starts + 0.2 * ends


def tag_count(steps: Sequence[Step], tags: Tags) -> float:
    """Return the mean over turns of 1 - |count - 1|, averaged over the used tags, at least 0."""
    return max(sum(_tag_count(step.text, tags) for step in steps) / max(len(steps), 1), 0.0)


def _tag_count(text: str, tags: Tags) -> float:
    scores = []
    for tag in itertools.chain(*tags.turn):
        counts = text.count(f'<{tag}>'), text.count(f'</{tag}>')
        scores += [1 - abs(count - 1) for count in counts] if any(counts) else []
    return sum(scores) / max(len(scores), 1)


def measured(steps: Sequence[Step], tags: Tags, golds: Golds) -> dict[str, float]:
    """Return the four metrics of MT-GRPO's tables as fractions; its rewards weight them by .2, .5,
    1 and .2."""
    return {
        'tool_success': tool_success(steps, tags),
        'answer_presence': float(answer_presence(steps, golds)),
        'exact_match': float(golds.equal(last_answer(steps, tags))),
        'format': format_score(steps, tags),
    }


# ---- rewards -----------------------------------------------------------------------------------

Rewards = Callable[[Sequence[Step], Tags, Golds, bool], float]  # reward of the last step


def exact(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    return float(golds.equal(steps[-1].answer))


def format_too(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    """Return 1 (right) or .2 (wrong), .8 or .1 in a bad format, and 0 without an answer."""
    answer = tags.last_answer(''.join(step.text for step in steps))
    if not done or answer is None:
        return 0.0
    good = is_sequence(steps, tags)
    if golds.equal(answer):
        return 1.0 if good else 0.8
    return 0.2 if good else 0.1


def is_sequence(steps: Sequence[Step], tags: Tags) -> bool:
    """Return whether an episode repeats think, call, result and ends with think, answer."""
    names = '|'.join((*itertools.chain(*tags.turn), tags.result))

    def one(tag: str) -> str:
        return rf'\s*<{tag}>(?:(?!</?(?:{names})>).)*</{tag}>'

    thought = one(tags.think) if tags.think else ''
    searches = thought + one(tags.call) + one(tags.result)
    if any(step.result is None for step in steps[:-1]):
        return False
    result = f'<{tags.result}></{tags.result}>'
    episode = result.join(step.text for step in steps)
    pattern = rf'(?:{searches})*{thought}{one(tags.answer)}\s*'
    return re.fullmatch(pattern, episode, re.DOTALL) is not None


def mt_grpo_turn(steps: Sequence[Step], tags: Tags, golds: Golds) -> float:
    """Return R_T: tool success, and an answer in the first result."""
    return WEIGHT * tool_success(steps, tags) + PRESENT * answer_presence(steps, golds)


def mt_grpo_outcome(steps: Sequence[Step], tags: Tags, golds: Golds) -> float:
    """Return R_O: .5 if the answer has a gold answer, 1 if it equals one, plus the format."""
    answer = last_answer(steps, tags)
    score = PRESENT * golds.within(answer) + EXACT * golds.equal(answer)
    return score + WEIGHT * (format_score(steps, tags) + tag_count(steps, tags))


def mt_grpo(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    """Return the increase of R_T in this turn, plus R_O at the end of the episode."""
    grown = mt_grpo_turn(steps, tags, golds) - mt_grpo_turn(steps[:-1], tags, golds)
    return grown + (mt_grpo_outcome(steps, tags, golds) if done else 0.0)


def mt_ppo(steps: Sequence[Step], tags: Tags, golds: Golds, done: bool) -> float:
    """Return .3 for an answer in the result, plus .1 or -.2 for the format, minus .1 per search so
    far. The last turn scores 1 or .2 by its answer, or -1 in a bad format."""
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
    """Return whether a text has exactly one pair of each tag, in this order; a first tag of '' is
    ignored."""
    names = [name for name in (first, second) if name]
    marks = re.findall(rf'</?(?:{"|".join(names)})>', text)
    return marks == [mark for name in names for mark in (f'<{name}>', f'</{name}>')]


REWARDS: dict[str, Rewards] = {
    'exact': exact,
    'format': format_too,
    'mt_grpo': mt_grpo,
    'mt_ppo': mt_ppo,
}
