"""Tokenizers: one class for HuggingFace folders, .gguf files and SentencePiece .model files.

Text is data: encode() never returns a special token for any text. Special tokens are only inserted
by id (special('<|im_end|>')), so an observation cannot forge a chat turn.
"""

import contextlib
import functools
import re
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

from agentrl_jax.machine import files
from agentrl_jax.tokens.wording import CHAT_ML, END_OF_TEXT, IM_END, IM_START, LLAMA_3, Wording

CHAT_SPECIALS = (IM_START, IM_END, END_OF_TEXT)
MAX_IDS = 2**22  # limit on ids, larger than any vocabulary; lists have one entry per id


class Tokenizer:
    """Shared parts of all tokenizers; subclasses build the backend and the pieces."""

    def __init__(
        self,
        backend: Any,
        pieces: list[bytes],
        specials: dict[str, int],
        *,
        pad: int | str | None,
        eos: list[int | str],
        chat_template: str | None,
        source: str,
        bos: str | None = None,
        named: dict[str, str] | None = None,
    ):
        """backend: a tokenizers.Tokenizer.

        pieces: bytes of every id, b'' for special and unused ids; pad, eos, bos: as declared;
        named: other special tokens of templates, such as {'eos_token': '<|im_end|>'}.
        """
        backend.encode_special_tokens = True
        self._backend = backend
        self._pieces = pieces
        self._specials = specials
        self._special_names = {i: name for name, i in specials.items()}
        self.source = source
        self.vocab_size = len(pieces)
        self.chat_template = chat_template
        self.bos = bos or ''  # the template's bos_token; '' = not declared
        self.named = named or {}
        # In a chat, a turn ends with <|im_end|>, even if a base model declares <|endoftext|>.
        chat_ends = [name for name in self.chat_format.ends if name in specials]
        ends = [self._id(e) for e in [*chat_ends[:1], *eos, *chat_ends[1:]]]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        pad = chat_ends[-1] if pad is None and chat_ends else pad
        if pad is None or not self.eos_ids:
            raise ValueError(f'{source}: the tokenizer declares no padding or no end token')
        self.pad_id: int = self._id(pad)

    @property
    def chat_format(self) -> Wording:
        """The family of the chat template; ChatML unless it is Llama 3 (build_chat checks it)."""
        return LLAMA_3 if LLAMA_3.start in (self.chat_template or '') else CHAT_ML

    def _id(self, token: int | str) -> int:
        if isinstance(token, str):
            return self.special(token)
        if type(token) is not int or not 0 <= token < MAX_IDS:
            raise ValueError(f'{self.source}: {reprlib.repr(token)} is not a valid token id')
        return token

    def special(self, name: str) -> int:
        """Return the id of a special token such as '<|im_end|>'."""
        if name not in self._specials:
            raise ValueError(
                f'{self.source}: the tokenizer has no special token {files.one_line_excerpt(name)}'
            )
        return self._specials[name]

    def special_names(self) -> list[str]:
        """Return the spellings of all special tokens."""
        return list(self._specials)

    @functools.cached_property
    def spelled(self) -> re.Pattern:
        """Pattern that matches spellings of special tokens, with one group."""
        names = sorted((name for name in self._specials if len(name) > 1), key=len, reverse=True)
        return re.compile('(' + ('|'.join(map(re.escape, names)) or '(?!)') + ')')

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every id; b'' for special, control and unused ids."""
        return list(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; spelled special tokens are also plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def to_json(self) -> str:
        """Return the content of a tokenizer.json with the same ids."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids; special, unused and out-of-range ids have none."""
        return b''.join(self._pieces[i] for i in map(int, ids) if 0 <= i < self.vocab_size)

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Return the text of ids with invalid UTF-8 replaced; show_special: keep special tokens."""
        if not show_special:
            return self.decode_bytes(ids).decode('utf-8', errors='replace')
        names = {i: name.encode() for i, name in self._special_names.items()}
        parts = [names[i] if i in names else self.decode_bytes([i]) for i in map(int, ids)]
        return b''.join(parts).decode('utf-8', errors='replace')


class BytePairTokenizer(Tokenizer):
    """Byte-level BPE (as GPT-2: Qwen, Llama 3, SmolLM), run by the `tokenizers` library."""

    def __init__(self, backend: Any, *, source: str, **declared: Any):
        """backend: a tokenizers.Tokenizer with its special added tokens marked as special."""
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        specials = {token.content: i for i, token in added.items() if token.special}
        vocab = backend.get_vocab(with_added_tokens=True)
        largest = max(vocab.values(), default=0)
        if largest >= MAX_IDS:
            raise ValueError(f'{source}: a token has id {largest:,}; the largest is {MAX_IDS:,}')
        pieces = [b''] * (largest + 1)
        byte_of = {char: value for value, char in enumerate(gpt2_byte_characters())}
        for text, i in vocab.items():
            if i not in added:
                pieces[i] = _piece_bytes(text, byte_of)
            elif not added[i].special:
                pieces[i] = text.encode()
        super().__init__(backend, pieces, specials, source=source, **declared)

    def to_json(self) -> str:
        return self._backend.to_str()


def gpt2_byte_characters() -> list[str]:
    """Return the printable character for every byte (GPT-2, encoder.py: bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    code = {b: b for b in printable} | {b: 256 + n for n, b in enumerate(rest)}
    return [chr(code[b]) for b in range(256)]


def _piece_bytes(text: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[char] for char in text)
    except KeyError:
        return text.encode()  # never produced by ByteLevel, but checkpoints may contain these ids


def mark_specials(added_tokens: list[dict]) -> list[dict]:
    """Mark every added token '<|...|>' as special, so that text never encodes to it."""
    marker = re.compile(r'<\|.*\|>', re.DOTALL)
    return [
        token | {'special': token['special'] or bool(marker.fullmatch(token['content']))}
        for token in added_tokens
    ]


@contextlib.contextmanager
def library_errors(source: str) -> Iterator[None]:
    """Convert errors of the `tokenizers` library to ValueErrors with the source.

    The library raises plain Exceptions, and PanicException, a BaseException, if Rust panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != 'PanicException':
            raise
        raise ValueError(
            f'{source}: invalid tokenizer ({files.one_line_excerpt(str(error))})'
        ) from error
