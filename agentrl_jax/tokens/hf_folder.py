"""Tokenizer files of an exported folder, such that `transformers` reads what a run reads.

tokenizer.json, and tokenizer_config.json with the chat template and the special tokens. What is
written is read back and compared on every piece of the vocabulary and on random texts; a difference
is an error.
"""

import json
import random
import shutil
from pathlib import Path

import tokenizers

from agentrl_jax.tokens import chat as chats
from agentrl_jax.tokens import gguf_tokenizer as byte_pair
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tokens.tokenizer import Tokenizer

COPIED = (
    'tokenizer.json',
    'tokenizer_config.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'chat_template.jinja',
)
TEXTS = 2000  # random texts that are compared
SIGNS = [
    *' \n\t#_O√PX019.,:|<>"\'',
    '  ',
    '\n\n',
    '\r\n',
    'é',
    'e\u0301',
    '日本',
    '😀',
    '\u2581',
    '\x00',
]


def write(folder: Path, source: Path, *, calls: bool = False) -> Tokenizer:
    """Writes the tokenizer of a folder, a .gguf or a .model file; returns it as a run loads it.

    Files of a folder are copied, but for special_tokens_map.json, which `transformers` would
    believe rather than what follows. tokenizer_config.json then says that tokenizer.json is to be
    taken as it is, which tokens end a turn and pad in a run, and how a chat reads if the template
    of the source does not say it as a run does. calls: the run was of chats whose messages may have
    tools, which the template of the source words where it knows them (Chat.opening).
    """
    tokenizer = load_tokenizer(source)
    for name in COPIED if source.is_dir() else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not (folder / 'tokenizer.json').is_file():
        (folder / 'tokenizer.json').write_text(tokenizer.to_json(), encoding='utf-8')
    path = folder / 'tokenizer_config.json'
    settings = json.loads(path.read_text(encoding='utf-8')) if path.is_file() else {}
    settings |= {
        # Other classes replace parts of the tokenizer by their own rules.
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'clean_up_tokenization_spaces': False,
        'eos_token': tokenizer.decode([tokenizer.eos_ids[0]], show_special=True),
        'pad_token': tokenizer.decode([tokenizer.pad_id], show_special=True),
    }
    template = tokenizer.chat_template
    wording = chats.spoken(tokenizer)
    if begin := wording.begin:
        settings['bos_token'] = begin
    said = template
    if calls:
        said = chats.with_tools(tokenizer, begin)
    elif template is None or not chats.keeps_thoughts(tokenizer):
        said = chats.plain_template(begin, chats.thought_of(tokenizer, wording))
    if said != template:
        (folder / 'chat_template.jinja').unlink(missing_ok=True)
    if said != template or not source.is_dir():
        settings['chat_template'] = said
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
    return tokenizer


def is_qwen2(folder: Path) -> bool:
    """Whether tokenizer.json splits and merges text by the rules of Qwen2.

    Of a model_type qwen2 `transformers` takes no more than vocabulary and merges from the file, so
    a tokenizer with other rules must not be written beside it.
    """
    spec = json.loads((folder / 'tokenizer.json').read_text(encoding='utf-8'))
    if spec['model']['type'] != 'BPE':
        return False
    same = tokenizers.Tokenizer.from_str(json.dumps(spec))
    byte_pair.set_rules(same, 'qwen2', str(folder))
    own = load_tokenizer(folder)
    texts = sample_texts(own)
    return [e.ids for e in same.encode_batch(texts, add_special_tokens=False)] == (
        own.encode_batch(texts)
    )


def compare(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError if a folder gives other ids for a text or a chat than the tokenizer."""
    written = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
    texts = sample_texts(tokenizer)
    theirs = written.encode_batch(texts, add_special_tokens=False)
    for text, ours, found in zip(texts, tokenizer.encode_batch(texts), theirs, strict=True):
        if ours != found.ids:
            raise ValueError(
                f'{folder / "tokenizer.json"} gives other token ids than the run used for '
                f'{text!r}: {found.ids} and {ours}; this tokenizer cannot be exported'
            )
    read_back = load_tokenizer(folder)
    for field in ('vocab_size', 'pad_id', 'eos_ids'):
        ours, found = getattr(tokenizer, field), getattr(read_back, field)
        if ours != found:
            raise ValueError(f'{folder}: {field} was {ours} in the run and is {found} there')
    chats.build_chat(read_back)  # its template is the chat of the run, or this says why not


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Every text piece and seeded random texts, without texts that spell an added token.

    `transformers` reads added tokens as tokens, a run reads them as text.
    """
    pieces = [piece.decode('utf-8', errors='ignore') for piece in tokenizer.token_bytes()]
    pieces = [piece for piece in pieces if piece]
    rng = random.Random(0)
    texts = list(pieces)
    for _ in range(TEXTS):
        words = rng.choices(pieces, k=8) + rng.choices(SIGNS, k=8)
        words += [chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(0xE000, 0x110000)]))]
        rng.shuffle(words)
        texts.append(''.join(words))
    return [text for text in texts if not any(name in text for name in tokenizer.special_names())]
