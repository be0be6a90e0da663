"""Golden texts in tests/data: full outputs of renderers for known inputs.

After an intended change, update them with `GOLDEN=write pytest ...` and review the diff.
"""

import os
import pathlib

DATA = pathlib.Path(__file__).resolve().parent / 'data' / 'golden'


def assert_golden(name, parts):
    """Compare with the file `name`; parts: title -> text of each section."""
    text = ''.join(f'======== {title}\n{part}\n' for title, part in parts.items())
    path = DATA / name
    if os.environ.get('GOLDEN') == 'write':
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding='utf-8')
    expected = path.read_text(encoding='utf-8')
    assert text.splitlines() == expected.splitlines(), f'{path.name}: GOLDEN=write renews it'
