"""Tokenizers and templates of real checkpoints in the folder AGENTRL_REAL_WEIGHTS; without it,
tests are skipped."""

import functools
import os
import pathlib

import pytest

from agentrl_jax.tokens.load import load_tokenizer

FILES = {'smollm2': 'smollm2*.gguf', 'qwen2.5': 'qwen2.5*.gguf'}


def found(pattern):
    folder = os.environ.get('AGENTRL_REAL_WEIGHTS')
    if folder is None:
        pytest.skip('AGENTRL_REAL_WEIGHTS names no folder')
    files = sorted(pathlib.Path(folder).glob(pattern))
    if not files:
        pytest.skip(f'{folder} has no {pattern}')
    return files[0]


@functools.cache
def real_tokenizer(name):
    return load_tokenizer(found(FILES[name]))


def real_template(name):
    """Return the chat template of a checkpoint, as text."""
    return found(f'{name}*.jinja').read_text(encoding='utf-8')
