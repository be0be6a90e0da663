"""WebArena's tasks (arXiv:2307.13854), read from its file of 812 or one of that form.

Addresses in the file are names such as __SHOPPING__; `sites` says where those are. The file is
config_files/test.raw.json of WebArena, which the package libwebarena has as test.raw.json.
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
    """A place that a program checks, and its required contents."""

    url: str  # 'last': where the episode ended; or a function's call
    locator: str  # JavaScript, or a function's call; '' = the whole page
    prepare: tuple[str, ...]  # JavaScript that is run first
    kind: str  # of CONTENTS
    contents: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    number: int
    intent: str
    sites: tuple[str, ...]
    start: tuple[str, ...]  # addresses, a tab each; the first one is in front
    state: str  # file of cookies of somebody who is logged in; '' = nobody is
    evaluators: tuple[str, ...]
    answers: tuple[tuple[str, tuple[str, ...]], ...]  # of ANSWERS, and texts
    reason: str  # why the task cannot be done, where it cannot
    urls: tuple[str, ...]  # of which one must be the last page's
    targets: tuple[Target, ...]

    @property
    def needs_judge(self) -> bool:
        """Whether a judge must compare answers by meaning; a literal N/A needs none."""
        wanted = dict(self.answers)
        if 'string_match' not in self.evaluators or 'fuzzy_match' not in wanted:
            return False
        return wanted['fuzzy_match'] != (NOT_POSSIBLE,)


def read_sites(sites: Sequence[str]) -> dict[str, str]:
    """Addresses by name, of 'shopping=http://localhost:7770' and so on."""
    found = {}
    for site in sites:
        name, mark, url = site.partition('=')
        if not mark or not re.fullmatch('[a-z_]+', name):
            named = shown(site).rpartition('@')[2]  # without a password
            raise ValueError(f'web.sites: {named!r} is not name=address')
        origin(url)
        if '@' in urllib.parse.urlsplit(url).netloc:  # tasks and pages would show it
            raise ValueError(
                f'web.sites: the address of {name} holds a user or a password: log in with the '
                'cookies of web.states instead'
            )
        found[name] = url.rstrip('/')
    return found


def read_tasks(path: str, sites: Mapping[str, str]) -> dict[int, Task]:
    """Tasks by number; those on sites that are not listed are left out."""
    rows = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    if not isinstance(rows, list) or not rows:
        raise ValueError(f'{path} must hold a list of tasks')
    found = {}
    for place, row in enumerate(rows):
        try:
            if not set(row['sites']) <= sites.keys():
                continue
            task = read_task(row, sites)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{path}, task {place}: {type(error).__name__}: {error}') from error
        if task is not None:
            found[task.number] = task
    if not found:
        raise ValueError(f'{path}: no task is on the sites {", ".join(sites) or "(none)"}')
    return found


def read_task(row: Mapping[str, Any], sites: Mapping[str, str]) -> Task | None:
    """None where it names a site that has no address."""
    text = json.dumps(row)
    for name, url in sites.items():
        text = text.replace(f'__{name.upper()}__', url)
    if re.search('__[A-Z]+(_[A-Z]+)*__', text):
        return None
    row = json.loads(text)
    evaluation = row['eval']
    unknown = set(evaluation['eval_types']) - set(EVALUATORS)
    if unknown or not evaluation['eval_types']:
        raise ValueError(f'eval_types {evaluation["eval_types"]} are of {", ".join(EVALUATORS)}')
    if 'url_note' in evaluation and evaluation['url_note'] != 'GOLD in PRED':
        raise ValueError(f'url_note {evaluation["url_note"]!r} is not GOLD in PRED')
    answers = []
    for kind, value in (evaluation['reference_answers'] or {}).items():
        if kind not in ANSWERS:
            raise ValueError(f'reference_answers: {kind!r} is one of {", ".join(ANSWERS)}')
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
    nothing_said = not answers or any(fits_all(texts) for _, texts in answers)
    for evaluator, field, nothing in (
        ('string_match', 'reference_answers', nothing_said),
        ('url_match', 'reference_url', fits_all(task.urls)),
        ('program_html', 'program_html', not task.targets),
    ):
        if nothing and evaluator in task.evaluators:
            raise ValueError(
                f'{field} {evaluation[field]!r:.80} leaves {evaluator} nothing to compare, and any '
                'stop would solve the task: say what is wanted'
            )
    return task


def fits_all(texts: Sequence[Any]) -> bool:
    """Whether there is nothing in one of them, or none at all."""
    return not texts or any(not str(text).strip() for text in texts)


def read_target(row: Mapping[str, Any]) -> Target:
    ((kind, contents),) = row['required_contents'].items()
    if kind not in CONTENTS:
        raise ValueError(f'required_contents: {kind!r} is one of {", ".join(CONTENTS)}')
    locator = row['locator'].strip()
    if locator and not locator.startswith(('document.', '[...document.', 'func:')):
        raise ValueError(f'locator {locator!r} begins with document. or func:')
    contents = (contents,) if isinstance(contents, str) else tuple(contents)
    parts = [part for one in contents for part in str(one).split(EITHER)]
    if not contents or kind == 'must_include' and fits_all(parts):
        raise ValueError(
            f'required_contents {row["required_contents"]!s:.80} are on every page: say what must '
            'be there'
        )
    return Target(
        url=row['url'],
        locator=locator,
        prepare=tuple(row['prep_actions']) if 'prep_actions' in row else (),
        kind=kind,
        contents=contents,
    )
