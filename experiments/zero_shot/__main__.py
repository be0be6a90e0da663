"""Zero-shot success of pretrained models by environment, prompt and set of allowed tokens.

  python -m experiments.zero_shot --model=SmolLM2-135M-Instruct --levels=64 [--only=library]

Each cell plays held-out levels once at temperature 1: free allows any token; own allows the tokens
of a legal answer in the tokenizer's own spelling (rollout.constrain). The baselines are random
play, which draws action names, and the uniform policy over legal tokens. Results are appended to
experiments/zero_shot/results.jsonl, and `--show` prints them.
"""

import argparse
import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.measure.stats import wilson_interval
from agentrl_jax.models import DRAWN
from agentrl_jax.records import report
from agentrl_jax.run import loading, parts
from agentrl_jax.run.config import read
from agentrl_jax.run.streams import every_level
from agentrl_jax.tokens.load import load_tokenizer
from configs import smollm2_frozen_lake, smollm2_library

RESULTS = pathlib.Path(__file__).parent / 'results.jsonl'
PROMPTS = ('plain', 'brief', 'ragen', 'tools')
LONGEST = {'plain': 256, 'brief': 256}  # tokens of an episode; other prompts are longer
KEY = ('model', 'answers', 'levels', 'world', 'prompt')  # of a cell; its last record counts
UNIFORM = 'uniform'  # no model: all legal tokens are equally probable


WORLDS = {  # base config and its changes
    'frozen_lake': (smollm2_frozen_lake, {}),
    'library': (smollm2_library, {}),
    'bandit': (smollm2_library, {'env.max_turns': 1, 'env.max_actions_per_episode': 1}),
    'sokoban': (smollm2_frozen_lake, {'env.max_turns': 3, 'env.max_actions_per_episode': 10}),
}


def config(world, prompt, constrain, model, levels):
    """Return the ConfigDict of a cell."""
    base, changes = WORLDS[world]
    cfg = base.get_config()
    cfg.update_from_flattened_dict(changes)
    cfg.model.path = '' if model == UNIFORM else model
    cfg.env.name, cfg.env.prompt, cfg.env.think = world, prompt, False
    cfg.env.eval_levels, cfg.env.train_levels = levels, 64
    cfg.rollout.constrain = '' if constrain == 'free' else constrain
    cfg.rollout.max_response = 16
    cfg.rollout.max_tokens = LONGEST.get(prompt, 1024)
    cfg.clone.episodes = 0
    cfg.loss.kl_coef = 0.0
    return cfg


def name_of(model):
    """Return the name of a folder or .gguf; it may contain dots, as in Qwen2.5-0.5B-Instruct."""
    return pathlib.Path(model).name.removesuffix('.gguf')


@functools.cache
def loaded(path):
    cfg = smollm2_library.get_config()
    cfg.model.path = path
    tokenizer = load_tokenizer(path)
    return tokenizer, loading.build_model(read(cfg, None), tokenizer, mesh())


def uniform(tokenizer):
    """Return (sizes, parameters) of a model with equal probability for all tokens."""
    sizes = DRAWN(
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )
    return sizes, jax.tree.map(jnp.zeros_like, sizes.init(jax.random.key(0)))


@functools.cache
def mesh():
    return parts.build_mesh(read(smollm2_library.get_config(), None), jax.devices()[:1])


def play(path, model, world, prompt, constrain, levels):
    """Play a cell and return its record; path: the checkpoint with the tokenizer."""
    tokenizer, checkpoint = loaded(path)
    config_dict = config(world, prompt, constrain, model, levels)
    cfg = read(config_dict, None)
    task = parts.build_text_task(cfg, tokenizer, 'validation', mesh())
    sizes, params = uniform(tokenizer) if model == UNIFORM else checkpoint
    start = time.time()
    collect = parts.build_collect(cfg, sizes, mesh(), training=False)
    episodes = every_level(levels, task.env.num_levels(task.env_params), 1, 1)
    out, _ = jax.device_get(collect(params, task, episodes, jax.random.key(cfg.seed)))
    solved = int(out.success.sum())
    is_turn = np.arange(out.valid.shape[1])[None] < out.num_turns[:, None]
    low, high = wilson_interval(solved, levels)
    return {
        'model': name_of(model),
        'world': world,
        'prompt': prompt,
        'answers': constrain,
        'levels': levels,
        'success': solved / levels,
        'low': float(low),
        'high': float(high),
        'valid': float(out.valid[is_turn].mean()),
        'random': report.reference(task)['random'],
        'seconds': round(time.time() - start, 1),
        'says': [tokenizer.decode(out.tokens[b][out.action_mask[b]]) for b in range(2)],
    }


def table(records):
    """Return Markdown: a row per model and kind of answers, a column per world and prompt.

    Results on different numbers of levels have separate rows, labelled with the number.
    """
    last = {tuple(x[name] for name in KEY): x for x in records}
    rows, columns = sorted({key[:3] for key in last}), sorted({key[3:] for key in last})
    pairs = [row[:2] for row in rows]
    lines = ['| model | answers | ' + ' | '.join(f'{w}, {p}' for w, p in columns) + ' |']
    lines += ['| --- ' * (2 + len(columns)) + '|']
    for row in rows:
        cells = [last.get((*row, *column)) for column in columns]
        texts = [
            ''
            if x is None
            else f'{100 * x["success"]:.1f} [{100 * x["low"]:.1f}, {100 * x["high"]:.1f}]'
            f' (valid {100 * x["valid"]:.0f})'
            for x in cells
        ]
        model, answers, levels = row
        model += f', {levels} levels' * (pairs.count(row[:2]) > 1)
        lines.append('| ' + ' | '.join([model, answers, *texts]) + ' |')
    by_column = {key[3:]: x['random'] for key, x in last.items()}
    random = [f'{100 * by_column[column]:.1f}' for column in columns]
    lines.append('| random play | names | ' + ' | '.join(random) + ' |')
    return '\n'.join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='', help='folder or .gguf')
    parser.add_argument('--levels', type=int, default=64)
    parser.add_argument('--only', default='', help='an environment')
    parser.add_argument('--prompts', default=','.join(PROMPTS))
    parser.add_argument('--answers', default=f'free,own,{UNIFORM}')
    parser.add_argument('--show', action='store_true', help='print the committed results')
    args = parser.parse_args()
    if args.model:
        RESULTS.parent.mkdir(exist_ok=True)
        for world in [args.only] if args.only else WORLDS:
            for prompt in args.prompts.split(','):
                for kind in args.answers.split(','):
                    model = UNIFORM if kind == UNIFORM else args.model
                    spelled = 'own' if kind == UNIFORM else kind
                    record = play(args.model, model, world, prompt, spelled, args.levels)
                    with open(RESULTS, 'a') as f:
                        print(json.dumps(record), file=f)
                    print(json.dumps(record), file=sys.stderr, flush=True)
    if args.show:
        print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == '__main__':
    main()
