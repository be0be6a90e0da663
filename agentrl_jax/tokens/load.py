"""Load a tokenizer from a HuggingFace folder, a .gguf file or a SentencePiece .model file."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import pydantic
import tokenizers

from agentrl_jax.machine import files
from agentrl_jax.tokens import unigram
from agentrl_jax.tokens.tokenizer import BytePairTokenizer, Tokenizer, library_errors, mark_specials

# A special token: '<|im_end|>' or {'content': '<|im_end|>', ...}
_Name = Annotated[
    str | None,
    pydantic.BeforeValidator(lambda x: x.get('content', x) if isinstance(x, dict) else x),
]


class _Fields(pydantic.BaseModel, strict=True):
    """The fields to read from a JSON file; all other fields are ignored."""


class _AddedToken(_Fields):
    id: int
    content: str
    special: bool


class _Spec(_Fields):
    model: dict[str, Any]
    added_tokens: list[_AddedToken] | None
    decoder: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None = None


class _Template(_Fields):
    name: str
    template: str


class _Settings(_Fields):
    bos_token: _Name = None
    eos_token: _Name = None
    unk_token: _Name = None
    sep_token: _Name = None
    pad_token: _Name = None
    cls_token: _Name = None
    mask_token: _Name = None
    extra_special_tokens: dict[str, _Name] | list | None = None
    chat_template: str | list[_Template] | None = None


class _Generation(_Fields):
    eos_token_id: int | list[int] | None = None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a HuggingFace folder, a .gguf file or a SentencePiece .model file."""
    path = Path(path)
    if path.is_dir() and (path / 'tokenizer.json').exists():
        return _load_folder(path)
    if path.is_dir() and (path / 'tokenizer.model').exists():
        return unigram.load_model((path / 'tokenizer.model').read_bytes(), str(path))
    if path.is_dir():
        raise ValueError(f'{path}: no tokenizer.json (or SentencePiece tokenizer.model) in it')
    if not path.exists():
        raise ValueError(
            f'{path}: no such folder or file. Download a model from the HuggingFace hub with: '
            f'hf download <owner>/<name> --local-dir {shlex.quote(str(path))}'
        )
    if path.suffix == '.gguf':
        from agentrl_jax.tokens import gguf_tokenizer

        return gguf_tokenizer.load(path)
    if path.suffix == '.model':
        return unigram.load_model(path.read_bytes(), str(path))
    raise ValueError(f'{path}: not a folder, a .gguf or a SentencePiece .model file')


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the model has fewer rows than the tokenizer has tokens."""
    texts = (i for i, piece in enumerate(tokenizer.token_bytes()) if piece)
    used = 1 + max(tokenizer.pad_id, *tokenizer.eos_ids, *texts)
    if used > vocab_size:
        raise ValueError(
            f'{tokenizer.source}: the tokenizer has {used} tokens but the model only {vocab_size} '
            'embedding rows'
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it does not exist."""
    return files.read_object(path) if path.exists() else {}


def _load_folder(folder: Path) -> Tokenizer:
    file = folder / 'tokenizer.json'
    content = _read_json(file)
    spec, declared = files.read_as(_Spec, content, file), _read_settings(folder)
    content['added_tokens'] = mark_specials(content['added_tokens'] or [])
    if spec.model.get('type') == 'Unigram':
        return unigram.from_spec(content, str(folder), **declared)
    if 'ByteLevel' not in json.dumps([spec.decoder, spec.pre_tokenizer]):
        raise ValueError(f'{folder}: only tokenizers with byte-level BPE are supported')
    _warn_of_gpt2(spec.pre_tokenizer, folder)
    with library_errors(str(file)):
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    return BytePairTokenizer(backend, source=str(folder), **declared)


def _warn_of_gpt2(pre_tokenizer: dict[str, Any] | None, folder: Path) -> None:
    """Print a warning if transformers 5 splits texts by GPT-2's rules instead of the folder's."""
    kind = _read_json(folder / 'tokenizer_config.json').get('tokenizer_class')
    if kind == 'GPT2Tokenizer' and (pre_tokenizer or {}).get('type') != 'ByteLevel':
        files.warn(
            f'{folder}: texts are split by the rules of tokenizer.json; transformers 5 splits them '
            'like GPT-2, because tokenizer_class is GPT2Tokenizer'
        )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return special tokens and chat template, as declared in the files next to tokenizer.json."""
    file = folder / 'tokenizer_config.json'
    fields = _read_json(file)
    if 'added_tokens_decoder' not in fields:  # otherwise transformers ignores the older file
        fields |= _read_json(folder / 'special_tokens_map.json')
    settings = files.read_as(_Settings, fields, file)
    file = folder / 'generation_config.json'
    eos = files.read_as(_Generation, _read_json(file), file).eos_token_id
    eos = settings.eos_token if eos is None else eos
    named = {name: token for name, token in settings if name.endswith('_token')}
    if isinstance(settings.extra_special_tokens, dict):
        extra = settings.extra_special_tokens
        named |= {name: token for name, token in extra.items() if name.endswith('_token')}
    bos = named.pop('bos_token')
    template = settings.chat_template
    if isinstance(template, list):
        template = {one.name: one.template for one in template}.get('default')
    if (folder / 'chat_template.jinja').exists():
        template = files.read_text(folder / 'chat_template.jinja')
    return {
        'pad': settings.pad_token,
        'eos': eos if isinstance(eos, list) else [eos] * (eos is not None),
        'chat_template': template,
        'bos': bos,
        'named': {name: token for name, token in named.items() if token is not None},
    }
