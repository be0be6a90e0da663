"""The tokenizer inside a .gguf file: byte-level BPE rebuilt from its metadata, without torch."""

import reprlib
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from agentrl_jax.machine import gguf_file
from agentrl_jax.tokens.tokenizer import BytePairTokenizer, library_errors, mark_specials

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type

# Text is split before merging as in the tokenizer.json of the models. Qwen2 splits digits one by
# one, Llama 3 into groups of up to three; SmolLM splits digits and then follows GPT-2.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def _split_by(pattern: str) -> list:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior='isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _pre_tokenizer(kind: str, source: str) -> tuple[list, bool, bool]:
    """Return (steps, whether to apply NFC, whether to look up words before merging)."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == 'qwen2':
        return _split_by(_WORDS % ''), True, False
    if kind == 'smollm':
        return [pre_tokenizers.Digits(individual_digits=True), gpt2], False, False
    if kind == 'gpt-2':
        return [gpt2], False, False
    if kind == 'llama-bpe':
        return _split_by(_WORDS % '{1,3}'), False, True
    raise ValueError(
        f'{source}: pre-tokenizer {reprlib.repr(kind)} is not supported (qwen2, smollm, gpt-2, '
        'llama-bpe)'
    )


def kind_of(pre: str | None, architecture: str | None, source: str) -> str:
    """Return tokenizer.ggml.pre, which conversions of early 2024 did not write.

    All Qwen2 and Qwen3 models split text in the same way. Other files without it are rejected: a
    wrong rule would silently produce other tokens than in training.
    """
    if pre is None and architecture in ('qwen2', 'qwen3'):
        return 'qwen2'
    if pre is None:
        raise ValueError(
            f'{source}: tokenizer.ggml.pre is missing, so the text splitting of a '
            f'{reprlib.repr(architecture)} is unknown: convert it again with a newer llama.cpp'
        )
    return pre


def set_rules(backend: tokenizers.Tokenizer, kind: str, source: str) -> None:
    """Set the normaliser and the splitting rules of a kind of model."""
    steps, nfc, ignore_merges = _pre_tokenizer(kind, source)
    backend.model.ignore_merges = ignore_merges
    backend.normalizer = normalizers.NFC() if nfc else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)


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


def load(path: Path) -> BytePairTokenizer:
    """Load the tokenizer of a .gguf file (tokenizer.ggml.* and tokenizer.chat_template)."""
    fields = gguf_file.read(path).fields

    def read(name: str, kind: type) -> Any:
        value = fields[name] if name in fields else None
        if value is not None and type(value) is not kind:
            raise ValueError(f'{path}: {name} is {reprlib.repr(value)}, not {kind.__name__}')
        return value

    def read_list(name: str, kind: type) -> list:
        values = read(name, list) or []
        if values and type(values[0]) is not kind:  # an array has values of one type
            raise ValueError(f'{path}: {name} is {reprlib.repr(values)}, not {kind.__name__}s')
        return values

    model = read('tokenizer.ggml.model', str)
    if model != 'gpt2':
        raise ValueError(
            f'{path}: only byte-level BPE (gpt2) is supported, this is {reprlib.repr(model)}'
        )
    texts = read_list('tokenizer.ggml.tokens', str)
    merges = [tuple(merge.split(' ', 1)) for merge in read_list('tokenizer.ggml.merges', str)]
    kinds = read_list('tokenizer.ggml.token_type', int) or [NORMAL] * len(texts)
    if not texts or not merges or len(kinds) != len(texts):
        raise ValueError(f'{path}: tokenizer.ggml tokens, merges or token_type are missing')
    if any(len(pair) != 2 for pair in merges):
        raise ValueError(f'{path}: tokenizer.ggml.merges has an entry that is not a pair')
    rows = list(zip(texts, kinds, strict=True))
    added = [
        {'content': text, 'special': kind == CONTROL}
        for text, kind in rows
        if kind in (CONTROL, USER_DEFINED)
    ]
    rules = kind_of(read('tokenizer.ggml.pre', str), read('general.architecture', str), str(path))
    with library_errors(str(path)):
        backend = build_byte_pair(
            [text if kind != UNUSED else '' for text, kind in rows], merges, added, rules, str(path)
        )
    names = ('eos', 'bos', 'unknown', 'seperator', 'padding')  # as GGUF spells them
    eos, bos, *_, pad = ids = [read(f'tokenizer.ggml.{name}_token_id', int) for name in names]
    if bos is not None and not 0 <= bos < len(texts):
        raise ValueError(f'{path}: tokenizer.ggml.bos_token_id {bos} is not one of its tokens')
    named = zip(('eos_token', 'bos_token', 'unk_token', 'sep_token', 'pad_token'), ids, strict=True)
    return BytePairTokenizer(
        backend,
        pad=pad,
        eos=[] if eos is None else [eos],
        chat_template=read('tokenizer.chat_template', str),
        source=str(path),
        bos=None if bos is None else texts[bos],
        named={name: texts[i] for name, i in named if i is not None and 0 <= i < len(texts)},
    )
