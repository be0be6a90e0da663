"""The size of the repository is within [tool.agentrl_budgets] of pyproject.toml."""

import pathlib
import tomllib

from agentrl_jax.settings import tree
from benchmarks import reading_cost
from configs import base

ROOT = pathlib.Path(__file__).resolve().parents[2]


def lines(folder, without='tools'):
    paths = (ROOT / folder).rglob('*.py')
    return {p: p.read_bytes().count(b'\n') for p in paths if p.parent.name != without}


def test_sizes_are_within_their_budgets():
    package, tests, benchmarks = map(lines, ('agentrl_jax', 'tests', 'benchmarks'))
    sizes = {
        'package_lines': sum(package.values()),
        'test_lines': sum(tests.values()),
        'benchmark_lines': sum(benchmarks.values()),
        'longest_file': max((package | tests | benchmarks).values()),
        'config_fields': len(tree.flat(base.get_config())),
        'core_lines': sum(module.lines for module in reading_cost.to_read()),
        'path_lines': sum(
            reading_cost.modules()[name].lines
            for name, names in reading_cost.reading().items()
            if names
        ),
    }
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))
    budgets = project['tool']['agentrl_budgets']
    assert budgets.keys() == sizes.keys()
    above = {name: size for name, size in sizes.items() if size > budgets[name]}
    assert not above, f'{above}: write less, or raise [tool.agentrl_budgets] in pyproject.toml'
