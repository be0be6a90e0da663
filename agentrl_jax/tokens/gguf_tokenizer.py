"""The tokenizer inside a .gguf file: byte-level BPE rebuilt from its metadata, without torch."""

import reprlib
from pathlib import Path
from typing import Literal

import pydantic
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from agentrl_jax.machine import files, gguf_file
from agentrl_jax.tokens.tokenizer import BytePairTokenizer, library_errors, mark_specials

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type

# Text is split before merging as in the tokenizer.json of the models. Qwen2 splits digits one by
# one, Llama 3 into groups of up to three; SmolLM splits digits and then follows GPT-2.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def set_rules(backend: tokenizers.Tokenizer, kind: str, source: str) -> None:
    """Set the normaliser and the splitting rules of a kind of model (tokenizer.ggml.pre)."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules = {
        'qwen2': [pre_tokenizers.Split(Regex(_WORDS % ''), 'isolated'), plain],
        'smollm': [pre_tokenizers.Digits(individual_digits=True), gpt2],
        'gpt-2': [gpt2],
        'llama-bpe': [pre_tokenizers.Split(Regex(_WORDS % '{1,3}'), 'isolated'), plain],
    }
    if kind not in rules:
        raise ValueError(
            f'{source}: pre-tokenizer {reprlib.repr(kind)} is not supported ({", ".join(rules)})'
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(rules[kind])
    backend.normalizer = normalizers.NFC() if kind == 'qwen2' else None
    backend.model.ignore_merges = kind == 'llama-bpe'  # looks up words before merging


def build_byte_pair(
    tokens: list[str], merges: list[tuple[str, str]], added: list[dict], kind: str, source: str
) -> tokenizers.Tokenizer:
    """Build byte-level BPE from its vocabulary (by id, '' = unused), merges and added tokens.

    added: {'content': str, 'special': bool} in ascending order of their ids.
    """
    vocab = {text: i for i, text in enumerate(tokens) if text}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    set_rules(backend, kind, source)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token in mark_specials(added):
        text, special = token['content'], token['special']
        backend.add_tokens([AddedToken(text, normalized=False, special=special)])
    return backend


class _Metadata(pydantic.BaseModel, strict=True, alias_generator='tokenizer.ggml.{}'.format):
    model: Literal['gpt2']  # byte-level BPE
    tokens: list[str] = pydantic.Field(min_length=1)
    merges: list[str] = pydantic.Field(min_length=1)
    token_type: list[int] = []
    pre: str | None = None
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    unknown_token_id: int | None = None
    seperator_token_id: int | None = None  # as GGUF spells it
    padding_token_id: int | None = None
    architecture: str | None = pydantic.Field(None, alias='general.architecture')
    chat_template: str | None = pydantic.Field(None, alias='tokenizer.chat_template')


def load(path: Path) -> BytePairTokenizer:
    """Load the tokenizer of a .gguf file (tokenizer.ggml.* and tokenizer.chat_template)."""
    found = files.read_as(_Metadata, gguf_file.read(path).fields, path)
    texts, kinds = found.tokens, found.token_type or [NORMAL] * len(found.tokens)
    if len(kinds) != len(texts):
        raise ValueError(f'{path}: tokenizer.ggml.token_type has not a type for each token')
    merges = [tuple(merge.split(' ', 1)) for merge in found.merges]
    if any(len(pair) != 2 for pair in merges):
        raise ValueError(f'{path}: tokenizer.ggml.merges has an entry that is not a pair')
    rows = list(zip(texts, kinds, strict=True))
    added = [
        {'content': text, 'special': kind == CONTROL}
        for text, kind in rows
        if kind in (CONTROL, USER_DEFINED)
    ]
    rules = found.pre
    if rules is None and found.architecture in ('qwen2', 'qwen3'):
        rules = 'qwen2'  # conversions of early 2024 lack it; all of these models split alike
    if rules is None:  # a wrong rule would silently produce other tokens than in training
        raise ValueError(
            f'{path}: tokenizer.ggml.pre is missing, so the text splitting of a '
            f'{reprlib.repr(found.architecture)} is unknown: convert it again with a newer '
            'llama.cpp'
        )
    with library_errors(str(path)):
        backend = build_byte_pair(
            [text if kind != UNUSED else '' for text, kind in rows], merges, added, rules, str(path)
        )
    ids = {
        'eos_token': found.eos_token_id,
        'bos_token': found.bos_token_id,
        'unk_token': found.unknown_token_id,
        'sep_token': found.seperator_token_id,
        'pad_token': found.padding_token_id,
    }
    named = {name: texts[i] for name, i in ids.items() if i is not None and 0 <= i < len(texts)}
    if found.bos_token_id is not None and 'bos_token' not in named:
        raise ValueError(
            f'{path}: tokenizer.ggml.bos_token_id {found.bos_token_id} is not one of its tokens'
        )
    return BytePairTokenizer(
        backend,
        pad=found.padding_token_id,
        eos=[] if found.eos_token_id is None else [found.eos_token_id],
        chat_template=found.chat_template,
        source=str(path),
        bos=named.get('bos_token'),
        named=named,
    )
