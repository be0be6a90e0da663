"""Importing this makes test modules importable by name, from any folder."""

import pathlib
import sys

FOLDERS = sorted(path.parent for path in pathlib.Path(__file__).parent.glob('*/test_*.py'))
sys.path += [str(path) for path in dict.fromkeys(FOLDERS) if str(path) not in sys.path]
