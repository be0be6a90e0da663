"""List the commands of the package: python -m agentrl_jax."""

import ast
import pathlib
import sys

import agentrl_jax

EXIT_USAGE = 2
NOT_COMMANDS = ('__init__', '__main__', 'types')


def commands() -> dict[str, str]:
    """Return the first line of each command's docstring, by name."""
    files = sorted(pathlib.Path(__file__).parent.glob('*.py'))
    texts = {file.stem: file.read_text() for file in files if file.stem not in NOT_COMMANDS}
    return {name: ast.get_docstring(ast.parse(text)).split('\n')[0] for name, text in texts.items()}


def main() -> int:
    words = sys.argv[1:]
    if words == ['--version']:
        print(agentrl_jax.__version__)
        return 0
    if words and words[0] not in ('-h', '--help'):
        known = words[0] in commands()
        fix = f'python -m agentrl_jax.{words[0]}' if known else 'python -m agentrl_jax, for a list'
        print(f'error: {words[0]!r} is not an option of agentrl_jax. Run {fix}', file=sys.stderr)
        return EXIT_USAGE
    print(f'agentrl_jax {agentrl_jax.__version__}: python -m agentrl_jax.COMMAND --help\n')
    for name, text in commands().items():
        print(f'  {name:14}{text}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
