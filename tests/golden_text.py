"""Golden texts in tests/data: what a renderer makes of known inputs, compared as a whole.

After an intended change `GOLDEN=write pytest ...` renews them; read the diff before committing it.
"""

import os
import pathlib

DATA = pathlib.Path(__file__).resolve().parent / 'data' / 'golden'


def assert_golden(name, parts):
    """parts: title -> text, each a section of the file `name`."""
    text = ''.join(f'======== {title}\n{part}\n' for title, part in parts.items())
    path = DATA / name
    if os.environ.get('GOLDEN') == 'write':
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding='utf-8')
    expected = path.read_text(encoding='utf-8')
    assert text.splitlines() == expected.splitlines(), f'{path.name}: GOLDEN=write renews it'
