"""GGUF files: exact dequantisation, errors that name the file, and real weights."""

import dataclasses
import json
import os
import struct
import types
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from tiny_models import LLAMA, TINY, by_hf_name, forward, hf_tensors

from agentrl_jax import export
from agentrl_jax.machine import sharding
from agentrl_jax.models import weights
from agentrl_jax.tokens import hf_folder
from agentrl_jax.tokens.chat import CHATML
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tokens.tokenizer import gpt2_byte_characters

# transformers uses 128 for Qwen3 and ignores the head width in a GGUF file
QWEN3 = dataclasses.replace(tiny_models.QWEN3, head_dim=128)
CONFIGS = tiny_models.FAMILIES | {'qwen3': QWEN3}
each_family = pytest.mark.parametrize('config', CONFIGS.values(), ids=CONFIGS)
DOWN = 'model.layers.1.mlp.down_proj.weight'


def gguf_name(name, config):
    """Return llama.cpp's name of a tensor."""
    numbers = {kind: number for number, kind in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture(config)], n_blocks=2)
    return names.get_name(name, ('.weight', '.bias'))


def llama_order(weight, heads):
    """Return the rows of a q or k projection in llama.cpp's order: channel i, then i + Dh / 2."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            start = 2 * half * head
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + half + i]
    return out


def architecture(config):
    return config.to_hf()['model_type']


def gguf_writer(path, config):
    """Return a GGUF writer with the sizes of a model."""
    writer = gguf.GGUFWriter(path, architecture(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if architecture(config) == 'qwen3':
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    return writer


def write_gguf(path, config, tensors, kind, **fields):
    """Write a GGUF file of the tensors; matrices quantised as `kind`, vectors in float32."""
    writer = gguf_writer(path, config)
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace('ARCH', architecture(config)).replace('__', '.'), value)
    return add_tensors(writer, path, config, tensors, kind)


def add_tensors(writer, path, config, tensors, kind):
    """Write the tensors and close the file."""
    for name, array in tensors.items():
        if architecture(config) == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
            heads = config.num_heads if 'q_proj' in name else config.num_kv_heads
            array = llama_order(array, heads)
        quant = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            gguf_name(name, config), gguf.quants.quantize(array, quant), raw_dtype=quant
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize('kind', ['F32', 'F16', 'BF16', 'Q8_0', 'Q4_0'])
@each_family
def test_a_gguf_file_loads_to_its_dequantised_weights(tmp_path, config, kind):
    quant = gguf.GGMLQuantizationType[kind]
    tensors = hf_tensors(config)
    loaded, params = weights.load_model(write_gguf(tmp_path / 'm.gguf', config, tensors, quant))
    assert dataclasses.replace(loaded, rms_norm_eps=1e-6) == config
    assert loaded.rms_norm_eps == np.float32(1e-6)  # the file stores it in float32
    ours = by_hf_name(params)
    for name, array in tensors.items():
        expected = array
        if array.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(array, quant), quant)
        np.testing.assert_array_equal(ours[name], expected, err_msg=name)
        assert np.abs(expected - array).max() < 0.15


def test_a_gguf_file_is_dequantised_in_slices_and_small_blocks(tmp_path, monkeypatch):
    from agentrl_jax.models import gguf as source

    monkeypatch.setattr(source, 'BLOCK_ELEMENTS', 200)  # three rows of 64 at a time
    quant = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / 'm.gguf', LLAMA, hf_tensors(LLAMA), quant)
    _, full = weights.load_model(path)
    _, split = weights.load_model(path, mesh=sharding.make_mesh(2, 2, 2))
    jax.tree.map(np.testing.assert_array_equal, full, split)
    monkeypatch.undo()
    _, plain = weights.load_model(path)
    jax.tree.map(np.testing.assert_array_equal, full, plain)


@pytest.mark.soak
@pytest.mark.parametrize('config', [TINY, LLAMA, QWEN3], ids=['qwen2', 'llama', 'qwen3'])
def test_transformers_computes_the_same_logits_from_a_gguf_file(tmp_path, config):
    torch = pytest.importorskip('torch')
    pytest.importorskip('accelerate')  # transformers requires it for GGUF
    transformers = pytest.importorskip('transformers')
    quant = gguf.GGMLQuantizationType.F16
    context = {'ARCH__context_length': 64, 'ARCH__vocab_size': 96}
    path = write_gguf(tmp_path / 'm.gguf', config, hf_tensors(config), quant, **context)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    tokens = np.random.default_rng(0).integers(96, size=(2, 9))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    config, params = weights.load_model(path)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    hidden = config.forward(params, tokens, positions, jnp.ones((2, 9), bool))
    np.testing.assert_allclose(config.logits(params, hidden), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize('share', [0.0, 0.005, 0.999])
def test_an_error_names_a_truncated_gguf_file(tmp_path, share):
    quant = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / 'm.gguf', TINY, hf_tensors(TINY), quant)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(ValueError, match='m.gguf'):
        weights.load_model(path)


DATA = b'0' * 64


def text_of(text):
    return struct.pack('<Q', len(text)) + text.encode()


def raw_gguf(*, fields=(), tensors=(), counts=None, data=b''):
    """Return a GGUF file of fields and tensors in bytes; counts: the numbers in its header."""
    counts = counts or (len(tensors), len(fields))
    head = b'GGUF' + struct.pack('<IQQ', 3, *counts) + b''.join((*fields, *tensors))
    return head + b'\0' * (-len(head) % 32) + data


def array_of(kind, count):
    return text_of('a') + struct.pack('<IIQ', 9, kind, count)


def tensor_of(name, shape, kind=0, offset=0):
    sizes = struct.pack(f'<I{len(shape)}Q', len(shape), *shape)
    return text_of(name) + sizes + struct.pack('<IQ', kind, offset)


MALFORMED = {
    'an array of 2^40 numbers': raw_gguf(fields=[array_of(4, 2**40)]),
    'an array of 2^64 texts': raw_gguf(fields=[array_of(8, 2**64 - 1)]),
    'arrays of arrays': raw_gguf(fields=[array_of(9, 2**40)]),
    'a text of 2^60 bytes': raw_gguf(fields=[text_of('a') + struct.pack('<IQ', 8, 2**60)]),
    'a value of an unknown type': raw_gguf(fields=[text_of('a') + struct.pack('<I', 99)]),
    'fields without end': raw_gguf(counts=(0, 2**60)),
    'tensors without end': raw_gguf(counts=(2**60, 0)),
    'a field twice': raw_gguf(fields=[text_of('a') + struct.pack('<II', 4, 1)] * 2),
    'a large tensor': raw_gguf(tensors=[tensor_of('t', (2**40,))], data=DATA),
    'a tensor far away': raw_gguf(tensors=[tensor_of('t', (4,), offset=2**63)], data=DATA),
    'overlapping tensors': raw_gguf(tensors=[tensor_of(x, (16,)) for x in 'abc'], data=DATA),
    'many dimensions': raw_gguf(tensors=[tensor_of('t', (1,) * 9)]),
    'half a block': raw_gguf(tensors=[tensor_of('t', (33,), 8)], data=DATA),
    'an unknown type': raw_gguf(tensors=[tensor_of('t', (1,), 99)], data=DATA),
    'an alignment of 3': raw_gguf(fields=[text_of('general.alignment') + struct.pack('<II', 4, 3)]),
    'another format': b'PK\x03\x04 something else entirely, long enough',
}


@pytest.mark.parametrize('content', MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_gguf_file_is_rejected_immediately(tmp_path, content):
    """GGUFReader creates the values of an array one by one, even past the end of the file."""
    path = tmp_path / 'm.gguf'
    path.write_bytes(content)
    for load in (weights.load_model, load_tokenizer):
        with pytest.raises(ValueError) as error:
            load(path)
        assert str(error.value).startswith(f'{path}: ') and '\n' not in str(error.value)


TENSORS = hf_tensors(TINY)


@pytest.mark.parametrize(
    ('change', 'tensors', 'fields', 'named'),
    [
        ({'num_layers': 1000}, TENSORS, {}, '1000 layers'),
        ({'num_layers': 2**31}, TENSORS, {}, 'qwen2.block_count'),
        ({'num_heads': 0}, TENSORS, {}, 'qwen2.attention.head_count'),
        ({'hidden_size': 2**32 - 1}, TENSORS, {}, 'qwen2.embedding_length'),
        ({'rope_theta': float('nan')}, TENSORS, {}, 'qwen2.rope.freq_base'),
        ({'rms_norm_eps': -1.0}, TENSORS, {}, 'qwen2.attention.layer_norm_rms_epsilon'),
        ({}, {k: v for k, v in TENSORS.items() if k != DOWN}, {}, DOWN),
        ({}, {}, {}, 'token_embd.weight'),
        ({}, TENSORS, {'ARCH__rope__scaling__type': 'yarn'}, 'rope scaling'),
        ({}, TENSORS, {'ARCH__expert_count': 4}, 'experts'),
        ({}, TENSORS, {'split__count': 2}, 'split files'),
        ({}, TENSORS, {'ARCH__rope__dimension_count': 8}, 'part of a head'),
        ({'to_hf': lambda: {'model_type': 'gemma3'}}, TENSORS, {}, 'gemma3'),
    ],
)
def test_a_gguf_file_of_an_unsupported_model_is_rejected(tmp_path, change, tensors, fields, named):
    """A million layers used to be created before anything was compared."""
    config = types.SimpleNamespace(**{**dataclasses.asdict(TINY), 'to_hf': TINY.to_hf, **change})
    quant = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / 'm.gguf', config, tensors, quant, **fields)
    with pytest.raises(ValueError, match=named) as error:
        weights.load_model(path)
    assert str(path) in str(error.value)


def write_gguf_with_tokenizer(path, config, named=True):
    """Write a GGUF file with a byte-level tokenizer (one merge, three specials) and a template."""
    specials = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    tokens = [*gpt2_byte_characters(), 'up', *specials]
    config = dataclasses.replace(config, vocab_size=len(tokens))
    writer = gguf_writer(path, config)
    writer.add_context_length(512)
    writer.add_tokenizer_model('gpt2')
    if named:
        writer.add_tokenizer_pre('qwen2' if architecture(config) == 'qwen2' else 'smollm')
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
    writer.add_token_merges(['u p'])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 3)
    writer.add_chat_template(CHATML)
    return add_tensors(writer, path, config, hf_tensors(config), gguf.GGMLQuantizationType.F32)


def test_a_gguf_file_without_splitting_rules_is_read_as_qwen_or_rejected(tmp_path):
    """Qwen files without rules used GPT-2's rules: other tokens, and no error."""
    explicit, implicit = (
        load_tokenizer(write_gguf_with_tokenizer(tmp_path / f'{named}.gguf', TINY, named))
        for named in (True, False)
    )
    assert implicit.to_json() == explicit.to_json()
    unknown = write_gguf_with_tokenizer(tmp_path / 'llama.gguf', LLAMA, named=False)
    with pytest.raises(ValueError, match='llama.gguf: tokenizer.ggml.pre is missing'):
        load_tokenizer(unknown)


@pytest.mark.soak
@each_family
def test_an_export_of_a_gguf_file_includes_its_tokenizer(tmp_path, config):
    source = write_gguf_with_tokenizer(tmp_path / 'm.gguf', config)
    config, params = weights.load_model(source)
    out = export.export_hf(
        params,
        config,
        tmp_path / 'out',
        dtype='float32',
        tokenizer_source=source,
        model_source=source,
    )
    before, after = load_tokenizer(source), load_tokenizer(out)
    text = 'up, down <|im_end|> or up\n\u221a'
    assert before.encode(text) == after.encode(text)
    assert len(before.encode('up')) == 1
    for name in ('vocab_size', 'pad_id', 'eos_ids', 'chat_template'):
        assert getattr(before, name) == getattr(after, name)
    assert hf_folder.is_qwen2(out) == (architecture(config) == 'qwen2')
    hf = json.loads((out / 'config.json').read_text())
    end, begin, over = before.special('<|im_end|>'), before.special('<|im_start|>'), before.pad_id
    assert (hf['eos_token_id'], hf['bos_token_id'], hf['pad_token_id']) == (end, begin, over)
    assert (hf['max_position_embeddings'], hf['rope_theta']) == (512, config.rope_theta)
    assert hf.keys() >= {'head_dim', 'rms_norm_eps'} and weights.load_model(out)[0] == config
    theirs = pytest.importorskip('transformers').AutoTokenizer.from_pretrained(out)
    assert theirs('up\n\n12')['input_ids'] == before.encode('up\n\n12')


REAL = os.environ.get('AGENTRL_REAL_GGUF', '')
PROMPT = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        '
    'return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nprint([fibonacci(i) for i in '
    'range(10)])'
)


@pytest.mark.slow('reads a real checkpoint')
@pytest.mark.skipif(not REAL, reason='AGENTRL_REAL_GGUF names no file')
def test_real_weights_give_the_log_probabilities_of_transformers():
    torch = pytest.importorskip('torch')
    pytest.importorskip('accelerate')  # transformers requires it for GGUF
    transformers = pytest.importorskip('transformers')
    path = Path(REAL)
    tokens = np.array([load_tokenizer(path).encode(PROMPT)])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        theirs = torch.log_softmax(model(torch.tensor(tokens)).logits, -1)[0, :-1].numpy()
    del model
    config, params = weights.load_model(path)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = forward(params, config, tokens, positions, jnp.ones(tokens.shape, bool))
    ours = jax.nn.log_softmax(config.logits(params, hidden))[0, :-1]
    targets = tokens[0, 1:, None]
    gap = np.abs(np.take_along_axis(np.asarray(ours) - theirs, targets, axis=1)).max()
    everywhere = np.abs(np.asarray(ours) - theirs).max()
    mean = np.take_along_axis(theirs, targets, axis=1).mean()
    print(f'\n{targets.size} tokens, mean log p {mean:.3f}, gap {gap:.2e}, all {everywhere:.2e}')
    assert gap < 1e-3 and mean > -3.0
