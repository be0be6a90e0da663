"""WebArena's tasks (arXiv:2307.13854), from its file of 812 tasks or a file in that format.

Addresses in the file are names such as __SHOPPING__; `sites` maps them to addresses. The file is
config_files/test.raw.json of WebArena, included in the package libwebarena as test.raw.json.
"""

import dataclasses
import json
import pathlib
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.envs.hosts.web.chromium import origin
from agentrl_jax.envs.hosts.world import shown

EVALUATORS = ('string_match', 'url_match', 'program_html')
CONTENTS = ('exact_match', 'must_include')
ANSWERS = (*CONTENTS, 'fuzzy_match')
NOT_POSSIBLE = 'N/A'
BETWEEN_PAGES = ' |AND| '
EITHER = ' |OR| '


@dataclasses.dataclass(frozen=True)
class Target:
    """A page that an evaluator checks, and its required contents."""

    url: str  # address, 'last' (the episode's last page) or a function call
    locator: str  # JavaScript, or a function call; '' = the full page
    prepare: tuple[str, ...]  # JavaScript to run first
    kind: str  # of CONTENTS
    contents: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    number: int
    intent: str
    sites: tuple[str, ...]
    start: tuple[str, ...]  # addresses, one tab each; the first tab is in front
    state: str  # file of login cookies; '' = not logged in
    evaluators: tuple[str, ...]
    answers: tuple[tuple[str, tuple[str, ...]], ...]  # (kind of ANSWERS, texts)
    reason: str  # why an impossible task is impossible
    urls: tuple[str, ...]  # accepted addresses of the last page
    targets: tuple[Target, ...]

    @property
    def needs_judge(self) -> bool:
        """Whether a judge must compare answers by meaning; a literal N/A needs none."""
        answers = dict(self.answers)
        if 'string_match' not in self.evaluators or 'fuzzy_match' not in answers:
            return False
        return answers['fuzzy_match'] != (NOT_POSSIBLE,)


def read_sites(sites: Sequence[str]) -> dict[str, str]:
    """Return addresses by name, from 'shopping=http://localhost:7770' and so on."""
    addresses = {}
    for site in sites:
        name, mark, url = site.partition('=')
        if not mark or not re.fullmatch('[a-z_]+', name):
            named = shown(site).rpartition('@')[2]  # without a password
            raise ValueError(f'web.sites: {named!r} is not name=address')
        origin(url)
        if '@' in urllib.parse.urlsplit(url).netloc:  # tasks and pages would expose it
            raise ValueError(
                f'web.sites: the address of {name} contains a user or a password: log in with the '
                'cookies of web.states instead'
            )
        addresses[name] = url.rstrip('/')
    return addresses


def read_tasks(path: str, sites: Mapping[str, str]) -> dict[int, Task]:
    """Read tasks by number; skip tasks on sites that are not listed."""
    rows = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    if not isinstance(rows, list) or not rows:
        raise ValueError(f'{path} must hold a list of tasks')
    tasks = {}
    for place, row in enumerate(rows):
        try:
            if not set(row['sites']) <= sites.keys():
                continue
            task = read_task(row, sites)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{path}, task {place}: {type(error).__name__}: {error}') from error
        if task is not None:
            tasks[task.number] = task
    if not tasks:
        raise ValueError(f'{path} has no tasks on the sites {", ".join(sites) or "(none)"}')
    return tasks


def read_task(row: Mapping[str, Any], sites: Mapping[str, str]) -> Task | None:
    """Parse a task; None if it uses a site without an address."""
    text = json.dumps(row)
    for name, url in sites.items():
        text = text.replace(f'__{name.upper()}__', url)
    if re.search('__[A-Z]+(_[A-Z]+)*__', text):
        return None
    row = json.loads(text)
    evaluation = row['eval']
    unknown = set(evaluation['eval_types']) - set(EVALUATORS)
    if unknown or not evaluation['eval_types']:
        raise ValueError(
            f'eval_types={evaluation["eval_types"]} must be some of {", ".join(EVALUATORS)}'
        )
    if 'url_note' in evaluation and evaluation['url_note'] != 'GOLD in PRED':
        raise ValueError(f'url_note {evaluation["url_note"]!r} must be GOLD in PRED')
    answers = []
    for kind, value in (evaluation['reference_answers'] or {}).items():
        if kind not in ANSWERS:
            raise ValueError(f'reference_answers: {kind!r} is not in {", ".join(ANSWERS)}')
        answers.append((kind, (value,) if isinstance(value, str) else tuple(value)))
    task = Task(
        number=int(row['task_id']),
        intent=row['intent'],
        sites=tuple(row['sites']),
        start=tuple(row['start_url'].split(BETWEEN_PAGES)),
        state=pathlib.PurePath(row['storage_state'] or '').name,
        evaluators=tuple(evaluation['eval_types']),
        answers=tuple(answers),
        reason=evaluation['string_note'] if 'string_note' in evaluation else '',
        urls=tuple((evaluation['reference_url'] or '').split(EITHER)),
        targets=tuple(map(read_target, evaluation['program_html'] or ())),
    )
    no_answer = not answers or any(fits_all(texts) for _, texts in answers)
    for evaluator, field, nothing in (
        ('string_match', 'reference_answers', no_answer),
        ('url_match', 'reference_url', fits_all(task.urls)),
        ('program_html', 'program_html', not task.targets),
    ):
        if nothing and evaluator in task.evaluators:
            raise ValueError(
                f'{field} {evaluation[field]!r:.80} leaves {evaluator} nothing to compare, and any '
                'stop would solve the task: add a reference'
            )
    return task


def fits_all(texts: Sequence[Any]) -> bool:
    """Return whether one of the texts is empty, or there are none."""
    return not texts or any(not str(text).strip() for text in texts)


def read_target(row: Mapping[str, Any]) -> Target:
    ((kind, contents),) = row['required_contents'].items()
    if kind not in CONTENTS:
        raise ValueError(f'required_contents: {kind!r} is not in {", ".join(CONTENTS)}')
    locator = row['locator'].strip()
    if locator and not locator.startswith(('document.', '[...document.', 'func:')):
        raise ValueError(f'locator {locator!r} must start with document. or func:')
    contents = (contents,) if isinstance(contents, str) else tuple(contents)
    parts = [part for one in contents for part in str(one).split(EITHER)]
    if not contents or kind == 'must_include' and fits_all(parts):
        raise ValueError(
            f'required_contents {row["required_contents"]!s:.80} match every page: add a text that '
            'must be there'
        )
    return Target(
        url=row['url'],
        locator=locator,
        prepare=tuple(row['prep_actions']) if 'prep_actions' in row else (),
        kind=kind,
        contents=contents,
    )
