"""Cloned policies that are kept: the arms of an experiment start from one clone of each seed."""

import copy
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.imitation.clone import LIMITS
from agentrl_jax.machine import checkpoint, files, frozen
from agentrl_jax.text.prompts import STYLES
from agentrl_jax.types import Params

# What cloning does not read. A field that is missing here costs a clone; one too many, the truth.
UNREAD = {  # section: its fields; of the whole config: sections and fields
    '': ('algorithm', 'steps', 'filter', 'loss', 'turn_credit', 'parity', 'critic')
    + ('curriculum', 'evol', 'dpo', 'opd', 'fork', 'eval', 'checkpoint', 'alarm', 'log'),
    'optim': ('lr', 'critic_lr', 'warmup_steps', 'schedule', 'schedule_steps', 'final_lr')
    + ('weight_decay', 'max_grad_norm'),
    'batch': ('minibatch_rows', 'microbatch_rows', 'epochs', 'shuffle'),
    'rollout': ('num_groups', 'group_size', 'slots', 'temperature', 'serve_rows') + ('constrain',),
    'clone': ('keep_in',),
    'library': ('tool_reward', 'presence_reward', 'answer_reward', 'lookup_cost', 'graded'),
}


def key(config: dict[str, Any]) -> str:
    """Name of the clone of a config (as JSON): equal for two that clone alike on these devices."""
    read = copy.deepcopy(config)
    for section, fields in UNREAD.items():
        if section == 'library' and tells_rewards(config):
            continue
        for field in fields:
            del (read[section] if section else read)[field]
    if not read['clone']['adapters']:
        del read['lora']
    for field, section in LIMITS.items():
        read[section][field] = read['clone'].pop(field) or read[section][field]
    file, devices = config['clone']['file'], jax.devices()
    read['with'] = [jax.__version__, devices[0].device_kind, len(devices)]
    read['weights'] = weights_of(config['model']['path'])
    read['file'] = hashlib.sha256(files.local_path(file).read_bytes()).hexdigest() if file else ''
    return files.config_hash(read)[:16]


def weights_of(path: str) -> Any:
    """What tells the weights at a path from those that were there before, without reading them.

    Of a run, which may go on, the checksums of its newest checkpoint; else names, sizes and times.
    """
    if not path:
        return ''
    place = files.local_path(path)
    if checkpoint.steps(place) or checkpoint.steps(place / checkpoint.FOLDER):
        step = checkpoint.find_step(place)
        listed = step / checkpoint.CONTENTS
        of = hashlib.sha256(listed.read_bytes()).hexdigest() if listed.exists() else ''
        return [step.name, of]
    found = [place] if place.is_file() else sorted(p for p in place.glob('*') if p.is_file())
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in found]


def tells_rewards(config: dict[str, Any]) -> bool:
    """Whether prompts say what was earned, which a clone then reads."""
    style = config['env']['prompt']
    return style not in STYLES or STYLES[style].rewards_shown()


def kept(
    config: dict[str, Any], workdir: Path, abstract: Params, make: Callable[[], Params]
) -> Params:
    """The clone of a config: read from clone.keep_in below the workdir, or made and put there.

    keep_in may also be an absolute path or gs://bucket/folder. Without it the clone is made. Of two
    runs that make the same clone at once one keeps it.
    """
    if not config['clone']['keep_in']:
        return make()
    if jax.process_count() > 1:
        raise ValueError('clone.keep_in is for runs of one process: unset it')
    folder = Path(workdir) / files.local_path(config['clone']['keep_in']) / key(config)
    if folder.exists():
        return frozen.load(folder, abstract)
    params = make()
    own = folder.with_name(f'{folder.name}.{os.getpid()}')
    frozen.keep(own, params)
    try:
        os.replace(own, folder)
    except OSError:  # another run was first
        if not folder.exists():
            raise
        shutil.rmtree(own)
    return params
