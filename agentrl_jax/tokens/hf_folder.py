"""Tokenizer files of an exported folder, for the same tokens in `transformers` as in a run.

These are tokenizer.json, and tokenizer_config.json with the chat template and special tokens. The
written files are read back and compared on all pieces of the vocabulary and on random texts. A
difference is an error.
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
TEXTS = 2000  # number of random texts to compare
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
    """Write the tokenizer of a folder, a .gguf or a .model file, and return it as a run loads it.

    Files of a folder are copied, except special_tokens_map.json, because it would override
    tokenizer_config.json in `transformers`. The new tokenizer_config.json makes `transformers` use
    tokenizer.json unchanged. It sets the end-of-turn and padding tokens of the run, and the chat
    template if the source has none or a different one. calls: messages of the run may have tools,
    rendered by the template of the source if it supports them (Chat.opening).
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
        # Other classes replace parts of the tokenizer by built-in rules.
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'clean_up_tokenization_spaces': False,
        'eos_token': tokenizer.decode([tokenizer.eos_ids[0]], show_special=True),
        'pad_token': tokenizer.decode([tokenizer.pad_id], show_special=True),
    }
    chat, template = chats.build_chat(tokenizer), tokenizer.chat_template
    if begin := chat.wording.begin:
        settings['bos_token'] = begin
    chat_template = template
    if calls:
        chat_template = chats.with_tools(tokenizer, begin)
    elif template is None or not chats.keeps_thoughts(tokenizer):
        chat_template = chats.plain_template(begin, chat.thought)
    if chat_template != template:
        (folder / 'chat_template.jinja').unlink(missing_ok=True)
    if chat_template != template or not source.is_dir():
        settings['chat_template'] = chat_template
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
    return tokenizer


def is_qwen2(folder: Path) -> bool:
    """Return whether tokenizer.json splits and merges text by the rules of Qwen2.

    For model_type qwen2, `transformers` only reads vocabulary and merges from the file, so the
    export of such a model must not have a tokenizer with other rules.
    """
    spec = json.loads((folder / 'tokenizer.json').read_text(encoding='utf-8'))
    if spec['model']['type'] != 'BPE':
        return False
    qwen2_backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    byte_pair.set_rules(qwen2_backend, 'qwen2', str(folder))
    tokenizer = load_tokenizer(folder)
    texts = sample_texts(tokenizer)
    return [e.ids for e in qwen2_backend.encode_batch(texts, add_special_tokens=False)] == (
        tokenizer.encode_batch(texts)
    )


def compare(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError if a folder gives other ids for a text or a chat than the tokenizer."""
    written = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
    texts = sample_texts(tokenizer)
    theirs = written.encode_batch(texts, add_special_tokens=False)
    for text, ours, result in zip(texts, tokenizer.encode_batch(texts), theirs, strict=True):
        if ours != result.ids:
            raise ValueError(
                f'{folder / "tokenizer.json"} gives other token ids than the run for '
                f'{text!r}: {result.ids} and {ours}; this tokenizer cannot be exported'
            )
    read_back = load_tokenizer(folder)
    for field in ('vocab_size', 'pad_id', 'eos_ids'):
        ours, result = getattr(tokenizer, field), getattr(read_back, field)
        if ours != result:
            raise ValueError(f'{folder}: {field} was {ours} in the run and is {result} there')
    chats.build_chat(read_back)  # raises if its template differs from the chat of the run


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Return all text pieces and seeded random texts, except texts that spell an added token.

    In texts, `transformers` reads added tokens as tokens, while a run reads them as text.
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
