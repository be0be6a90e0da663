"""README.md of an exported folder: what it is, how it is loaded, what it scored, its config."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_jax.records import run_log
from agentrl_jax.records.about import of_run

METRICS = (  # besides eval/...
    'rollout/success',
    'rollout/return',
    'rollout/valid_format',
    'policy/entropy',
    'policy/kl_ref',
)
LOAD = """\
The model needs torch beside transformers: `pip install "torch>=2.6" transformers`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained('{folder}')
model = AutoModelForCausalLM.from_pretrained('{folder}')
messages = [{{'role': 'system', 'content': '...'}}, {{'role': 'user', 'content': '...'}}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
inputs = tokenizer(text + '{opening}', return_tensors='pt', add_special_tokens=False)
print(tokenizer.decode(model.generate(**inputs)[0]))
```

Every answer of the run began with `{opening}`, which the program wrote; greedy decoding is the
default, and `do_sample=True, temperature={temperature}, top_k=0` draws as training did.
"""
GRAMMAR = """
## Sample it under its grammar

In training only tokens were sampled that can still become an answer of this regular expression
(`rollout.constrain={spelling}`), after the opening. Without it the policy may write anything:

```text
{pattern}
```

A server that constrains its sampling takes it as it is, vLLM as
`extra_body={{'structured_outputs': {{'regex': ...}}}}` of a request.
"""
ADAPTER = """\
The adapters need torch beside PEFT: `pip install "torch>=2.6" transformers peft`.

```python
from peft import PeftModel

# base: the model named in adapter_config.json, or if it names none what --part=base exports
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
    """The card.

    origin: saved_config.Origin.fields(); record: the folder of the run; opening: what is forced in
    front of answers; pattern: a regular expression of what was legal, '' = everything.
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
        facts['reward'] = f"`{cfg.reward.function}`, a function of the run's own"
    rows = ''.join(f'| {key} | {value} |\n' for key, value in facts.items())
    load = ADAPTER if part == 'adapter' else LOAD
    load = load.format(folder=name, opening=opening, temperature=cfg.rollout.temperature)
    if pattern:
        load += GRAMMAR.format(spelling=cfg.rollout.constrain, pattern=pattern)
    # What adapters were trained on is not what the run measured
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
    """The newest value, up to a step, of the metrics that a card shows: (value, its step)."""
    found = {}
    for row in run_log.read_metrics(path):
        if row['step'] > step:
            continue
        for name, value in row.items():
            if (name.startswith('eval/') or name in METRICS) and not math.isnan(value):
                found[name] = (value, row['step'])
    return found
