"""Export parameters as a HuggingFace folder: config.json, safetensors, tokenizer, model card.

  python -m agentrl_jax.export --workdir=runs/demo --out=demo_policy
  python -m agentrl_jax.export --workdir=runs/demo --out=demo_policy --best --dtype=float32
  python -m agentrl_jax.export --workdir=runs/lora --out=adapters --part=adapter

The config is the run's; --config.field=value overrides it. In `transformers` the folder yields the
run's token ids, renders its chats, and generates (greedily by default) up to <|im_end|>. The models
of transformers need torch (`pip install torch transformers`); this command does not.

A policy trained with LoRA is merged. --part=adapter writes only its adapters in PEFT's format, and
--part=base the frozen base model.

The folder is renamed into place when it is complete. Loading a folder and exporting it in its own
dtype reproduces every tensor byte for byte.
"""

from absl import flags

from agentrl_jax.run import command

if __name__ == '__main__':
    command.define_config_of_run()
    flags.DEFINE_string('workdir', None, 'Folder of the run.')
    flags.DEFINE_string('out', None, 'Folder to write; must not exist.')
    flags.DEFINE_integer('step', None, 'Checkpoint to use; default: the newest.')
    flags.DEFINE_enum(
        'dtype', 'bfloat16', ['bfloat16', 'float16', 'float32'], 'Data type of the tensors.'
    )
    flags.DEFINE_enum(
        'part',
        'policy',
        ['policy', 'adapter', 'base'],
        'Part to write; adapter and base need LoRA.',
    )
    command.define_best()
    command.define_fallback()
    command.begin(__doc__, needs=('workdir', 'out'), says='agentrl_jax.export: loading')

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from agentrl_jax.envs import HOSTS
from agentrl_jax.machine import checkpoint, files, sharding
from agentrl_jax.models import Model, adapters, lora, weights
from agentrl_jax.models.hf_config import config_to_hf
from agentrl_jax.records import model_card
from agentrl_jax.run import loading, parts, saved_config
from agentrl_jax.run.config import Config, read
from agentrl_jax.run.migration import read_saved
from agentrl_jax.run.params import BEST_FOLDER, base_is_in_model_path, chosen, saved_policy
from agentrl_jax.text import forms, grammar
from agentrl_jax.tokens import hf_folder
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params

DTYPES = {name: jnp.dtype(name) for name in ('bfloat16', 'float16', 'float32')}
MAX_SHARD_BYTES = 5 * 10**9
COPIED_FIELDS = ('max_position_embeddings', 'bos_token_id')  # if the source has another model_type


def answer_pattern(cfg: Config) -> str:
    """Return a regular expression of the answers that may be sampled, in any environment of the
    run; '' = any text."""
    if not cfg.rollout.constrain:
        return ''
    patterns = {}
    for world in cfg.worlds:
        if world.name in HOSTS:
            prefix = cfg.hosts.answer_prefix
            rests = [form.removeprefix(prefix) for form in cfg.answer_forms(world)]
            patterns[forms.pattern(rests)] = None
        else:
            limit, opening = cfg.env.max_actions_per_turn, cfg.of_world(world).answer_opening
            names = world.ACTION_NAMES
            patterns[grammar.pattern(names, max_actions=limit, opening=opening)] = None
    return '|'.join(patterns)


def export_hf(
    params: Params,
    config: Model,
    out_dir: str | Path,
    *,
    dtype: str = 'bfloat16',
    tokenizer_source: str | Path | None = None,
    calls: bool = False,
    model_source: str | Path | None = None,
    budget: Mapping[str, int] | None = None,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the policy's parameters to out_dir, which must be empty or not exist yet.

    tokenizer_source: the tokenizer's folder, .gguf or .model; calls: chats may have tools
    (hf_folder.write); model_source: folder or .gguf of the weights, for further fields of
    config.json; budget: the run's max_tokens and max_response; card: text of README.md. dtype
    float32 keeps the master weights exactly. Heads that HuggingFace does not have (value_head) are
    not exported. With several processes, all must call this; the first one writes.
    """
    if dtype not in DTYPES:
        raise ValueError(f'dtype={dtype!r} is not one of {", ".join(DTYPES)}')
    out_dir = _free(out_dir)
    shards = _plan(config, DTYPES[dtype].itemsize, max_shard_bytes)
    if jax.process_index():
        for names in shards:
            for _ in _tensors(params, names, dtype):
                pass
        return out_dir

    def write(folder):
        tokenizer, generic = None, False
        if tokenizer_source is not None:
            tokenizer = hf_folder.write(folder, Path(tokenizer_source), calls=calls)
            of_qwen2 = config.to_hf()['model_type'] == 'qwen2'
            generic = of_qwen2 and not hf_folder.is_qwen2(folder)
        hf = config_to_hf(config, dtype=dtype, generic=generic)
        _write_weights(folder, params, shards, dtype, zero_biases='attention_bias' in hf)
        _write_configs(folder, hf, model_source, tokenizer, budget or {})
        if tokenizer is not None:
            hf_folder.compare(tokenizer, folder)

    return _appear(out_dir, write, card)


def export_adapter(
    adapters: Params,
    out_dir: str | Path,
    *,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    base: str | None,
    dtype: str = 'float32',
    card: str | None = None,
) -> Path:
    """Write params['lora'] in PEFT's format: adapter_config.json, adapter_model.safetensors.

    Format: huggingface.co/docs/peft/developer_guides/checkpoint; A is [rank, in] and B [out, rank]
    there. base: name or folder of the frozen model; None if it is not a HuggingFace folder.
    """
    out_dir = _free(out_dir)
    tree = {'model': adapters}  # the paths of the kernels
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    tensors = dict(_tensors(tree, [sharding.path_name(path) for path, _ in leaves], dtype))
    if jax.process_index():
        return out_dir
    settings = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': rank,
        'lora_alpha': alpha,
        'target_modules': list(targets),
        'lora_dropout': 0.0,
        'bias': 'none',
        'fan_in_fan_out': False,
        'inference_mode': True,
        'modules_to_save': None,
    }

    def write(folder):
        save_file(tensors, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
        _write_json(folder / 'adapter_config.json', settings)

    return _appear(out_dir, write, card)


def _free(out_dir: str | Path) -> Path:
    """Return the absolute path of a folder that may be written."""
    out_dir = files.local_path(out_dir).absolute()
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FileExistsError(f'{out_dir} exists and is not an empty folder; choose another')
    return out_dir


def _appear(out_dir: Path, write: Callable[[Path], None], card: str | None) -> Path:
    """Fill a temporary folder with write(folder) and a card, then rename it to out_dir."""
    temporary = out_dir.with_name(f'.{out_dir.name}.{os.getpid()}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        if card is not None:
            (temporary / 'README.md').write_text(card, encoding='utf-8')
        for path in temporary.iterdir():  # safetensors ignores the umask: its files are private
            path.chmod(temporary.stat().st_mode & 0o666)
        os.replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


def _plan(config: Model, itemsize: int, max_bytes: int) -> list[list[str]]:
    """Return the parameter paths of each file in order, up to max_bytes (or one tensor) each."""
    files, size = [[]], 0
    leaves = jax.tree_util.tree_flatten_with_path(config.abstract_params())[0]
    for where, leaf in leaves:
        need = math.prod(leaf.shape) * itemsize
        if files[-1] and size + need > max_bytes:
            files.append([])
            size = 0
        files[-1].append(sharding.path_name(where))
        size += need
    return files


def _tensors(params: Params, paths: list[str], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (HuggingFace name, tensor in its layout and dtype), gathered from all processes."""
    leaves = traverse_util.flatten_dict(params, sep='/')
    for path in paths:
        leaf = leaves[path]
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        array = np.asarray(leaf).astype(DTYPES[dtype])
        array = array.T if weights.is_transposed(path) else array
        yield weights.hf_name(path), np.ascontiguousarray(array)


def _write_weights(
    folder: Path, params: Params, shards: list[list[str]], dtype: str, *, zero_biases: bool
) -> None:
    weight_map, total = {}, 0
    for i, paths in enumerate(shards):
        name = weights.SINGLE
        if len(shards) > 1:
            name = f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors'
        tensors = dict(_tensors(params, paths, dtype))
        if zero_biases:
            tensors |= {
                f'{name.removesuffix("weight")}bias': np.zeros(array.shape[0], array.dtype)
                for name, array in tensors.items()
                if name.endswith('self_attn.o_proj.weight')
            }
        save_file(tensors, folder / name, metadata={'format': 'pt'})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(array.nbytes for array in tensors.values())
    if len(shards) > 1:
        index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
        _write_json(folder / weights.INDEX, index)


def _write_configs(
    folder: Path,
    hf: dict[str, Any],
    source: str | Path | None,
    tokenizer: Tokenizer | None,
    budget: Mapping[str, int],
) -> None:
    """Write config.json and, with a tokenizer, generation_config.json."""
    known = {} if source is None else weights.open_source(source).hf_fields
    if known.get('model_type') != hf['model_type']:
        known = {name: known[name] for name in COPIED_FIELDS if name in known}
    # dtype and rope_parameters are newer names of fields that are written under their older names
    hf = {k: v for k, v in known.items() if k not in ('dtype', 'rope_parameters')} | hf
    if 'max_tokens' in budget:
        hf.setdefault('max_position_embeddings', budget['max_tokens'])
    if tokenizer is not None:
        bos = hf['bos_token_id'] if 'bos_token_id' in hf else None  # override the class's default
        hf |= {'bos_token_id': bos, 'eos_token_id': tokenizer.eos_ids[0]}
        hf['pad_token_id'] = tokenizer.pad_id
        # Nothing from the source: its penalties and cut-offs belong to another policy
        generation = {'bos_token_id': bos, 'eos_token_id': list(tokenizer.eos_ids)}
        generation |= {'pad_token_id': tokenizer.pad_id, 'do_sample': False}
        if 'max_response' in budget:
            generation['max_new_tokens'] = budget['max_response']
        _write_json(folder / 'generation_config.json', generation)
    _write_json(folder / 'config.json', hf)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')


def base_is_folder(cfg: Config) -> bool:
    """Return whether model.path is the model under the adapters and PEFT can read it."""
    path = files.local_path(cfg.model.path)
    return base_is_in_model_path(cfg) and path.is_dir() and not adapters.is_adapter(path)


def export_checkpoint(
    given: Any, workdir: str, out: str, *, step: int | None, dtype: str, part: str = 'policy'
) -> Path:
    """Export a part of a checkpoint (step None: the newest) as a folder."""
    cfg = read(given, None)
    if part != 'policy' and not cfg.lora.rank:
        raise ValueError(f'--part={part} needs a run with LoRA, but lora.rank is 0 in this config')
    origin = saved_config.origin(workdir, given, step=step)
    saved_config.say(origin)
    step = origin.step
    extra = checkpoint.read_extra(workdir, step=step)
    saved_config.check_model(extra, given)
    mesh, tokenizer = parts.build_mesh(cfg), loading.build_tokenizer(cfg)
    config, params = loading.build_model(cfg, tokenizer, mesh)
    params = saved_policy(cfg, config, mesh, params, workdir, step=step)
    weights.check_finite(params, f'step {step} of {workdir}')
    record = files.local_path(workdir)
    card = model_card.text(
        Path(out).name,
        given,
        origin=origin.fields(),
        record=record.parent if record.name == BEST_FOLDER else record,
        part=part,
        opening=cfg.answer_opening,
        pattern=answer_pattern(cfg),
    )
    if part == 'adapter':
        return export_adapter(
            params['lora'],
            out,
            rank=cfg.lora.rank,
            alpha=cfg.lora.alpha,
            dtype=dtype,
            targets=lora.target_names(cfg.lora.targets),
            base=cfg.model.path if base_is_folder(read_saved(extra)) else None,
            card=card,
        )
    if part == 'policy':
        params = lora.merge(params, config.lora_scale)
    return export_hf(
        params,
        config,
        out,
        dtype=dtype,
        tokenizer_source=loading.tokenizer_source(cfg),
        calls=any(getattr(world, 'chats', False) for world in cfg.worlds),
        model_source=loading.checkpoint_source(cfg),
        budget={'max_tokens': cfg.rollout.max_tokens, 'max_response': cfg.rollout.max_response},
        card=card,
    )


def main() -> None:
    args = flags.FLAGS
    with command.running(Path(args.out).parent):
        workdir, step = chosen(args)
        folder = export_checkpoint(
            args.config, workdir, args.out, step=step, dtype=args.dtype, part=args.part
        )
    print(folder)


if __name__ == '__main__':
    main()
