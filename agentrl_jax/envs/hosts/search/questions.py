"""Questions with known answers, in their published file formats.

  TriviaQA       its JSON, {"Data": [{"Question", "Answer": {"NormalizedAliases", ...}}]}, or rows
                 of HuggingFace's copy, {"question", "answer": {"normalized_aliases", ...}}
  NQ             {"question", "answer": [...]}
  HotpotQA       {"question", "answer": "..."}
  Search-R1's    {"question", "golden_answers": [...]} of any of them (FlashRAG's form)
A file is one JSON value, or one row per line. The fields of a row determine its format.
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
    answers: tuple[str, ...]  # all right answers
    queries: tuple[str, ...] = ()  # one per hop, if known
    subject: str = ''  # all questions about one subject are in one split
    kind: str = ''  # of subject
    documents: tuple[Document, ...] = ()  # to search in; () = the world's corpus
    by_heart: bool = False  # whether other questions have the same answer

    @property
    def hops(self) -> int:
        """Number of searches needed; 0 if unknown."""
        return len(self.queries)


def parse(row: Any) -> Question:
    """Parse a row of a file; raise ValueError if a part is missing."""
    if not isinstance(row, dict):
        raise ValueError('a question must be an object')
    text = row.get('question', row.get('Question'))
    answer = row.get('golden_answers', row.get('answer', row.get('Answer')))
    if isinstance(answer, dict):
        lower = {name.lower().replace('_', ''): x for name, x in answer.items()}
        # MT-GRPO compares only with the normalised aliases
        answer = lower.get('normalizedaliases') or lower.get('aliases') or lower.get('value')
    answers = [answer] if isinstance(answer, str) else answer
    if not isinstance(text, str) or not text.strip():
        raise ValueError('there is no question')
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError('there is no answer under golden_answers, answer or Answer')
    text = text.strip()
    if 'golden_answers' in row and not text.endswith('?'):
        text += '?'  # as in Search-R1
    return Question(text, tuple(dict.fromkeys(answers)))


@functools.cache
def read(path: str) -> tuple[Question, ...]:
    """Read all questions of a file, in order."""
    content, where = pathlib.Path(path).read_text(encoding='utf-8'), f'{path}, question '
    try:
        rows = json.loads(content)
        rows = rows['Data'] if isinstance(rows, dict) and 'Data' in rows else rows
        rows = rows if isinstance(rows, list) else [rows]
    except json.JSONDecodeError:
        rows = content.removesuffix('\n').split('\n')  # splitlines would cut texts at U+2028 too
        where = f'{path}:'
    questions = tuple(parsed_rows(rows, parse, where, f'a question is such as {EXAMPLE}'))
    if not questions:
        raise ValueError(f'{path} has no questions')
    return questions
