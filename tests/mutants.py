"""How strong the tests are: mutants of the package, drawn with a fixed seed, and what kills them.

  nice -n 19 python tests/mutants.py DIR [--count 150] [--seed 0] [--ignored WORD ...]
  python tests/mutants.py DIR --report

The package and the tests are those of the commit checked out where the command is called. All tests
are played once, to learn which functions each of them reaches (DIR/map.jsonl). Then every mutant is
given to the tests that reach its function, quick tests first, and among those the ones that reach
little; last to the other tests of their files, which may use a program that was traced before
(DIR/mutants.jsonl). The same command resumes. The draw of a place depends only on its line and the
name of its function: code that two commits share is drawn in both.

A mutant is one edit of one place. Docstrings, annotations, decorators, asserts and the sentences of
errors have no places. A mutant survives if its tests pass or their budget is spent; mutants that
change no behaviour are not sorted out.
"""

import argparse
import ast
import collections
import contextlib
import importlib
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

FOLDERS = 'rl algorithms rollout text models machine'.split()
LIBRARIES = (  # imported once; whatever plays tests is a fork of the process that has them
    'jax.numpy flax.struct optax orbax.checkpoint ml_collections.config_flags absl.flags numpy '
    'tokenizers rich.console jinja2 gymnasium pytest _pytest.assertion.rewrite hypothesis'
).split()
SLOW_S = 2.0  # CPU seconds of a test that is played after the quick ones
IDLE_S = 120  # what uses less than a CPU second in so long hangs
SWAPS = (
    'Add - Sub + Mult / Div * FloorDiv * Mod // Pow * BitAnd | BitOr & And or Or and Lt <= LtE < '
    'Gt >= GtE > Eq != NotEq == Is is_not IsNot is In not_in NotIn in'
).split()
SWAPS = {name: new.replace('_', ' ') for name, new in zip(SWAPS[::2], SWAPS[1::2], strict=True)}
REACH = """
import os
seen, fd = set(), os.open(os.environ['MUTANTS_REACH'], os.O_WRONLY | os.O_APPEND)
def hit(number):
    if number not in seen:
        seen.add(number)
        os.write(fd, b'%d ' % number)
"""


class Source(ast.NodeVisitor):
    """A file: its functions, and every place that can be edited with the edits it may get."""

    def __init__(self, path):
        self.path, self.text, self.scope = str(path), path.read_bytes(), []
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.places, self.functions = [], {}
        self.visit(ast.parse(self.text))

    def span(self, node):
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def code(self, node):
        return self.text[slice(*self.span(node))].decode()

    def add(self, kind, node, *edits):
        """edits: what may be here instead, or (start, end, what may be there instead)."""
        edits = [edit if isinstance(edit, tuple) else (*self.span(node), edit) for edit in edits]
        line = self.text[self.starts[node.lineno - 1] : self.starts[node.lineno]].decode().strip()
        where = {'path': self.path, 'line': node.lineno, 'scope': '.'.join(self.scope)}
        self.places.append({**where, 'kind': kind, 'code': line, 'edits': edits})

    def swap(self, kind, node, left, operator, right):
        start, new = self.span(left)[1], SWAPS.get(type(operator).__name__)
        between = self.text[start : self.span(right)[0]]
        found = re.fullmatch(rb'[\s)]*([^\s()#]+(?: not| in)?)[\s(]*', between)
        if found and new:
            new += '=' if isinstance(node, ast.AugAssign) else ''
            self.add(kind, node, (start + found.start(1), start + found.end(1), new))

    def off_by_one(self, bounds):
        for bound in bounds:
            if bound is not None and not isinstance(bound, ast.Constant):
                self.add('off by one', bound, *(f'({self.code(bound)}) {sign} 1' for sign in '+-'))

    def visit(self, node):
        if isinstance(node, ast.Assert | ast.JoinedStr):
            return
        self.edit(node)
        if (
            isinstance(node, ast.Raise)
            or isinstance(node, ast.If)
            and 'name__' in self.code(node.test)
        ):
            return
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        named = function or isinstance(node, ast.ClassDef)
        self.scope += [node.name] if named else []
        if function:
            self.functions['.'.join(self.scope)] = node
        for field, value in ast.iter_fields(node):
            if field not in ('annotation', 'returns', 'decorator_list'):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and getattr(child, 'arg', '') != 'strict':
                        self.visit(child)
        del self.scope[len(self.scope) - named :]

    def edit(self, node):
        """The places of one node."""
        is_mask = isinstance(getattr(node, 'op', None), ast.BitAnd | ast.BitOr | ast.Invert)
        kind = 'mask' if is_mask else 'operator'
        match node:
            case ast.BinOp(left, operator, right):
                text = [
                    isinstance(getattr(x, 'value', x), str | ast.JoinedStr) for x in (left, right)
                ]
                if not any(text) and self.code(right) != 'None':  # a type or None
                    self.swap(kind, node, left, operator, right)
                    if is_mask:
                        self.add(kind, node, *(f'({self.code(x)})' for x in (left, right)))
            case ast.AugAssign(target, operator, value):
                self.add('dropped', node, 'pass')
                self.swap(kind, node, target, operator, value)
            case ast.BoolOp(operator, values):
                for left, right in zip(values, values[1:], strict=False):
                    self.swap('boolean', node, left, operator, right)
            case ast.Compare(left, operators, rights):
                lefts = [left, *rights]
                for left, operator, right in zip(lefts, operators, rights, strict=False):
                    self.swap('comparison', node, left, operator, right)
            case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
                if not isinstance(operand, ast.Constant):
                    kind = 'boolean' if isinstance(node.op, ast.Not) else kind
                    self.add(kind, node, f'({self.code(operand)})')
            case ast.Constant(bool() as value):
                self.add('constant', node, str(not value))
            case ast.Constant(int() as value):
                self.add('constant', node, str(value + 1), str(abs(value - 1)))
            case ast.Constant(float() as value):
                self.add('constant', node, *(['0.0', repr(value * 2)] if value else ['1.0']))
            case ast.Slice(lower, upper):
                self.off_by_one([lower, upper])
            case ast.Call(function, arguments):
                name = self.code(function).replace('jnp.', 'np.')
                if name in ('range', 'np.arange'):
                    self.off_by_one(arguments[:2])
                if name == 'np.where' and len(arguments) == 3:
                    _, yes, no = arguments
                    span = self.span(yes)[0], self.span(no)[1]
                    self.add('mask', node, (*span, f'{self.code(no)}, {self.code(yes)}'))
            case ast.Assign([ast.Name(name)]):  # or it keeps what it held before
                if name in (getattr(x, 'id', '') for x in ast.walk(node.value)):
                    self.add('dropped', node, 'pass')
            case ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.Raise():
                self.add('dropped', node, 'pass')
            case ast.Expr(value) if not isinstance(value, ast.Constant):
                self.add('dropped', node, 'pass')
            case ast.Return(ast.AST() as value) if self.code(value) != 'None':
                self.add('dropped', node, 'return None')
            case ast.Break() | ast.Continue():
                self.add('dropped', node, 'break' if isinstance(node, ast.Continue) else 'continue')


def draw(files, count, seed):
    """The count mutants whose own random numbers are smallest; each one compiles."""
    drawn, again, mutants = [], collections.Counter(), []
    for place in [place for file in files.values() for place in file.places]:
        key = f'{place["scope"].rpartition(".")[2]}: {place["code"]} {place["kind"]}'
        again[key] += 1
        luck = random.Random(f'{seed} {key} {again[key]}')
        number, edit = luck.random(), luck.choice(place.pop('edits'))
        drawn.append((number, {'key': f'{key} {again[key]}', **place, 'edit': edit}))
    for _, mutant in sorted(drawn, key=lambda pair: pair[0]):
        with contextlib.suppress(SyntaxError):
            text = edited(files[mutant['path']].text, mutant['edit'])
            mutants += [mutant] if len(mutants) < count and compile(text, '', 'exec') else []
    return mutants


def edited(text, *edits):
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new.encode() + text[end:]
    return text


def instrumented(file, numbers):
    """The text of a file whose functions report that they were entered."""
    reports = {'from agentrl_jax import _reach': ast.parse(file.text)}
    for scope, node in file.functions.items():
        reports[f'_reach.hit({numbers[file.path, scope]})'] = node
    edits = []
    for line, node in reports.items():
        body = node.body[ast.get_docstring(node, clean=False) is not None :]
        for first in [x for x in body if '__future__' not in ast.dump(x)][:1]:
            if hasattr(first, 'body') or isinstance(first, ast.Match):  # on a line of its own
                top = min([first, *getattr(first, 'decorator_list', ())], key=lambda x: x.lineno)
                start, line = file.starts[top.lineno - 1], f'{" " * first.col_offset}{line}\n'
            else:
                start, line = file.span(first)[0], f'{line}; '
            edits.append((start, start, line))
    return edited(file.text, *edits)


class Player:
    """A pytest plugin: plays the tests of a list in its order and logs what they do."""

    def __init__(self, folder, order, budget):
        self.log, self.reach = open(folder / 'log', 'w', buffering=1), open(folder / 'reach')
        self.order, self.budget, self.outcome = order, budget, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if self.order is None or item.nodeid in self.order]
        yield
        if self.order:
            items.sort(key=lambda item: [*self.order].index(item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        before = cpu_s()
        if before > self.budget:
            item.session.shouldstop = 'the budget is spent'  # after this test
        if self.order:  # what loops for ever ends by a signal
            limit = int(before + 45 + 5 * self.order[item.nodeid])
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        print(json.dumps({'test': item.nodeid}), file=self.log)
        self.outcome = {'outcome': 'passed'}
        getattr(sys.modules.get('agentrl_jax._reach'), 'seen', set()).clear()
        yield
        done = {'cpu': cpu_s() - before, 'reach': [*{int(x) for x in self.reach.read().split()}]}
        print(json.dumps({'test': item.nodeid, **self.outcome, **done}), file=self.log)
        return True

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            crash = getattr(report.longrepr, 'reprcrash', None)
            why = str(getattr(crash, 'message', report.longrepr))[:200]
            self.outcome = {'outcome': report.outcome, 'why': why}


def cpu_s():
    return sum(os.times()[:4])  # of this process and of children that have ended


def session_s(session):
    """CPU seconds of all processes of a session that are alive."""
    ticks = 0
    for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(') ')[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf('SC_CLK_TCK')


def play(folder, *arguments, order=None, budget=1e6):
    """Plays tests in a fork of this process: its exit code and the lines of its Player."""
    for name in ('log', 'reach'):
        (folder / name).write_text('')
    pid = os.fork()
    if not pid:
        code = 9
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            out = os.open(folder / 'output', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            os.chdir(folder / 'tree')
            sys.path[0] = str(folder / 'tree')
            folders = ['-o', f'cache_dir={folder / "cache"}', f'--basetemp={folder / "temp"}']
            options = ['-q', '-n0', '-m', 'not soak', *folders]
            code = pytest.main([*options, *arguments], [Player(folder, order, budget)])
        finally:
            os._exit(code)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(pid, signal.SIGKILL) or sys.exit(1))
    checked, spent = time.time(), 0
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(0.1)
        if time.time() > checked + IDLE_S:
            before, checked, spent = spent, time.time(), session_s(pid)
            if before <= spent < before + 1:  # it waits for something that does not come
                os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1]), lines_of(folder / 'log')


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def learn_reach(folder, files, numbers, ignored):
    """{test: its CPU seconds and the functions it reaches}, of all tests that pass."""
    tree, kept = folder / 'tree', folder / 'map.jsonl'
    if not tree.exists():
        subprocess.run(['git', 'clone', '-q', '--shared', '.', tree], check=True)
    for file in files:
        (tree / file.path).write_bytes(instrumented(file, numbers))
    (tree / 'agentrl_jax/_reach.py').write_text(REACH)
    known = {line['file'] for line in lines_of(kept)}
    for path in sorted(str(x.relative_to(tree)) for x in (tree / 'tests').rglob('test_*.py')):
        if path not in known and not any(word in path for word in ignored):
            tests = [line for line in play(folder, path)[1] if 'cpu' in line]
            with open(kept, 'a') as f:
                print(json.dumps({'file': path, 'tests': tests}), file=f)
    for file in files:
        (tree / file.path).write_bytes(file.text)
    (tree / 'agentrl_jax/_reach.py').unlink()
    tests = [test for line in lines_of(kept) for test in line['tests']]
    return {test['test']: test for test in tests if test['outcome'] == 'passed'}


def reaching(mutant, reach, numbers, budget):
    """The tests of a mutant in their order, {test: its seconds}, and how many reach it."""
    path, scope, direct = mutant['path'], mutant['scope'], set()
    while scope and not direct:
        direct = {name for name, x in reach.items() if numbers.get((path, scope)) in x['reach']}
        scope = scope.rpartition('.')[0]
    if not direct:  # a constant of a module or a field: whatever uses anything of the file
        mine = {number for (where, _), number in numbers.items() if where == path}
        direct = {name for name, x in reach.items() if mine.intersection(x['reach'])}
    score = {name: x['cpu'] * (1 + len(x['reach'])) for name, x in reach.items()}
    file_of = {name: name.partition('::')[0] for name in reach}
    scores = collections.defaultdict(list)
    for name in direct:
        scores[file_of[name]].append(score[name])

    def turn(name):
        file, slow = file_of[name], reach[name]['cpu'] > SLOW_S
        return name not in direct, slow, sum(scores[file]) / len(scores[file]), file, score[name]

    order, spent = {}, 0
    for name in sorted((x for x in reach if scores[file_of[x]]), key=turn):
        if spent + reach[name]['cpu'] <= budget:
            spent += reach[name]['cpu']
            order[name] = reach[name]['cpu']
    return order, len(direct)


def judge(folder, mutant, text, order, budget):
    """Plays the tests of a mutant until one fails."""
    path, began = folder / 'tree' / mutant['path'], cpu_s()
    path.write_bytes(edited(text, mutant['edit']))
    files = dict.fromkeys(name.partition('::')[0] for name in order)
    code, lines = play(folder, '-x', *files, order=order, budget=budget) if order else (0, [])
    path.write_bytes(text)
    last = {'test': 'collection', 'why': f'exit code {code}', **(lines[-1] if lines else {})}
    killed = code not in (0, 2) or code == 2 and last.get('outcome', 'failed') == 'failed'
    by = {'by': last['test'], 'why': last['why']} if killed else {}
    played = sum('cpu' in line for line in lines)
    return {'killed': killed, **by, 'played': played, 'cpu': round(cpu_s() - began, 1)}


def report(lines):
    for by in (lambda x: x['path'].split('/')[1], lambda x: x['kind'], lambda x: 'all'):
        for name in sorted({by(line) for line in lines}):
            mine = [line['killed'] for line in lines if by(line) == name]
            print(f'{name:12} {sum(mine):4} of {len(mine):4} killed, {sum(mine) / len(mine):.0%}')
        print()
    for x in [line for line in lines if not line['killed']]:
        print(
            f'{x["path"]}:{x["line"]} survives {x["direct"]} tests: {x["code"]} -> {x["edit"][2]}'
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path, help='for what is learnt, outside the tree')
    parser.add_argument('--count', type=int, default=150)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--budget', type=float, default=60, help='CPU seconds of tests a mutant')
    parser.add_argument('--ignored', nargs='*', default=(), help='words in names of files of tests')
    parser.add_argument('--report', action='store_true')
    args = parser.parse_args()
    folder, out = args.folder.resolve(), args.folder / 'mutants.jsonl'
    if args.report:
        return report(lines_of(out))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
        'MUTANTS_REACH': str(folder / 'reach'),
        'OMP_NUM_THREADS': '1',
        'PYTHONDONTWRITEBYTECODE': '1',
        'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false',
    }
    for name in LIBRARIES:
        importlib.import_module(name)
    paths = sorted(x for name in FOLDERS for x in pathlib.Path('agentrl_jax', name).rglob('*.py'))
    files = {str(path): Source(path) for path in paths}
    names = sorted((file.path, scope) for file in files.values() for scope in file.functions)
    numbers = {name: number for number, name in enumerate(names)}
    reach = learn_reach(folder, files.values(), numbers, args.ignored)
    known = {line['key'] for line in lines_of(out)}
    for mutant in draw(files, args.count, args.seed):
        if mutant['key'] not in known:
            order, direct = reaching(mutant, reach, numbers, args.budget)
            text = files[mutant['path']].text
            found = judge(folder, mutant, text, order, args.budget)
            with open(out, 'a') as f:
                print(json.dumps({**mutant, 'direct': direct, **found}), file=f)


if __name__ == '__main__':
    main()
