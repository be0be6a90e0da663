"""Questions with known answers, from the files in which they are published.

  TriviaQA       its JSON, {"Data": [{"Question", "Answer": {"NormalizedAliases", ...}}]}, or rows
                 of HuggingFace's copy, {"question", "answer": {"normalized_aliases", ...}}
  NQ             {"question", "answer": [...]}
  HotpotQA       {"question", "answer": "..."}
  Search-R1's    {"question", "golden_answers": [...]} of any of them (FlashRAG's form)
A file is one JSON value or a row a line; which of these a row is, its fields say.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from agentrl_jax.envs.hosts.search.retrieval import Document, parsed_rows

EXAMPLE = '{"question": "What is the capital of Norway?", "golden_answers": ["Oslo"]}'


@dataclasses.dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]  # all that are right
    queries: tuple[str, ...] = ()  # one for each hop, where they are known
    subject: str = ''  # what it is about: questions of one subject are in one split
    kind: str = ''  # of subject
    documents: tuple[Document, ...] = ()  # where it is looked up; () = in the world's corpus
    by_heart: bool = False  # whether other questions have the same answer

    @property
    def hops(self) -> int:
        """0 where nobody knows."""
        return len(self.queries)


def parse(row: Any) -> Question:
    """A row of a file; a ValueError says what is missing in it."""
    if not isinstance(row, dict):
        raise ValueError('a question is an object with fields')
    text = row.get('question', row.get('Question'))
    found = row.get('golden_answers', row.get('answer', row.get('Answer')))
    if isinstance(found, dict):
        lower = {name.lower().replace('_', ''): x for name, x in found.items()}
        # MT-GRPO compares with these alone; the value is the first of the answers shown
        found = lower.get('normalizedaliases') or lower.get('aliases') or lower.get('value')
    answers = [found] if isinstance(found, str) else found
    if not isinstance(text, str) or not text.strip():
        raise ValueError('there is no question')
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError('there is no answer under golden_answers, answer or Answer')
    text = text.strip()
    if 'golden_answers' in row and not text.endswith('?'):
        text += '?'  # as Search-R1 asks them
    return Question(text, tuple(dict.fromkeys(answers)))


@functools.cache
def read(path: str) -> tuple[Question, ...]:
    """All questions of a file, in its order."""
    content, where = pathlib.Path(path).read_text(encoding='utf-8'), f'{path}, question '
    try:
        rows = json.loads(content)
        rows = rows['Data'] if isinstance(rows, dict) and 'Data' in rows else rows
        rows = rows if isinstance(rows, list) else [rows]
    except json.JSONDecodeError:
        rows = content.removesuffix('\n').split('\n')  # splitlines would cut texts at U+2028 too
        where = f'{path}:'
    found = tuple(parsed_rows(rows, parse, where, f'a question is such as {EXAMPLE}'))
    if not found:
        raise ValueError(f'{path} holds no questions')
    return found
