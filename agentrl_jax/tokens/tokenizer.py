"""Tokenizers: a HuggingFace folder, a .gguf file or a SentencePiece .model behind one class.

Text is data: encode() never yields a special token, whatever the text spells. Special tokens are
placed by id only (special('<|im_end|>')), so no observation can forge a chat turn.
"""

import functools
import json
import re
import reprlib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl_jax.machine import files
from agentrl_jax.tokens.wording import END_OF_TEXT, IM_END, IM_START, wording_of

CHAT_SPECIALS = (IM_START, IM_END, END_OF_TEXT)
MOST_IDS = 2**22  # above those of any vocabulary; there is a list with a place for every id
JSON_KINDS = {
    str: 'a text',
    int: 'a whole number',
    bool: 'true or false',
    dict: 'an object',
    list: 'a list',
}
# Special tokens of templates, with bos_token
NAMED = [f'{name}_token' for name in ('eos', 'unk', 'sep', 'pad', 'cls', 'mask')]
OWNERS = {'Qwen': 'Qwen', 'SmolLM': 'HuggingFaceTB'}  # of models on the hub, by their names


class Tokenizer:
    """What every kind shares; the subclasses know how text becomes ids."""

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
        """backend: a tokenizers.Tokenizer that takes special tokens in a text for text.

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
        self.bos = bos or ''  # the template's bos_token; '' = none is declared
        self.named = named or {}
        # In a chat a turn ends with <|im_end|>, also where a base model declares <|endoftext|>.
        chat_ends = [name for name in wording_of(chat_template).ends if name in specials]
        ends = [self._id(e) for e in [*chat_ends[:1], *eos, *chat_ends[1:]]]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        pad = chat_ends[-1] if pad is None and chat_ends else pad
        if pad is None or not self.eos_ids:
            raise ValueError(f'{source}: the tokenizer declares no padding or no end token')
        self.pad_id: int = self._id(pad)

    def _id(self, token: int | str) -> int:
        if isinstance(token, str):
            return self.special(token)
        if type(token) is not int or not 0 <= token < MOST_IDS:
            raise ValueError(f'{self.source}: {reprlib.repr(token)} is no id of a token')
        return token

    def special(self, name: str) -> int:
        """Id of a special token such as '<|im_end|>'."""
        if name not in self._specials:
            raise ValueError(
                f'{self.source}: the tokenizer has no special token {files.in_line(name)}'
            )
        return self._specials[name]

    def special_names(self) -> list[str]:
        """The special tokens as they are spelled."""
        return list(self._specials)

    @functools.cached_property
    def spelled(self) -> re.Pattern:
        """Finds the special tokens that a text spells, in one group."""
        names = sorted((name for name in self._specials if len(name) > 1), key=len, reverse=True)
        return re.compile('(' + ('|'.join(map(re.escape, names)) or '(?!)') + ')')

    def token_bytes(self) -> list[bytes]:
        """Bytes of every id; b'' for special, control and unused ids."""
        return list(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled in it are plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """encode() of each text."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def to_json(self) -> str:
        """The content of a tokenizer.json that gives the same ids."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the ids; special, unused and out-of-range ids have none."""
        return b''.join(self._pieces[i] for i in map(int, ids) if 0 <= i < self.vocab_size)

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Text of the ids, broken UTF-8 replaced; show_special spells special tokens out."""
        if not show_special:
            return self.decode_bytes(ids).decode('utf-8', errors='replace')
        names = {i: name.encode() for i, name in self._special_names.items()}
        parts = [names[i] if i in names else self.decode_bytes([i]) for i in map(int, ids)]
        return b''.join(parts).decode('utf-8', errors='replace')


class BytePairTokenizer(Tokenizer):
    """Byte-level BPE (GPT-2 kind: Qwen, Llama 3, SmolLM) run by the `tokenizers` library."""

    def __init__(self, backend: Any, *, source: str, **declared: Any):
        """backend: a tokenizers.Tokenizer whose special added tokens are marked as special."""
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        specials = {token.content: i for i, token in added.items() if token.special}
        vocab = backend.get_vocab(with_added_tokens=True)
        largest = max(vocab.values(), default=0)
        if largest >= MOST_IDS:
            raise ValueError(f'{source}: a token has id {largest:,}; the largest is {MOST_IDS:,}')
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
    """Printable stand-in character of every byte (GPT-2, encoder.py: bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    code = {b: b for b in printable} | {b: 256 + n for n, b in enumerate(rest)}
    return [chr(code[b]) for b in range(256)]


def _piece_bytes(text: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[char] for char in text)
    except KeyError:
        return text.encode()  # never produced by ByteLevel, but a checkpoint may carry such ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Tokenizer of a HuggingFace folder, a .gguf file or a SentencePiece .model file."""
    path = Path(path)
    if path.is_dir():
        if (path / 'tokenizer.json').exists():
            return _load_folder(path)
        if (path / 'tokenizer.model').exists():
            return _load_sentencepiece(path / 'tokenizer.model', path)
        raise ValueError(f'{path}: no tokenizer.json (or SentencePiece tokenizer.model) in it')
    if not path.exists():
        raise ValueError(
            f'{path}: no such folder or file. A model of the HuggingFace hub is brought by: '
            f'hf download {_hub_name(path)} --local-dir {shlex.quote(str(path))}'
        )
    if path.suffix == '.gguf':
        from agentrl_jax.tokens import gguf_tokenizer

        return gguf_tokenizer.load(path)
    if path.suffix == '.model':
        return _load_sentencepiece(path, path)
    raise ValueError(f'{path}: not a folder, a .gguf or a SentencePiece .model file')


def _hub_name(path: Path) -> str:
    """What a path that does not exist is probably called on the hub."""
    owner = next((owner for start, owner in OWNERS.items() if path.name.startswith(start)), None)
    if owner:
        return f'{owner}/{path.name}'
    given = '/'.join(path.parts)
    return given if re.fullmatch(r'\w[\w.-]*/[\w.-]+', given) else '<owner>/<name>'


def _load_sentencepiece(file: Path, source: Path) -> Tokenizer:
    from agentrl_jax.tokens import unigram

    return unigram.load_model(file.read_bytes(), str(source))


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """The model must have a row for every token; it may have more (padding rows)."""
    texts = (i for i, piece in enumerate(tokenizer.token_bytes()) if piece)
    used = 1 + max(tokenizer.pad_id, *tokenizer.eos_ids, *texts)
    if used > vocab_size:
        raise ValueError(
            f'{tokenizer.source}: the tokenizer has {used} tokens but the model only {vocab_size} '
            'embedding rows'
        )


def mark_specials(added_tokens: list[dict]) -> list[dict]:
    """Added tokens with every '<|...|>' marked special, so that text can never yield one."""
    marker = re.compile(r'<\|.*\|>', re.DOTALL)
    return [
        token | {'special': token['special'] or bool(marker.fullmatch(token['content']))}
        for token in added_tokens
    ]


class library_errors:
    """What the `tokenizers` library refuses becomes a ValueError that names the source.

    It raises Exception itself, and PanicException, which is no Exception, where its Rust code
    fails.
    """

    def __init__(self, source: str):
        self.source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == 'PanicException'):
            reason = files.in_line(str(error))
            raise ValueError(f'{self.source}: no tokenizer ({reason})') from error


def _read_json(path: Path) -> dict:
    """Content of a JSON file; {} where the folder has none."""
    return files.read_object(path) if path.exists() else {}


def _entry(fields: dict, name: str, kinds: tuple[type, ...], source: Path) -> Any:
    """An optional field of a checkpoint's JSON, of one of the kinds; None where it is absent."""
    value = fields[name] if name in fields else None
    if value is not None and type(value) not in kinds:
        raise ValueError(
            f'{source}: {name} is {reprlib.repr(value)} and must be '
            f'{" or ".join(JSON_KINDS[kind] for kind in kinds)}'
        )
    return value


def _load_folder(folder: Path) -> Tokenizer:
    import tokenizers

    file = folder / 'tokenizer.json'
    spec = _read_json(file)
    if not {'model', 'added_tokens', 'decoder'} <= spec.keys():
        raise ValueError(f'{file}: not a tokenizer')
    _check_spec(spec, file)
    declared = _declared(folder)
    if _entry(spec['model'], 'type', (str,), file) == 'Unigram':
        from agentrl_jax.tokens import unigram

        return unigram.from_spec(spec, str(folder), **declared)
    if 'ByteLevel' not in json.dumps([spec['decoder'], spec.get('pre_tokenizer')]):
        raise ValueError(f'{folder}: only tokenizers with byte-level BPE are supported')
    _warn_of_gpt2(spec, folder)
    spec['added_tokens'] = mark_specials(spec['added_tokens'])
    with library_errors(str(file)):
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return BytePairTokenizer(backend, source=str(folder), **declared)


def _warn_of_gpt2(spec: dict, folder: Path) -> None:
    """Print a line if transformers 5 replaces the rules that split texts by those of GPT-2."""
    settings = _read_json(folder / 'tokenizer_config.json')
    splits = spec.get('pre_tokenizer') or {}
    if settings.get('tokenizer_class') == 'GPT2Tokenizer' and splits.get('type') != 'ByteLevel':
        print(
            f'WARNING: {folder}: texts are split by the rules of tokenizer.json; transformers 5 '
            'splits them as GPT-2 does, because tokenizer_class is GPT2Tokenizer',
            file=sys.stderr,
            flush=True,
        )


def _check_spec(spec: dict, file: Path) -> None:
    """Refuses a tokenizer.json whose parts are not of the types that are read here."""
    if _entry(spec, 'model', (dict,), file) is None:
        raise ValueError(f'{file}: no model')
    spec['added_tokens'] = _entry(spec, 'added_tokens', (list,), file) or []
    for token in spec['added_tokens']:
        if not isinstance(token, dict):
            raise ValueError(f'{file}: added token {reprlib.repr(token)} is no object')
        for name, kind in (('id', int), ('content', str), ('special', bool)):
            if _entry(token, name, (kind,), file) is None:
                raise ValueError(f'{file}: an added token has no {name}')


def _declared(folder: Path) -> dict[str, Any]:
    """Padding, beginning, ends and chat template, as files beside tokenizer.json declare them."""
    file, settings_file = folder / 'generation_config.json', folder / 'tokenizer_config.json'
    settings = _read_json(settings_file)
    if 'added_tokens_decoder' not in settings:  # transformers reads the older file only then
        settings |= _read_json(folder / 'special_tokens_map.json')
    eos = _entry(_read_json(file), 'eos_token_id', (int, list), file)
    eos = _token_name(settings, 'eos_token', settings_file) if eos is None else eos
    eos = eos if isinstance(eos, list) else [eos]
    return {
        'pad': _token_name(settings, 'pad_token', settings_file),
        'eos': [token for token in eos if token is not None],
        'chat_template': _chat_template(folder, settings),
        'bos': _token_name(settings, 'bos_token', settings_file),
        'named': _named(settings, settings_file),
    }


def _named(settings: dict, file: Path) -> dict[str, str]:
    """Special tokens that a chat template can use, by the names that transformers passes."""
    extra = _entry(settings, 'extra_special_tokens', (dict, list), file)
    extra = extra if isinstance(extra, dict) else {}
    extra = {name: token for name, token in extra.items() if name.endswith('_token')}
    tokens = {name: _token_name(settings, name, file) for name in NAMED}
    tokens |= {name: _token_name(extra, name, file) for name in extra}
    return {name: token for name, token in tokens.items() if token is not None}


def _token_name(settings: dict, name: str, file: Path) -> str | None:
    """'<|im_end|>' of a plain string or of {'content': '<|im_end|>', ...}."""
    entry = _entry(settings, name, (str, dict), file)
    return _entry(entry, 'content', (str,), file) if isinstance(entry, dict) else entry


def _chat_template(folder: Path, settings: dict) -> str | None:
    """chat_template.jinja, else the (default) template of tokenizer_config.json."""
    if (folder / 'chat_template.jinja').exists():
        return files.read_text(folder / 'chat_template.jinja')
    file = folder / 'tokenizer_config.json'
    template = _entry(settings, 'chat_template', (str, list), file)
    if not isinstance(template, list):
        return template
    named = {}
    for entry in template:
        if not isinstance(entry, dict):
            raise ValueError(f'{file}: chat template {reprlib.repr(entry)} is no object')
        name = _entry(entry, 'name', (str,), file)
        named[name] = _entry(entry, 'template', (str,), file)
    return named['default'] if 'default' in named else None
