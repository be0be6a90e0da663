"""README.md of an exported folder: facts, how to load it, metrics and config."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_jax.records import run_log
from agentrl_jax.records.about import of_run

METRICS = (  # in addition to eval/...
    'rollout/success',
    'rollout/return',
    'rollout/valid_format',
    'policy/entropy',
    'policy/kl_ref',
)
LOAD = """\
The model needs torch and transformers: `pip install "torch>=2.6" transformers`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained('{folder}')
model = AutoModelForCausalLM.from_pretrained('{folder}')
messages = [{{'role': 'system', 'content': '...'}}, {{'role': 'user', 'content': '...'}}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
inputs = tokenizer(text + '{opening}', return_tensors='pt', add_special_tokens=False)
print(tokenizer.decode(model.generate(**inputs)[0]))
```

In training, every answer started with `{opening}`, inserted by the program. Greedy decoding is the
default; `do_sample=True, temperature={temperature}, top_k=0` samples as in training.
"""
GRAMMAR = """
## Constrain sampling to its grammar

In training, sampling was restricted to tokens that can still form an answer of this regular
expression (`rollout.constrain={spelling}`), after the opening. Otherwise the policy may write
anything:

```text
{pattern}
```

Servers with constrained sampling accept it unchanged; in a request to vLLM, set
`extra_body={{'structured_outputs': {{'regex': ...}}}}`.
"""
ADAPTER = """\
The adapters need torch, transformers and PEFT: `pip install "torch>=2.6" transformers peft`.

```python
from peft import PeftModel

# base: the model named in adapter_config.json; if none is named, the export of --part=base
model = PeftModel.from_pretrained(base, '{folder}')
```
"""


def text(
    name: str,
    cfg: Any,
    *,
    origin: Mapping[str, Any],
    record: Path,
    part: str,
    opening: str,
    pattern: str = '',
) -> str:
    """Return the model card.

    origin: saved_config.CheckpointInfo.fields(); record: folder of the run; opening: text inserted
    before answers; pattern: a regular expression of legal answers, '' = unconstrained.
    """
    noted = record / run_log.CONFIG_FILE
    commit = run_log.read_json(noted).get('commit') if noted.is_file() else ''
    facts = {
        'made by': 'agentrl_jax',
        'trained at commit': commit or 'unknown',
        'exported at commit': origin['commit'] or 'unknown',
        'run': f'`{origin["workdir"]}`, step {origin["step"]} of {cfg.steps}',
        'part': part,
        'config hash': f'`{origin["config_hash"]}`',
        'method': f'{of_run(cfg)["method"]} (`algorithm={cfg.algorithm}`)',
        'environment': f'{cfg.env.name}, prompt {cfg.env.prompt}',
        'started from': f'`{cfg.model.path}`' if cfg.model.path else 'random weights',
    }
    if cfg.reward.function:
        facts['reward'] = f'`{cfg.reward.function}`, a user-defined function'
    rows = ''.join(f'| {key} | {value} |\n' for key, value in facts.items())
    load = ADAPTER if part == 'adapter' else LOAD
    load = load.format(folder=name, opening=opening, temperature=cfg.rollout.temperature)
    if pattern:
        load += GRAMMAR.format(spelling=cfg.rollout.constrain, pattern=pattern)
    # The run did not measure the base model of its adapters.
    metrics = {} if part == 'base' else latest(record / run_log.METRICS_FILE, origin['step'])
    measured = ''.join(
        f'| {key} | {value:.4g} | {step} |\n' for key, (value, step) in sorted(metrics.items())
    )
    table = (
        f'| metric | value | at step |\n| --- | --- | --- |\n{measured}' if measured else 'None.\n'
    )
    config = json.dumps(run_log.redact(cfg), indent=2, sort_keys=True)
    return (
        f'---\nlibrary_name: {"peft" if part == "adapter" else "transformers"}\n'
        f'tags: [agentrl_jax, reinforcement-learning]\n---\n\n# {name}\n\n| | |\n| --- | --- |\n'
        f'{rows}\n## Load\n\n{load}\n## Metrics\n\n{table}'
        f'\n## Config\n\n```json\n{config}\n```\n'
    )


def latest(path: Path, step: int) -> dict[str, tuple[float, int]]:
    """(value, step) of the card's metrics: the newest values up to a step."""
    newest = {}
    for row in run_log.read_metrics(path):
        if row['step'] > step:
            continue
        for name, value in row.items():
            if (name.startswith('eval/') or name in METRICS) and not math.isnan(value):
                newest[name] = (value, row['step'])
    return newest
