"""The reading cost of the code for a newcomer: files and lines, counted from the source.

  python -m benchmarks.reading_cost [--files] [--write]

The path is config -> rollout -> loss -> update. Starting from ENTRIES, it follows every function,
class and constant of the repository that the code refers to, recursively. A file counts in full
once anything in it is reached, even if it is not listed here. Modules in ASIDE are not followed: a
separate subject with its own README, or a branch that the demo does not take. README.md lists a
part of these files; the rest are leaves, which a reader opens for one function. --files prints all
of them; --write puts the table into CONTRIBUTING.md.
"""

import argparse
import ast
import fnmatch
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENTRIES = (  # the loop; the demo's config; the algorithm, which the loop looks up by name
    'agentrl_jax.train:train',
    'configs.demo:get_config',
    'agentrl_jax.algorithms.grpo:*',
)
ON_PATH = {'agentrl_jax.algorithms.grpo'}
ASIDE = {
    'agentrl_jax.algorithms*': 'the other algorithms',
    'agentrl_jax.envs.*': 'worlds',
    'agentrl_jax.imitation.*': 'behaviour cloning, before the first step',
    'agentrl_jax.machine.*': 'devices, files and processes',
    'agentrl_jax.measure.*': 'metrics, which change nothing',
    'agentrl_jax.models*': 'the network',
    'agentrl_jax.planning.*': 'memory and speed of other machines',
    'agentrl_jax.records.*': 'files that a run writes',
    'agentrl_jax.settings.*': 'flags, checks and help texts of fields',
    'agentrl_jax.text.*': 'environments as conversations',
    'agentrl_jax.tokens.*': 'text to token ids',
    # Branches that the demo does not take
    'agentrl_jax.rl.correction': 'a sampler that differs from the trainer',
    'agentrl_jax.rl.curriculum': 'a growing horizon',
    'agentrl_jax.rl.evol': 'AgentEvol',
    'agentrl_jax.rl.metrics': 'metrics, which change nothing',
    'agentrl_jax.rl.turn_credit': 'advantages of turns',
    'agentrl_jax.rollout.host*': 'environments on hosts',
    'agentrl_jax.rollout.keepers': 'environments on hosts',
    'agentrl_jax.rollout.programs': 'environments on hosts',
    'agentrl_jax.rollout.replies': 'environments on hosts',
    'agentrl_jax.rollout.world_calls': 'environments on hosts',
    'agentrl_jax.rollout.rewards': "rewards from a user's file",
    'agentrl_jax.rollout.windows': 'episodes longer than the context',
    'agentrl_jax.run.cloning': 'behaviour cloning, before the first step',
    'agentrl_jax.run.command': 'the command line',
    'agentrl_jax.run.extensions': 'extensions',
    'agentrl_jax.run.hooks': 'extensions',
    'agentrl_jax.run.hosts': 'environments on hosts',
    'agentrl_jax.run.interrupts': 'the command line',
    'agentrl_jax.run.loading': 'the network and its tokenizer',
    'agentrl_jax.run.measuring': 'metrics and validation, which change nothing',
    'agentrl_jax.run.migration': 'configs of checkpoints',
    'agentrl_jax.run.mixture': 'several environments in one run',
    'agentrl_jax.run.outside': 'environments and algorithms of users',
    'agentrl_jax.run.params': 'adapters, and policies of checkpoints and other runs',
    'agentrl_jax.run.recorder': 'files that a run writes',
    'agentrl_jax.run.refilling': 'dynamic sampling',
    'agentrl_jax.run.rules': 'invalid combinations of settings',
    'agentrl_jax.run.state': 'resuming',
    'agentrl_jax.run.usage': 'the command line',
}


class Module:
    """A file with its top-level definitions and its imports."""

    def __init__(self, path):
        name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
        self.name, self.path = name.removesuffix('.__init__'), path
        self.text = path.read_text(encoding='utf-8')
        self.tree = ast.parse(self.text)
        self.lines = self.text.count('\n')
        self.defines, self.imports = {}, {}
        for node in self.tree.body:
            targets = getattr(node, 'targets', [getattr(node, 'target', None)])
            for name in [getattr(node, 'name', None), *(getattr(x, 'id', None) for x in targets)]:
                self.defines |= {name: node} if name else {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {x.asname or x.name: f'{node.module}.{x.name}' for x in node.names}
                self.imports |= names


@functools.cache
def modules():
    paths = [path for name in ('agentrl_jax', 'configs') for path in (ROOT / name).rglob('*.py')]
    return {module.name: module for module in map(Module, sorted(paths))}


def named(module, node):
    """Yield (module, name) of every definition in the repository that a node refers to."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in module.defines:
            yield module.name, part.id
        dotted = ast.unparse(part) if isinstance(part, ast.Name | ast.Attribute) else ''
        first, _, rest = dotted.partition('.')
        if first in module.imports:
            dotted = '.'.join([module.imports[first], *rest.split('.')])
            pieces = dotted.split('.')
            for end in range(len(pieces) - 1, 0, -1):
                if '.'.join(pieces[:end]) in modules():
                    yield '.'.join(pieces[:end]), pieces[end]
                    break


def is_aside(name):
    return name not in ON_PATH and any(fnmatch.fnmatch(name, aside) for aside in ASIDE)


@functools.cache
def reading():
    """{module on the path: names reached in it}."""
    entries = [tuple(entry.split(':')) for entry in ENTRIES]
    known = modules()
    todo = [(m, n) for m, name in entries for n in (known[m].defines if name == '*' else [name])]
    reached = {}
    while todo:
        name, symbol = todo.pop()
        if symbol in known[name].defines and symbol not in reached.setdefault(name, set()):
            reached[name].add(symbol)
            references = named(known[name], known[name].defines[symbol])
            todo += [(where, what) for where, what in references if not is_aside(where)]
    return reached


def lines_of(*prefixes):
    return sum(x.lines for name, x in modules().items() if name.startswith(prefixes))


def loop_lines():
    """Lines of the function of train.py with the loop over steps."""
    loops = [
        node
        for node in modules()['agentrl_jax.train'].tree.body
        if isinstance(node, ast.FunctionDef) and 'for step in range' in ast.unparse(node)
    ]
    return sum(node.end_lineno - node.lineno + 1 for node in loops)


def to_read():
    """The modules of the reading list in README.md; all must be on the path."""
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    steps = readme.split('Read these files, in this order:\n\n')[1].split('\n\n')[0]
    names = [
        x.replace('/', '.') for x in re.findall(r'`((?:agentrl_jax|configs)/[\w/]+)\.py`', steps)
    ]
    if off_path := [name for name in names if not reading().get(name)]:
        raise ValueError(f'README.md lists modules that are not on the path: {off_path}')
    return [modules()[name] for name in names]


def size(files):
    return f'{len(files)} files, {sum(module.lines for module in files):,} lines'


def table():
    path = {modules()[name]: names for name, names in reading().items() if names}
    parts = {module.defines[name] for module, names in path.items() for name in names}
    reached = sum(node.end_lineno - node.lineno + 1 for node in parts)
    config = 'agentrl_jax.run', 'agentrl_jax.algorithms', 'agentrl_jax.settings', 'configs.base'
    package = lines_of('agentrl_jax') - lines_of('agentrl_jax.tools')
    cells = {
        'to read, as listed in README.md': size(to_read()),
        'all that config -> rollout -> loss -> update passes': size(path),
        'of these the functions and classes that it passes': f'{reached:,} lines',
        'the loop of `train.py`': f'{loop_lines()} lines',
        'run/, settings/, algorithms/ and `configs/base.py`': f'{lines_of(*config):,} lines',
        'the package without tools/': f'{package:,} lines',
    }
    rows = [f'| {name} | {value} |' for name, value in cells.items()]
    return '\n'.join(['| reading cost | |', '| --- | --- |', *rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--files', action='store_true', help='print the files of the path')
    parser.add_argument('--write', action='store_true', help='put the table into CONTRIBUTING.md')
    options = parser.parse_args()
    print(table())
    if options.files:
        for name in sorted(reading()):
            print(f'{modules()[name].lines:5} {name}')
    if options.write:
        page = ROOT / 'CONTRIBUTING.md'
        parts = re.split(r'(?<=<!-- reading cost -->\n)(?:\|.*\n)+', page.read_text())
        page.write_text(f'{table()}\n'.join(parts))


if __name__ == '__main__':
    main()
