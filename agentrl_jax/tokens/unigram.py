"""SentencePiece unigram models as tokenizer.json, run by the `tokenizers` library.

Exports contain the same tokenizer.json, so `transformers` gives the same ids. The ids are equal to
SentencePiece's except for ties that its float32 sums decide by rounding (in thousands of tokens
without a break).
"""

import json
import re
import reprlib
from typing import Annotated, Any

import pydantic
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from agentrl_jax.machine import files
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS, END_OF_TEXT, Tokenizer, library_errors

SPACE = '\u2581'  # stands for a space in a piece
BYTE = re.compile(r'<0x([0-9A-F]{2})>')
USER_DEFINED_SCORE = -0.1  # SentencePiece's score of user-defined symbols
PROBES = [
    ' a  b ',
    '  ',
    'a\tb\r\n\n',
    '\u2167 ﬁ e\u0301',
    '日本 😀',
    '<0x0A><unk>',
    'aaaaaaaaaaaa',
]
SUPPORTED = (
    'supported are unigram models with byte_fallback, normalization_rule_name=identity and without '
    'add_dummy_prefix and remove_extra_whitespaces'
)


class UnigramTokenizer(Tokenizer):
    """A unigram model with byte fallback; its added tokens are special tokens."""

    def __init__(self, spec: dict[str, Any], *, source: str, **declared: Any):
        """spec: the content of a tokenizer.json, as returned by `spec_of`."""
        self._spec = spec
        with library_errors(source):
            backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
        specials = {token['content']: token['id'] for token in spec['added_tokens']}
        pieces = [text for text, _ in spec['model']['vocab']]
        silent = {*specials, pieces[spec['model']['unk_id']]}
        super().__init__(
            backend,
            [b'' if piece in silent else _bytes(piece) for piece in pieces],
            specials,
            source=source,
            **declared,
        )

    def to_json(self) -> str:
        return json.dumps(self._spec, ensure_ascii=False)


def _bytes(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, ' ').encode()


def load_model(model: bytes, source: str) -> UnigramTokenizer:
    """Load a serialised SentencePiece model; its control symbols become special tokens."""
    return from_spec(spec_of(model, source), source)


class _Model(pydantic.BaseModel):
    unk_id: Annotated[int, pydantic.Strict(), pydantic.Field(ge=0)]
    vocab: list[tuple[str, Annotated[float, pydantic.Strict()]]]


def from_spec(spec: dict[str, Any], source: str, **declared: Any) -> UnigramTokenizer:
    """Load a tokenizer.json in the format of `spec_of`; ValueError for any other format."""
    model = spec['model']
    pieces = [text for text, _ in files.read_as(_Model, model, f'{source}: model').vocab]
    if model['unk_id'] >= len(pieces):
        raise ValueError(f'{source}: model.unk_id={model["unk_id"]} is not one of its pieces')
    specials = {token['content']: token['id'] for token in spec['added_tokens']}
    for name, i in specials.items():
        if not 0 <= i < len(pieces) or pieces[i] != name:
            raise ValueError(
                f'{source}: added token {reprlib.repr(name)} is not piece {i} of the model'
            )
    if SPACE not in pieces:
        raise ValueError(
            f'{source}: the model has no piece for a space, so {SPACE!r} would replace every space '
            "of a decoded text; train it again with ' ' among its user-defined symbols"
        )
    with library_errors(source):
        form = json.loads(_build(model['vocab'], model['unk_id'], specials, source).to_str())
    for part in ('normalizer', 'pre_tokenizer', 'decoder', 'model'):
        if part not in spec or spec[part] != form[part]:
            raise ValueError(
                f'{source}: a unigram tokenizer with an unsupported {part}; only byte-level BPE '
                'and unigram tokenizers written by this project are supported'
            )
    missing = [name for name in CHAT_SPECIALS if name not in specials]
    if missing:
        raise ValueError(f'{source}: control symbols {", ".join(missing)} are missing')
    declared = {'pad': END_OF_TEXT, 'eos': [], 'chat_template': None} | declared
    return UnigramTokenizer(spec, source=source, **declared)


def spec_of(model: bytes, source: str) -> dict[str, Any]:
    """Return the content of tokenizer.json for a serialised SentencePiece model."""
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor()
    try:
        reference.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f'{source}: not a SentencePiece model ({error})') from error
    size = reference.GetPieceSize()
    if not any(reference.IsByte(i) for i in range(size)):
        raise ValueError(f'{source}: a model without byte_fallback; {SUPPORTED}')
    pieces = [reference.IdToPiece(i) for i in range(size)]
    scores = [reference.GetScore(i) for i in range(size)]
    # User-defined symbols have score 0, which cannot be the logarithm of a probability below 1.
    specials = {pieces[i]: i for i in range(size) if reference.IsControl(i)}
    silent = {i for i in range(size) if reference.IsControl(i) or reference.IsByte(i)}
    silent.add(reference.unk_id())
    lowest = min(scores)  # for unreachable pieces: text is split inside their names
    vocab = [
        [piece, lowest if i in silent else scores[i] or USER_DEFINED_SCORE]
        for i, piece in enumerate(pieces)
    ]
    backend = _build(vocab, reference.unk_id(), specials, source)
    spec = json.loads(backend.to_str())
    backend.encode_special_tokens = True
    texts = [piece.replace(SPACE, ' ') for i, piece in enumerate(pieces) if i not in silent]
    texts += PROBES
    ours = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    for text, one, other in zip(texts, ours, reference.EncodeAsIds(texts), strict=True):
        if one != other:
            raise ValueError(
                f'{source}: {text!r} would have other ids than in SentencePiece; {SUPPORTED}'
            )
    return spec


def _build(
    vocab: list[list], unknown: int, specials: dict[str, int], source: str
) -> tokenizers.Tokenizer:
    """Build the tokenizer of a vocabulary of [piece, score]."""
    names = [*specials, vocab[unknown][0]]
    _check_names([piece for piece, _ in vocab], names, source)
    backend = tokenizers.Tokenizer(models.Unigram(list(map(tuple, vocab)), unknown, True))
    backend.normalizer = normalizers.Replace(' ', SPACE)
    # Unlike SentencePiece, the model would match the names of bytes, controls and the unknown piece
    # in text. Splitting after their '<' prevents this; no other piece spans this border.
    rest = '|'.join(re.escape(name[1:]) for name in names)
    border = Regex(rf'<(?=0x[0-9A-F]{{2}}>|{rest})')
    backend.pre_tokenizer = pre_tokenizers.Split(border, 'merged_with_previous')
    spaces = decoders.Replace(SPACE, ' ')
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    return backend


def _check_names(pieces: list[str], names: list[str], source: str) -> None:
    """Raise ValueError for text pieces that contain the start of a name: they could be split."""
    for name in names:
        if not name.startswith('<') or len(name) < 2:
            raise ValueError(f"{source}: the name of {reprlib.repr(name)} must start with '<'")
    ends = [name[1:] for name in (*names, *(f'<0x{i:02X}>' for i in range(256)))]
    for piece in pieces:
        if piece in names or BYTE.fullmatch(piece):
            continue
        rests = [piece[match.end() :] for match in re.finditer('<(?=.)', piece, re.DOTALL)]
        if any(end.startswith(rest) or rest.startswith(end) for rest in rests for end in ends):
            raise ValueError(
                f'{source}: the piece {reprlib.repr(piece)} starts like the name of a byte or '
                'special token'
            )
