"""Tokenizers of real checkpoints in the folder that AGENTRL_REAL_WEIGHTS names; else tests skip."""

import functools
import os
import pathlib

import pytest

from agentrl_jax.tokens.tokenizer import load_tokenizer

FILES = {'smollm2': 'smollm2*.gguf', 'qwen2.5': 'qwen2.5*.gguf'}


@functools.cache
def real_tokenizer(name):
    folder = os.environ.get('AGENTRL_REAL_WEIGHTS')
    if folder is None:
        pytest.skip('AGENTRL_REAL_WEIGHTS names no folder')
    found = sorted(pathlib.Path(folder).glob(FILES[name]))
    if not found:
        pytest.skip(f'{folder} has no {FILES[name]}')
    return load_tokenizer(found[0])
