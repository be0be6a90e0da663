"""HuggingFace folders and GGUF files: loaded exactly, exported exactly, refused by name."""

import dataclasses
import json
import os
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_jax import export, sharding
from agentrl_jax.models import qwen2, weights
from agentrl_jax.tokens.tokenizer import gpt2_byte_characters, load_tokenizer

TINY = qwen2.ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
UNTIED = dataclasses.replace(TINY, tie_embeddings=False)
LLAMA = dataclasses.replace(TINY, tie_embeddings=False, qkv_bias=False)


def hf_tensors(config, dtype=np.float32, seed=0):
    """Random tensors of a model under HuggingFace's names."""
    rng = np.random.default_rng(seed)
    out = {}
    for where, leaf in jax.tree_util.tree_flatten_with_path(weights.abstract_params(config))[0]:
        path = sharding.path_name(where)
        shape = leaf.shape[::-1] if weights.is_transposed(path) else leaf.shape
        out[weights.hf_name(path)] = rng.normal(0, 0.2, shape).astype(dtype)
    return out


def write_folder(folder, config, tensors, files=1, **changes):
    """An HF folder with the tensors spread over `files` safetensors."""
    folder.mkdir()
    hf = export.config_to_hf(config, dtype='float32') | changes
    (folder / 'config.json').write_text(json.dumps(hf))
    if files == 1:
        save_file(tensors, folder / 'model.safetensors')
        return folder
    weight_map = {}
    for i in range(files):
        part = dict(list(tensors.items())[i::files])
        save_file(part, folder / f'part{i}.safetensors')
        weight_map |= dict.fromkeys(part, f'part{i}.safetensors')
    (folder / weights.INDEX).write_text(json.dumps({'weight_map': weight_map}))
    return folder


def by_hf_name(params):
    """Parameters as numpy arrays in the files' layout."""
    out = {}
    for where, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = sharding.path_name(where)
        out[weights.hf_name(path)] = (
            np.asarray(leaf).T if weights.is_transposed(path) else np.asarray(leaf)
        )
    return out


def test_names_by_hand():
    assert weights.hf_name('model/embed_tokens/embedding') == 'model.embed_tokens.weight'
    assert (
        weights.hf_name('model/layers_11/self_attn/q_proj/bias')
        == 'model.layers.11.self_attn.q_proj.bias'
    )
    assert weights.hf_name('model/norm/scale') == 'model.norm.weight'
    assert weights.hf_name('lm_head/kernel') == 'lm_head.weight'


@pytest.mark.parametrize('config', [TINY, UNTIED, LLAMA], ids=['tied', 'untied', 'llama'])
@pytest.mark.parametrize('files', [1, 3])
def test_a_folder_loads_exactly(tmp_path, config, files):
    tensors = hf_tensors(config)
    loaded, params = weights.load_model(write_folder(tmp_path / 'm', config, tensors, files))
    assert loaded == config
    ours = by_hf_name(params)
    assert ours.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}


def test_compute_settings_reach_the_config(tmp_path):
    folder = write_folder(tmp_path / 'm', TINY, hf_tensors(TINY))
    config, _ = weights.load_model(folder, dtype='bfloat16', remat=True)
    assert config == dataclasses.replace(TINY, dtype='bfloat16', remat=True)


def test_each_device_gets_its_slice(tmp_path):
    folder = write_folder(tmp_path / 'm', UNTIED, hf_tensors(UNTIED))
    _, whole = weights.load_model(folder)
    mesh = sharding.make_mesh(2, 2, 2)
    _, split = weights.load_model(folder, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, whole, split)
    up = split['model']['layers_1']['mlp']['up_proj']['kernel']  # [64, 96] over fsdp x tensor
    assert up.addressable_shards[0].data.shape == (32, 48)


def test_only_the_asked_slices_are_read(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / 'm', TINY, hf_tensors(TINY))
    sizes = []
    read = weights.SafetensorsSource.read

    def counted(self, name, index):
        part = read(self, name, index)
        sizes.append((name, part.size))
        return part

    monkeypatch.setattr(weights.SafetensorsSource, 'read', counted)
    weights.load_model(folder, mesh=sharding.make_mesh(2, 2, 2))
    up = [size for name, size in sizes if name == 'model.layers.0.mlp.up_proj.weight']
    assert up == [96 * 64 // 4] * 4  # four different slices, each once for its two devices


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('shard_bytes', [10**9, 30_000], ids=['one-file', 'several'])
def test_loading_and_exporting_gives_the_same_bytes(tmp_path, dtype, shard_bytes):
    tensors = hf_tensors(UNTIED, export.DTYPES[dtype])
    config, params = weights.load_model(write_folder(tmp_path / 'in', UNTIED, tensors, 2))
    out = export.export_hf(
        params, config, tmp_path / 'out', dtype=dtype, max_shard_bytes=shard_bytes
    )
    files = sorted(out.glob('*.safetensors'))
    assert (len(files) > 1) == (shard_bytes < 10**9)
    exported = {name: array for file in files for name, array in load_file(file).items()}
    assert exported.keys() == tensors.keys()
    for name, array in tensors.items():
        assert exported[name].dtype == array.dtype
        assert exported[name].tobytes() == array.tobytes(), name
    if len(files) > 1:
        index = json.loads((out / weights.INDEX).read_text())
        assert index['metadata']['total_size'] == sum(a.nbytes for a in tensors.values())
        assert all(path.stat().st_size < shard_bytes + 2000 for path in files)
    again, _ = weights.load_model(out)
    assert again == config


def test_an_export_from_a_mesh_and_with_a_value_head_is_the_same(tmp_path):
    folder = write_folder(tmp_path / 'in', TINY, hf_tensors(TINY))
    config, params = weights.load_model(folder, mesh=sharding.make_mesh(1, 4, 2))
    params['value_head'] = {'kernel': jnp.ones((64, 1)), 'bias': jnp.ones(1)}
    out = export.export_hf(params, config, tmp_path / 'out', dtype='float32')
    exported = load_file(out / 'model.safetensors')
    for name, array in load_file(folder / 'model.safetensors').items():
        assert exported.pop(name).tobytes() == array.tobytes()
    assert not exported


def test_transformers_opens_an_export(tmp_path):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    for name, config in (('qwen', TINY), ('llama', LLAMA)):
        folder = write_folder(tmp_path / f'{name}-in', config, hf_tensors(config))
        config, params = weights.load_model(folder)
        out = export.export_hf(params, config, tmp_path / name, dtype='float32')
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokens = np.random.default_rng(0).integers(96, size=(2, 9))
        with torch.no_grad():
            theirs = model(torch.tensor(tokens)).logits.numpy()
        positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
        hidden = qwen2.forward(params, config, tokens, positions, jnp.ones((2, 9), bool))
        ours = qwen2.logits(params, config, hidden)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_an_export_keeps_tokenizer_files_and_unknown_config_fields(tmp_path):
    extra = {'max_position_embeddings': 777, 'eos_token_id': 5, 'dtype': 'float32'}
    folder = write_folder(tmp_path / 'in', TINY, hf_tensors(TINY), **extra)
    (folder / 'tokenizer.json').write_text('{"any": "thing"}')
    (folder / 'notes.txt').write_text('not ours')
    config, params = weights.load_model(folder)
    out = export.export_hf(params, config, tmp_path / 'out', tokenizer_source=folder)
    assert (out / 'tokenizer.json').read_bytes() == (folder / 'tokenizer.json').read_bytes()
    assert not (out / 'notes.txt').exists()
    hf = json.loads((out / 'config.json').read_text())
    assert (hf['max_position_embeddings'], hf['eos_token_id']) == (777, 5)
    assert hf['torch_dtype'] == 'bfloat16' and 'dtype' not in hf


def test_an_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    config, params = weights.load_model(write_folder(tmp_path / 'in', TINY, hf_tensors(TINY)))

    def full_disk(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(export, 'save_file', full_disk)
        with pytest.raises(OSError, match='No space'):
            export.export_hf(params, config, tmp_path / 'out')
    assert [p.name for p in tmp_path.iterdir()] == ['in']
    export.export_hf(params, config, tmp_path / 'out')
    with pytest.raises(FileExistsError, match='choose another'):
        export.export_hf(params, config, tmp_path / 'out')
    with pytest.raises(ValueError, match='int8'):
        export.export_hf(params, config, tmp_path / 'new', dtype='int8')


def broken_folder(folder, *, tensors=None, changes=(), files=1):
    tensors = hf_tensors(TINY) if tensors is None else tensors
    return write_folder(folder, TINY, tensors, files, **dict(changes))


def without(name):
    return {k: v for k, v in hf_tensors(TINY).items() if k != name}


DOWN = 'model.layers.1.mlp.down_proj.weight'


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'tensors': without(DOWN)}, f'tensors missing: {DOWN}'),
        ({'changes': {'num_hidden_layers': 1}}, 'model does not have: model.layers.1.input_layer'),
        ({'changes': {'num_hidden_layers': 3}}, 'missing: model.layers.2.*and 7 more'),
        (
            {'tensors': hf_tensors(TINY) | {DOWN: np.zeros((64, 95), np.float32)}},
            rf'{DOWN} has shape \(64, 95\), config.json asks for \(64, 96\)',
        ),
        (
            {'tensors': hf_tensors(TINY) | {DOWN: np.zeros((64, 96), np.int8)}},
            f'{DOWN} has type I8',
        ),
        ({'changes': {'tie_word_embeddings': False}}, 'lm_head.weight missing.*not tied'),
        ({'tensors': hf_tensors(UNTIED)}, 'tied.*lm_head.weight'),
        ({'changes': {'model_type': 'mamba'}}, "model_type 'mamba'"),
        ({'changes': {'quantization_config': {'bits': 4}}}, 'quantised'),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path, settings, message):
    folder = broken_folder(tmp_path / 'm', **settings)
    with pytest.raises(ValueError, match=message) as error:
        weights.load_model(folder)
    assert str(folder) in str(error.value)


def test_a_rotary_constant_in_the_file_is_not_an_error(tmp_path):
    extra = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(8, np.float32)}
    weights.load_model(broken_folder(tmp_path / 'm', tensors=hf_tensors(TINY) | extra))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere'):
        weights.load_model(tmp_path / 'nowhere')
    with pytest.raises(FileNotFoundError, match='nowhere.gguf'):
        weights.load_model(tmp_path / 'nowhere.gguf')
    folder = broken_folder(tmp_path / 'm', files=2)
    (folder / 'part1.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='part1.safetensors'):
        weights.load_model(folder)
    (folder / weights.INDEX).unlink()
    with pytest.raises(FileNotFoundError, match='neither model.safetensors nor'):
        weights.load_model(folder)
    (folder / 'config.json').unlink()
    with pytest.raises(FileNotFoundError, match='config.json'):
        weights.load_model(folder)


def test_broken_json_is_named(tmp_path):
    folder = broken_folder(tmp_path / 'm')
    (folder / 'config.json').write_text('{"model_type": ')
    with pytest.raises(ValueError, match='config.json: not valid JSON'):
        weights.load_model(folder)
    (folder / 'config.json').write_text('[]')
    with pytest.raises(ValueError, match='config.json: not a JSON object'):
        weights.load_model(folder)


@pytest.mark.parametrize('share', [0.0, 0.01, 0.5, 0.999])
def test_a_half_written_safetensors_file_is_named(tmp_path, share):
    file = broken_folder(tmp_path / 'm') / 'model.safetensors'
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(ValueError, match='model.safetensors: damaged or half-written'):
        weights.load_model(file.parent)


GGUF_NAMES = {
    'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output',
    'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ffn_norm',
    'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
}  # fmt: skip


def gguf_name(name):
    module, _, kind = name.rpartition('.')
    if module in GGUF_NAMES:
        return f'{GGUF_NAMES[module]}.{kind}'
    layer, _, inner = module.removeprefix('model.layers.').partition('.')
    return f'blk.{layer}.{GGUF_NAMES[inner]}.{kind}'


def llama_order(weight, heads):
    """Rows of a q or k projection as llama.cpp wants them: channel i beside channel i + Dh / 2."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            start = 2 * half * head
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + half + i]
    return out


def write_gguf(path, config, tensors, kind, **fields):
    """A GGUF file of the tensors; matrices quantised as `kind`, vectors in float32."""
    arch = 'qwen2' if config.qkv_bias else 'llama'
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace('ARCH', arch).replace('__', '.'), value)
    for name, array in tensors.items():
        if arch == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
            heads = config.num_heads if 'q_proj' in name else config.num_kv_heads
            array = llama_order(array, heads)
        quant = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize('kind', ['F32', 'F16', 'BF16', 'Q8_0', 'Q4_0'])
@pytest.mark.parametrize('config', [TINY, LLAMA], ids=['qwen2', 'llama'])
def test_a_gguf_file_loads_to_what_its_quantisation_keeps(tmp_path, config, kind):
    quant = gguf.GGMLQuantizationType[kind]
    tensors = hf_tensors(config)
    loaded, params = weights.load_model(write_gguf(tmp_path / 'm.gguf', config, tensors, quant))
    assert dataclasses.replace(loaded, rms_norm_eps=1e-6) == config
    assert loaded.rms_norm_eps == np.float32(1e-6)  # the file keeps it in float32
    ours = by_hf_name(params)
    for name, array in tensors.items():
        kept = array
        if array.ndim == 2:
            kept = gguf.quants.dequantize(gguf.quants.quantize(array, quant), quant)
        np.testing.assert_array_equal(ours[name], kept, err_msg=name)
        assert np.abs(kept - array).max() < 0.15


def test_a_gguf_file_is_dequantised_by_slices_and_small_blocks(tmp_path, monkeypatch):
    from agentrl_jax.models import gguf as source

    monkeypatch.setattr(source, 'BLOCK_ELEMENTS', 200)  # three rows of 64 at a time
    quant = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / 'm.gguf', LLAMA, hf_tensors(LLAMA), quant)
    _, whole = weights.load_model(path)
    _, split = weights.load_model(path, mesh=sharding.make_mesh(2, 2, 2))
    jax.tree.map(np.testing.assert_array_equal, whole, split)
    monkeypatch.undo()
    _, plain = weights.load_model(path)
    jax.tree.map(np.testing.assert_array_equal, whole, plain)


@pytest.mark.parametrize('config', [TINY, LLAMA], ids=['qwen2', 'llama'])
def test_transformers_reads_the_same_gguf_file_to_the_same_logits(tmp_path, config):
    torch = pytest.importorskip('torch')
    pytest.importorskip('accelerate')  # transformers wants it for GGUF
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
    hidden = qwen2.forward(params, config, tokens, positions, jnp.ones((2, 9), bool))
    np.testing.assert_allclose(qwen2.logits(params, config, hidden), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize('share', [0.0, 0.0001, 0.005, 0.5, 0.999])
def test_a_half_written_gguf_file_is_named(tmp_path, share):
    quant = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / 'm.gguf', TINY, hf_tensors(TINY), quant)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(ValueError, match='m.gguf: damaged, half-written or not a GGUF file'):
        weights.load_model(path)


@pytest.mark.parametrize(
    ('tensors', 'fields', 'message'),
    [
        (without(DOWN), {}, f'tensors missing: {DOWN}'),
        (without('model.embed_tokens.weight'), {}, 'token_embd.weight missing'),
        (hf_tensors(TINY), {'ARCH__rope__scaling__type': 'yarn'}, 'rope scaling'),
        (hf_tensors(TINY), {'ARCH__expert_count': 4}, 'mixtures of experts'),
        (hf_tensors(TINY), {'split__count': 2}, 'split files'),
        (hf_tensors(TINY), {'ARCH__rope__dimension_count': 8}, 'part of a head'),
    ],
)
def test_a_gguf_file_that_does_not_fit_is_refused_by_name(tmp_path, tensors, fields, message):
    quant = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / 'm.gguf', TINY, tensors, quant, **fields)
    with pytest.raises(ValueError, match=message) as error:
        weights.load_model(path)
    assert 'm.gguf' in str(error.value)


def test_gguf_files_of_other_kinds_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / 'a.gguf', 'gemma3')
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'gemma3' is not supported"):
        weights.load_model(tmp_path / 'a.gguf')
    (tmp_path / 'b.gguf').write_bytes(b'PK\x03\x04 something else entirely, long enough')
    with pytest.raises(ValueError, match='not a GGUF file'):
        weights.load_model(tmp_path / 'b.gguf')


def write_gguf_tokenizer(path):
    """A GGUF file with a byte-level tokenizer of one merge and three specials; no weights."""
    specials = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    tokens = [*gpt2_byte_characters(), 'up', *specials]
    writer = gguf.GGUFWriter(path, 'qwen2')
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('qwen2')
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
    writer.add_token_merges(['u p'])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 3)
    writer.add_chat_template('{{ messages }}')
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_an_export_of_a_gguf_file_carries_its_tokenizer(tmp_path):
    _, params = weights.load_model(write_folder(tmp_path / 'in', TINY, hf_tensors(TINY)))
    source = write_gguf_tokenizer(tmp_path / 'm.gguf')
    out = export.export_hf(params, TINY, tmp_path / 'out', tokenizer_source=source)
    before, after = load_tokenizer(source), load_tokenizer(out)
    text = 'up, down <|im_end|> or up\n\u221a'
    assert before.encode(text) == after.encode(text)
    assert len(before.encode('up')) == 1
    for name in ('vocab_size', 'pad_id', 'eos_ids', 'chat_template'):
        assert getattr(before, name) == getattr(after, name)


REAL = os.environ.get('AGENTRL_REAL_GGUF', '')
PROMPT = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        '
    'return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nprint([fibonacci(i) for i in '
    'range(10)])'
)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason='AGENTRL_REAL_GGUF names no file')
def test_real_weights_give_the_log_probabilities_of_transformers():
    torch = pytest.importorskip('torch')
    pytest.importorskip('accelerate')  # transformers wants it for GGUF
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
    hidden = jax.jit(qwen2.forward, static_argnums=1)(
        params, config, tokens, positions, jnp.ones(tokens.shape, bool)
    )
    ours = jax.nn.log_softmax(qwen2.logits(params, config, hidden))[0, :-1]
    taken = tokens[0, 1:, None]
    gap = np.abs(np.take_along_axis(np.asarray(ours) - theirs, taken, axis=1)).max()
    everywhere = np.abs(np.asarray(ours) - theirs).max()
    mean = np.take_along_axis(theirs, taken, axis=1).mean()
    print(f'\n{taken.size} tokens, mean log p {mean:.3f}, gap {gap:.2e}, all {everywhere:.2e}')
    assert gap < 1e-3 and mean > -3.0
