"""Which version of the code is running."""

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def commit(folder: Path = PACKAGE) -> str | None:
    """The commit of the checkout that contains a folder of code; None outside of a checkout.

    The suffix '-modified' means that tracked files differ from that commit.
    """
    # An installed package may be inside another project's checkout that does not track it.
    if _git(folder, 'ls-files', '--', '.') in (None, ''):
        return None
    changed = _git(folder, 'status', '--porcelain', '--untracked-files=no')
    return _git(folder, 'rev-parse', 'HEAD') + ('-modified' if changed else '')


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git; None if there is no git or it fails."""
    try:
        answer = subprocess.run(
            ['git', '-C', str(folder), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
