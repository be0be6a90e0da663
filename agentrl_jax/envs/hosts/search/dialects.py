"""Four dialects of search and answer, as data.

plain      search or answer between tags, without thoughts; our own wording
agentgym   AgentGym's SearchQA: think, search, information, answer
search_r1  Search-R1: the same tags in one prompt; text after the first search is ignored
mt_grpo    MT-GRPO: reasoning, a tool called in JSON, result, answer
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl_jax.envs.hosts.search.retrieval import Document, title_and_text
from agentrl_jax.envs.hosts.search.scoring import ERROR, Tags

TOOL = 'wiki_search'
Hits = Sequence[tuple[Document, float]]


@dataclasses.dataclass(frozen=True)
class Act:
    """The action that a turn requests."""

    kind: str  # search, answer, failed (an invalid call), or '' for no action
    content: str  # query, answer, or the error of the call


@dataclasses.dataclass(frozen=True)
class Dialect:
    tags: Tags
    instruction: str  # at the start of every episode
    accepted: str  # fixed answer to the instruction; '' = it is a system message
    question: str  # first observation
    read: Callable[[str], Act]
    result: str  # observation of a call
    show: Callable[[Hits], str]  # formats the documents of a result
    topk: int  # documents per result
    invalid: str  # observation after a turn without a call or an answer
    right: str = ''  # observation after a right answer
    wrong: str = ''
    thought: str = '<{tag}>{text}</{tag}>'  # template of a thought and a call
    call: Callable[[str], str] = str

    def searching(self, query: str) -> str:
        """Return an expert turn that searches."""
        return self._turn(self.tags.call, self.call(query), f'I search for {query}.')

    def answering(self, answer: str) -> str:
        return self._turn(self.tags.answer, answer, 'I know the answer.')

    @property
    def forms(self) -> tuple[str, str]:
        """Templates of the turns (text.forms)."""
        hole = '{}'
        search = self._turn(self.tags.call, self.call(hole), hole)
        return search, self._turn(self.tags.answer, hole, hole)

    def _turn(self, tag: str, content: str, thought: str) -> str:
        content_of = {self.tags.think: thought, tag: content}
        return ''.join(self.thought.format(tag=t, text=content_of[t]) for t in content_of if t)


SEARCH_OR_ANSWER = re.compile(r'<(search|answer)>(.*?)</\1>', re.DOTALL)


def read_first(text: str) -> Act:
    """Read the first search or answer; if an answer comes first, read the last answer."""
    match = SEARCH_OR_ANSWER.search(text)
    if match is None:
        return Act('', '')
    if match[1] == 'answer':
        return Act('answer', TAGS.last_answer(text))
    return Act('search', match[2].strip())


def read_to_the_end_of_a_search(text: str) -> Act:
    """Apply read_first up to the first closing search tag, or else the first closing answer tag."""
    for end in ('</search>', '</answer>'):
        head, mark, _ = text.partition(end)
        if mark:
            return read_first(head + mark)
    return Act('', '')


def read_tool(text: str) -> Act:
    """Read an answer, or else a call: {"name": "wiki_search", "args": {"query": "..."}}."""
    answer, call = (TOOL_TAGS.within(name, text) for name in ('answer', 'tool'))
    if answer is not None:
        return Act('answer', answer)
    return Act('', '') if call is None else read_call(call)


def read_call(text: str) -> Act:
    try:
        call = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return Act('failed', 'the call is not valid JSON')
    if not isinstance(call, dict):
        return Act('failed', 'the call is not a JSON object')
    if 'name' not in call:
        return Act('failed', 'the call does not name a tool')
    if call['name'] != TOOL:
        return Act('failed', f'there is no tool {call["name"]!s:.50}')
    args: Any = call.get('args', {})
    if not isinstance(args, dict) or args.keys() != {'query'} or not isinstance(args['query'], str):
        return Act('failed', f'{TOOL} takes one text, query')
    return Act('search', args['query'])


def numbered(hits: Hits) -> str:
    """Format passages as Search-R1 does: the first line, with its quotes, is the title."""
    lines = []
    for number, (document, _) in enumerate(hits, 1):
        title, _, text = document['contents'].partition('\n')
        lines.append(f'Doc {number}(Title: {title}) {text}')
    return '\n'.join(lines).strip()


def whole(hits: Hits) -> str:
    """Format documents with their titles and texts unchanged."""
    if not hits:
        return 'Nothing was found.'
    return '\n\n'.join('\n'.join(title_and_text(document)) for document, _ in hits)


def texts(hits: Hits) -> str:
    """Format documents without their titles, one per line."""
    return '\n'.join(title_and_text(document)[1] for document, _ in hits) or 'Nothing was found.'


TAGS = Tags('think', 'search', 'information', 'answer')
WORDLESS = Tags('', 'search', 'information', 'answer')
TOOL_TAGS = Tags('reasoning', 'tool', 'result', 'answer')

PLAIN = Dialect(
    tags=WORDLESS,
    instruction='Look things up with <search>words</search>, then say <answer>words</answer>.',
    accepted='',
    question='{question}',
    read=read_first,
    result='{}',
    show=texts,
    topk=3,
    invalid='That was neither a search nor an answer.',
    right='Right.',
    wrong='Wrong.',
)
# Published checkpoints were trained on or compared with these prompts: AgentGym's searchqa server
# (MIT) and Search-R1's policies (Apache-2.0). They are used only if their dialect is chosen.
# MT-GRPO's prompt has the same content in our own wording.
AGENTGYM = Dialect(
    tags=TAGS,
    instruction=(
        'You must always reason inside <think>...</think> first; if you lack knowledge, issue a '
        '<search>...</search> and then stop; do not generate <information> or <answer> yet; wait '
        'for external input between <information>...</information> before continuing; resume only '
        'when new <information> is given; do not skip steps or anticipate answers early.'
    ),
    accepted='Ok.',
    question=(
        'You must reason inside <think>...</think> first. If you do not have enough knowledge, '
        'issue a <search>...</search> and then STOP. Do not generate <information> or <answer> '
        'yet. Wait for external input wrapped in <information>...</information>. After receiving '
        'information, reason again in <think>. If confident, output your final answer in '
        '<answer>...</answer>. Do not output <answer> before receiving <information> unless you '
        'are fully confident. If you find no further external knowledge needed, you can directly '
        'provide the answer inside <answer> and </answer>, without detailed illustrations. For '
        'example, <answer> Beijing </answer>. Follow this process every time.\n\n'
        ' Question: {question}'
    ),
    read=read_first,
    result='<information>{}</information>',
    show=numbered,
    topk=3,
    invalid=(
        'Your previous action is invalid. If you want to search, you should put the query between '
        '<search> and </search>. If you want to give the final answer, you should put the answer '
        'between <answer> and </answer>. Please try again.'
    ),
    right='Congratulations! You have answered the question correctly.',
    wrong='Sorry, your answer is incorrect. Please try again.',
)
SEARCH_R1 = Dialect(
    tags=TAGS,
    instruction='',
    accepted='',
    question=(
        'Answer the given question. You must conduct reasoning inside <think> and </think> first '
        'every time you get new information. After reasoning, if you find you lack some knowledge, '
        'you can call a search engine by <search> query </search> and it will return the top '
        'searched results between <information> and </information>. You can search as many times '
        'as your want. If you find no further external knowledge needed, you can directly provide '
        'the answer inside <answer> and </answer>, without detailed illustrations. For example, '
        '<answer> Beijing </answer>. Question: {question}\n'
    ),
    read=read_to_the_end_of_a_search,
    result='\n\n<information>{}</information>\n\n',
    show=numbered,
    topk=3,
    invalid=(
        '\nMy previous action is invalid. If I want to search, I should put the query between '
        '<search> and </search>. If I want to give the final answer, I should put the answer '
        'between <answer> and </answer>. Let me try again.\n'
    ),
)
MT_GRPO = Dialect(
    tags=TOOL_TAGS,
    instruction=(
        'You answer questions, and may look things up with this tool:\n\n'
        f'{TOOL}: Searches an encyclopedia and returns the article that fits best.\n'
        'Arguments:\n  - query: words to search for\n\n'
        'First think inside <reasoning>...</reasoning>. Then call the tool once, in JSON:\n'
        f'<tool>\n{{"name": "{TOOL}", "args": {{"query": "..."}}}}\n</tool>\n'
        'What it returns is shown to you inside <result>...</result>. Think again inside '
        '<reasoning>...</reasoning>, and give your answer inside <answer>...</answer>.\n\n'
        'Call the tool one time only, by its name and with its argument, in the format above. Use '
        'what you know besides; if the result is of no use, answer by that alone. The answer is a '
        'name or a few words, without explanations.\n'
    ),
    accepted='',
    question='Question: {question}\n',
    read=read_tool,
    result='<result>\n{}\n</result>',
    show=whole,
    topk=1,
    invalid=f'{ERROR} there is neither a call between <tool> and </tool> nor an answer.',
    thought='<{tag}>\n{text}\n</{tag}>\n',
    call=lambda query: json.dumps({'name': TOOL, 'args': {'query': query}}, ensure_ascii=False),
)
DIALECTS = {'plain': PLAIN, 'agentgym': AGENTGYM, 'search_r1': SEARCH_R1, 'mt_grpo': MT_GRPO}
