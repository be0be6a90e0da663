"""HuggingFace folders: exact loading, exact export, and errors that name the file."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen_vocabulary
from safetensors.numpy import load_file, save_file
from tiny_models import (
    FAMILIES,
    LLAMA,
    TINY,
    UNTIED,
    by_hf_name,
    hf_tensors,
    with_adapters,
    write_folder,
)

from agentrl_jax import export
from agentrl_jax.machine import sharding
from agentrl_jax.models import lora, weights
from agentrl_jax.models.hf_config import config_from_hf, config_to_hf
from agentrl_jax.tokens.chat import CHATML


@pytest.mark.parametrize('config', [UNTIED, *FAMILIES.values()], ids=['untied', *FAMILIES])
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


def test_both_spellings_of_rope_in_config_json():
    nested = {'rope_theta': None, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6}}
    hf = config_to_hf(LLAMA, dtype='float32')
    assert config_from_hf(hf | nested) == LLAMA
    scaled = dataclasses.replace(LLAMA, rope_scaling=(8.0, 1.0, 4.0, 32.0))
    assert config_from_hf(hf | {'rope_scaling': ROPE}) == scaled
    assert config_from_hf(config_to_hf(scaled, dtype='float32')) == scaled


def test_null_and_absent_config_fields_are_read_as_in_transformers(tmp_path):
    """A null quantization_config was read as quantised weights."""
    folder = write_folder(tmp_path / 'm', TINY, hf_tensors(TINY), quantization_config=None)
    assert weights.load_model(folder)[0] == TINY
    hf = config_to_hf(LLAMA, dtype='float32') | {'rope_theta': None}
    for rope in (None, {'rope_type': None, 'rope_theta': None}, {'type': 'default'}):
        assert config_from_hf(hf | {'rope_scaling': rope}).rope_theta == 10_000


def test_a_single_file_takes_precedence_over_a_stale_index(tmp_path):
    """save_pretrained does not delete the index and the shards of an earlier model."""
    old, new = hf_tensors(TINY), hf_tensors(TINY, seed=1)
    folder = write_folder(tmp_path / 'm', TINY, old, 3)
    save_file(new, folder / weights.SINGLE)
    for stale in (None, 'part1.safetensors'):
        if stale:
            (folder / stale).unlink()
        loaded = by_hf_name(weights.load_model(folder)[1])
        for name, array in new.items():
            np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def adapter_folder(tmp_path, base, **changes):
    """Return (folder of a random adapter on an UNTIED base, tensors of the merged model)."""
    params = with_adapters(UNTIED)
    export.export_hf(params, UNTIED, tmp_path / 'base', dtype='float32')
    targets = lora.TARGETS
    folder = export.export_adapter(
        params['lora'], tmp_path / 'adapter', rank=3, alpha=5.0, targets=targets, base=str(base)
    )
    settings = json.loads((folder / 'adapter_config.json').read_text()) | changes
    (folder / 'adapter_config.json').write_text(json.dumps(settings))
    scale = 5 / 3**0.5 if changes.get('use_rslora') else 5 / 3
    return folder, by_hf_name(lora.merge(params, scale))


@pytest.mark.parametrize(('rooted', 'shape'), [(False, None), (True, (2, 2, 2))])
def test_an_adapter_folder_loads_as_its_base_with_the_adapter_merged(tmp_path, rooted, shape):
    folder, merged = adapter_folder(tmp_path, tmp_path / 'base', use_rslora=rooted)
    mesh = None if shape is None else sharding.make_mesh(*shape)
    config, params = weights.load_model(folder, mesh=mesh)
    assert config == UNTIED
    for name, array in by_hf_name(params).items():
        np.testing.assert_allclose(array, merged[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    'changes',
    [
        {'base_model_name_or_path': 'Qwen/Qwen3-0.6B'},
        {'base_model_name_or_path': None},
        {'peft_type': 'IA3'},
        {'alpha_pattern': {'q_proj': 2}},
        {'lora_alpha': None},
    ],
)
def test_an_adapter_that_cannot_be_merged_is_rejected(tmp_path, changes):
    folder, _ = adapter_folder(tmp_path, tmp_path / 'base', **changes)
    with pytest.raises(ValueError, match='|'.join([*changes, 'base model', 'local'])) as error:
        weights.load_model(folder)
    assert str(folder) in str(error.value)


def test_each_device_gets_its_slice_and_only_slices_are_read(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / 'm', UNTIED, hf_tensors(UNTIED))
    _, full = weights.load_model(folder)
    reads, read = [], weights.SafetensorsSource.read

    def counted(self, name, index):
        part = read(self, name, index)
        reads.append((name, part.size))
        return part

    monkeypatch.setattr(weights.SafetensorsSource, 'read', counted)
    _, split = weights.load_model(folder, mesh=sharding.make_mesh(2, 2, 2))
    jax.tree.map(np.testing.assert_array_equal, full, split)
    up = split['model']['layers_1']['mlp']['up_proj']['kernel']  # [64, 96] over fsdp x tensor
    assert up.addressable_shards[0].data.shape == (32, 48)
    sizes = [size for name, size in reads if name == 'model.layers.1.mlp.up_proj.weight']
    assert sizes == [96 * 64 // 4] * 4  # four different slices, each once for its two devices


@pytest.mark.parametrize(
    ('dtype', 'shard_bytes'), [('bfloat16', 30_000), ('float16', 10**9), ('float32', 10**9)]
)
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


@pytest.mark.soak
@pytest.mark.slow('loads transformers')
def test_an_export_keeps_tokenizer_files_and_unknown_config_fields(tmp_path):
    """A base model ends documents with <|endoftext|>; turns of a trained policy end differently."""
    extra = {'max_position_embeddings': 777, 'eos_token_id': 5, 'dtype': 'float32'}
    folder = write_folder(tmp_path / 'in', TINY, hf_tensors(TINY), **extra)
    qwen = qwen_vocabulary.qwen_tokenizer()
    (folder / 'tokenizer.json').write_text(qwen.to_json())
    settings = {'eos_token': '<|endoftext|>', 'tokenizer_class': 'Qwen2Tokenizer', 'note': 'kept'}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    (folder / 'generation_config.json').write_text('{"eos_token_id": 5, "temperature": 0.7}')
    (folder / 'notes.txt').write_text('not ours')
    config, params = weights.load_model(folder)
    out = export.export_hf(
        params, config, tmp_path / 'out', tokenizer_source=folder, model_source=folder
    )
    assert (out / 'tokenizer.json').read_bytes() == (folder / 'tokenizer.json').read_bytes()
    assert not (out / 'notes.txt').exists()
    hf = json.loads((out / 'config.json').read_text())
    end, over = qwen.special('<|im_end|>'), qwen.special('<|endoftext|>')
    assert (hf['max_position_embeddings'], hf['eos_token_id']) == (777, end)
    assert hf['torch_dtype'] == 'bfloat16' and 'dtype' not in hf and hf['model_type'] == 'qwen2'
    generation = json.loads((out / 'generation_config.json').read_text())
    assert generation['eos_token_id'] == [end, 5, over] and 'temperature' not in generation
    settings = json.loads((out / 'tokenizer_config.json').read_text())
    assert (settings['eos_token'], settings['note']) == ('<|im_end|>', 'kept')
    assert settings['chat_template'] == CHATML


def test_an_export_is_complete_or_absent(tmp_path, monkeypatch):
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
ROPE = dict(rope_type='llama3', factor=8, low_freq_factor=1, high_freq_factor=4)
ROPE |= {'original_max_position_embeddings': 32}


def changed(field, value, named='', **others):
    return {'changes': {field: value, **others}}, named or field


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        ({'tensors': without(DOWN)}, DOWN),
        ({'tensors': hf_tensors(TINY) | {DOWN: np.zeros((64, 95), np.float32)}}, DOWN),
        ({'tensors': hf_tensors(TINY) | {DOWN: np.zeros((64, 96), np.int8)}}, DOWN),
        ({'tensors': hf_tensors(UNTIED)}, 'lm_head.weight'),
        changed('num_hidden_layers', 1, 'model.layers.1.input_layer'),
        changed('num_hidden_layers', 3, 'model.layers.2'),
        changed('num_hidden_layers', 4000, '4000 layers'),
        changed('num_hidden_layers', 10**6),
        changed('tie_word_embeddings', False, 'lm_head.weight'),
        changed('tie_word_embeddings', 'false'),
        changed('quantization_config', {'bits': 4}, 'quantised'),
        *(changed('hidden_size', value) for value in ('64', True, 10**300, None)),
        changed('num_attention_heads', 0),
        changed('num_key_value_heads', 3, 'num_kv_heads'),
        changed('head_dim', 15),
        changed('rope_theta', float('nan')),
        changed('rms_norm_eps', 0),
        changed('rope_scaling', 5),
        changed('rope_scaling', {'type': 'yarn', 'factor': 4.0}, 'yarn'),
        changed('rope_scaling', {'rope_type': 'llama3', 'factor': 8.0}, 'low_freq_factor'),
        changed('rope_scaling', ROPE | {'low_freq_factor': 4}, 'low_freq_factor'),
        changed('model_type', 'gemma3'),
        changed('model_type', {'a': '\n'}),
        changed('model_type', 'llama', 'mlp_bias', mlp_bias=True),
        changed('model_type', 'qwen3', 'attention_bias', attention_bias=True),
        changed('model_type', 'olmo2', 'attention_bias', attention_bias=True),
        changed('model_type', 'qwen3', 'head_dim', head_dim=None),
        changed('use_sliding_window', True),
        changed('hidden_act', 'gelu'),
    ],
)
def test_models_that_cannot_be_run_are_rejected(tmp_path, settings, named):
    """Some raised tracebacks; 0 gave a model of nan, and a million layers never finished."""
    folder = broken_folder(tmp_path / 'm', **settings)
    with pytest.raises(ValueError, match=named) as error:
        weights.load_model(folder)
    assert str(folder) in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('name', [5, None, ['part0.safetensors'], '../m/part0.safetensors'])
def test_a_weight_map_that_names_no_file_is_rejected(tmp_path, name):
    folder = broken_folder(tmp_path / 'm', files=2)
    (folder / weights.INDEX).write_text(json.dumps({'weight_map': {'a': name}}))
    with pytest.raises(ValueError, match='weight_map'):
        weights.load_model(folder)


def test_a_folder_with_a_non_finite_number_is_rejected(tmp_path):
    tensors = hf_tensors(TINY)
    tensors[DOWN][3, 5] = np.inf
    folder = broken_folder(tmp_path / 'm', tensors=tensors)
    with pytest.raises(ValueError, match=DOWN):
        weights.load_model(folder)


@pytest.mark.parametrize('row', [None, 41, 95])
def test_the_redundant_head_of_a_tied_model_is_ignored(tmp_path, monkeypatch, row):
    """Qwen3-0.6B and 1.7B have one. They were rejected, with advice that would untie them."""
    monkeypatch.setattr(weights, 'COMPARED_ROWS', 40)  # of 96
    tensors = hf_tensors(TINY)
    head = tensors['model.embed_tokens.weight'].copy()
    if row is not None:
        head[row, 3] += 1e-3
    folder = broken_folder(tmp_path / 'm', tensors=tensors | {'lm_head.weight': head})
    if row is not None:
        with pytest.raises(ValueError, match='ties.*there is a different tensor lm_head.weight'):
            weights.load_model(folder)
        return
    config, params = weights.load_model(folder)
    assert config == TINY
    np.testing.assert_array_equal(
        by_hf_name(params)['model.embed_tokens.weight'], tensors['model.embed_tokens.weight']
    )


@pytest.mark.parametrize('removed', ['part1.safetensors', weights.INDEX, 'config.json'], ids=str)
def test_errors_name_missing_files(tmp_path, removed):
    folder = broken_folder(tmp_path / 'm', files=2)
    (folder / removed).unlink()
    named = weights.SINGLE if removed == weights.INDEX else removed
    for path, name in ((folder, named), (tmp_path / 'x', 'x'), (tmp_path / 'x.gguf', 'x.gguf')):
        with pytest.raises(FileNotFoundError, match=name):
            weights.load_model(path)


@pytest.mark.parametrize('file', ['config.json', 'model.safetensors'])
def test_errors_name_damaged_files(tmp_path, file):
    path = broken_folder(tmp_path / 'm') / file
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match=file):
        weights.load_model(path.parent)
