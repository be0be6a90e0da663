"""Provenance of a run's figures: method, model, config, commit and machine."""

import functools
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.machine import files
from agentrl_jax.records.method import method
from agentrl_jax.settings import tree

PACKAGE = Path(__file__).resolve().parents[1]
COMMIT_DIGITS = 12


def of_run(config: Mapping[str, Any], argv: Sequence[str] = ()) -> dict[str, str]:
    """Facts about a run for the header of a page: label -> text.

    config: the resolved config, a ConfigDict or a dict from config.json; argv: the command line,
    which names the config file.
    """
    sizes, lora = config['model'], config['lora']['rank']
    model = Path(sizes['path']).name
    if not model:
        model = f'{sizes["num_layers"]} layers of {sizes["hidden_size"]}, from random weights'
    facts = {
        'method': method(tree.flat(config)),
        'model': model + (f', LoRA rank {lora}' if lora else ''),
        'config': config_name(argv),
        'reward': config['reward']['function'],
        'seed': str(config['seed']),
        'commit': short(commit()),
    }
    return {label: text for label, text in facts.items() if text}


def title(config: Mapping[str, Any]) -> str:
    """'StarPO-S on frozen_lake'."""
    return f'{method(tree.flat(config))} on {config["env"]["name"]}'


def config_name(argv: Sequence[str]) -> str:
    """The config file of a command line with its parent folder only; '' without a config."""
    words = [*argv, '']
    for word, after in zip(words, words[1:], strict=False):
        flag, equals, value = word.partition('=')
        if re.fullmatch('--?config', flag):
            return '/'.join(Path(value if equals else after).parts[-2:]).lstrip('/')
    return ''


@functools.cache
def commit(folder: Path = PACKAGE) -> str | None:
    """The commit of the checkout that contains a folder of code; None outside of a checkout.

    The suffix '-modified' means that tracked files differ from that commit. Cached, because the
    checkout may change during a run.
    """

    def git(*arguments):
        command = ['git', '-C', str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may be inside another project's checkout that does not track it.
        if not git('ls-files', '--', '.'):
            return None
        changed = git('status', '--porcelain', '--untracked-files=no')
        return git('rev-parse', 'HEAD') + ('-modified' if changed else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def short(commit: str | None) -> str:
    """Shorten a commit but keep '-modified'; '' outside of a checkout."""
    digits, dash, rest = (commit or '').partition('-')
    return digits[:COMMIT_DIGITS] + dash + rest


def machine() -> str:
    """The hardware that seconds depend on: '8 x NVIDIA H100', '1 x cpu (EPYC 7B13, 2 cores)'."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == 'cpu':
        path = Path('/proc/cpuinfo')
        text = path.read_text(encoding='utf-8', errors='replace') if path.is_file() else ''
        model = re.search(r'^model name\s*:\s*(.+)$', text, flags=re.MULTILINE)
        processor = ' '.join(model[1].split()) if model else platform.machine()
        kind = f'cpu ({processor}, {os.cpu_count()} cores)'
    return f'{len(devices)} x {kind}'


def joined(config_file: Path, new: str) -> str:
    """Append `new` to the machines of earlier starts: 'a; b' if the run has moved."""
    try:
        old = files.read_json(config_file) if config_file.exists() else {}
    except ValueError:  # damaged by a crash of the machine; the caller writes it again
        old = {}
    noted = old.get('machine') if isinstance(old, dict) else None
    parts = noted.split('; ') if isinstance(noted, str) and noted else []
    return '; '.join(dict.fromkeys([*parts, new]))
