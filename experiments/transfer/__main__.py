"""How well does a policy transfer to other rules, sizes, environments and numbers of turns?

  python -m experiments.transfer train --scale=tiny --seeds=3
  python -m experiments.transfer --runs=runs/thinking/tiny --seeds=3
  python -m experiments.transfer --runs=runs/transfer/tiny --seeds=3

The policies `act` and `think` of experiments/thinking that learnt from clean episodes, and their
clones, play the test split under other rules and in the other environment. The first command trains
`act` with prompts that omit the remaining actions (env.prompt=plain). It then plays with one to
eight turns instead of three. (A clone trained on counts up to ten fell from 26 % with three turns
to 20 with eight, where prompts start at 32.) RAGEN (arXiv:2504.20073) finds that skill carries over
to variants of an environment, AgentGym-RL (arXiv:2509.08755) that more turns at test time raise
success. A policy without skill scores like random play, so each cell includes random play and the
oracle.

rules  512 levels once
turns  128 levels, 16 episodes each, four actions a turn; pass@1 and pass@16. Random play has the
       same number of actions and tries.

Predicted before the first cell: on FrozenLake with more holes and on slippery ice RL keeps at least
half of its gain on its own maps. With two boxes, which change the tokens of rows, and in the other
environment no policy is more than five points above random play. (5 x 5 is the only other playable
size: this tokenizer has tokens that span the lines of 7 x 7.) With eight turns no policy gains more
over three than random play gains. Think, below act at home, is below it wherever act is more than
five points above random play.

Results are appended to experiments/transfer/results.jsonl; --table writes them into its page.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import pathlib
import re
import sys
import tempfile

import matplotlib
import ml_collections
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agentrl_jax import evaluate, train
from agentrl_jax.envs.reference import reference_success
from agentrl_jax.machine import files
from agentrl_jax.records import plots
from agentrl_jax.run import parts, saved_config
from agentrl_jax.run.config import read
from experiments import common
from experiments.agents import __main__ as agents
from experiments.thinking import __main__ as thinking

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / 'results.jsonl'
ARMS = ('act', 'think')
HOME = 'its own'
RULES = {
    'frozen_lake': {
        HOME: {},
        'more holes': {'frozen_lake.frozen': 0.8},
        'many holes': {'frozen_lake.frozen': 0.7},
        'slippery': {'frozen_lake.success_rate': 0.8},
        '5 x 5': {'frozen_lake.size': 5},
        'Sokoban': {'env.name': 'sokoban'},
    },
    'sokoban': {
        HOME: {},
        'two boxes': {'sokoban.num_boxes': 2},
        'FrozenLake': {'env.name': 'frozen_lake', 'frozen_lake.size': 6},
    },
}
TURNS = (1, 2, 3, 5, 8)
TOLD_NOTHING = 'act, plain'  # the arm whose prompts omit the remaining actions
TRIES = 16
KEY = ('world', 'arm', 'seed', 'policy', 'cell')
FIGURES = ('success', 'random', 'oracle', 'pass', 'random_pass')
LONGEST_PROMPT = 80  # tokens of a turn's prompt; an upper bound for these environments
ROLLOUTS = 320  # of random play per level


def tiny():
    """Plan `act` of experiments/thinking with prompts that omit the remaining actions."""
    arm = thinking.ARMS['act']
    plain = [
        cell | {'env.prompt': 'plain', 'env.max_actions_per_episode': 12}
        for cell in thinking.tiny().cells
        if cell['clone.oracle'] == thinking.CLEAN and arm.items() <= cell.items()
    ]
    return common.Plan(thinking.CONFIG, tuple(plain), {})


def cells(world, arm):
    """Return {name: (overrides of a cell, levels, episodes per level)}."""
    if arm != TOLD_NOTHING:
        return {name: (more, 512, 1) for name, more in RULES[world].items()}
    names = 'env.max_turns', 'env.max_actions_per_episode'
    return {
        turns_cell(turns): (dict(zip(names, (turns, 4 * turns), strict=True)), 128, TRIES)
        for turns in TURNS
    }


def runs(folder, seeds):
    """Return {(world, arm, seed): workdir} of finished runs on clean episodes."""
    workdirs = {}
    for path in sorted(pathlib.Path(folder).glob('*/finished.json')):
        cfg = files.read_json(path.parent / 'run.json')['config']
        clone, env = cfg['clone'], cfg['env']
        arm = 'think' if clone['thoughts'] else 'empty' if env['think'] else 'act'
        arm = TOLD_NOTHING if env['prompt'] == 'plain' else arm
        ours = clone['oracle'] == thinking.CLEAN and clone['steps'] == thinking.SHORT
        ours &= cfg['steps'] == thinking.STEPS
        if ours and arm in (*ARMS, TOLD_NOTHING) and cfg['seed'] in seeds:
            workdirs[env['name'], arm, cfg['seed']] = path.parent
    return workdirs


def start_of(workdir, folder):
    """Recreate the clone that the run in workdir started from, as a run of 0 steps in `folder`."""
    if not (folder / 'finished.json').exists():
        cfg = saved_config.get_config(str(newest(workdir)))
        cfg.steps = 0
        train.train(cfg, str(folder))
    return folder


def newest(workdir):
    return max((workdir / 'checkpoints').iterdir(), key=lambda path: int(path.name))


def play(workdir, cell, out):
    """Evaluate a policy in one cell and return its record without the KEY fields."""
    overrides, levels, tries = cell
    cfg = saved_config.get_config(str(newest(workdir)))
    cfg.update_from_flattened_dict(overrides)
    cfg.eval.split, cfg.env.eval_levels, cfg.eval.samples = 'test', levels, tries
    longest = cfg.rollout.max_response + LONGEST_PROMPT
    cfg.rollout.max_tokens = 8 * math.ceil((agents.PREFIX + cfg.env.max_turns * longest) / 8)
    with contextlib.redirect_stdout(sys.stderr):
        metrics = evaluate.evaluate(cfg, str(workdir), str(out), None, transfer=True)
    names = ('eval/success', 'eval/valid_format', 'reference/random', 'reference/oracle')
    record = {name.partition('/')[2]: metrics[name] for name in names}
    if tries > 1:
        details = files.read_json(pathlib.Path(out) / 'evaluation_test.json')
        record['pass'] = details['pass_at'][str(tries)]['mean']
        record['random_pass'] = random_pass(cfg.to_json(), tries)
    return record


@functools.cache
def random_pass(config, tries):
    """Return the success of random play within `tries` tries per level; config: JSON."""
    cfg = read(ml_collections.ConfigDict(json.loads(config)), None)
    env, env_params = parts.build_environment(cfg, 'test')
    actions = min(cfg.env.max_actions_per_episode, cfg.env.max_turns * cfg.env.max_actions_per_turn)
    success = reference_success(env, env_params, actions, trials=tries, rollouts=ROLLOUTS)
    return success['random']


def measure(folder, seeds, only=''):
    """Play every cell that results.jsonl lacks; each record is appended immediately."""
    known = set(load()[list(KEY)].itertuples(index=False, name=None))
    FOLDER.mkdir(exist_ok=True)
    for (world, arm, seed), workdir in runs(folder, seeds).items():
        start = folder.parent / 'starts' / f'{world}-{arm}-{seed}'
        for policy, (name, cell) in itertools.product(('clone', 'RL'), cells(world, arm).items()):
            key = (world, arm, seed, policy, name)
            if key in known or only not in name:
                continue
            player = start_of(workdir, start) if policy == 'clone' else workdir
            with tempfile.TemporaryDirectory() as out:
                record = dict(zip(KEY, key, strict=True)) | play(player, cell, out)
            with RESULTS.open('a', encoding='utf-8') as f:
                print(json.dumps(record), file=f)


def load():
    """Return all records, oldest first."""
    lines = RESULTS.read_text(encoding='utf-8').splitlines() if RESULTS.exists() else []
    return pd.DataFrame(map(json.loads, lines), columns=[*KEY, *FIGURES])


# ---- tables --------------------------------------------------------------------------------------


def spread(x):
    """Format the values of seeds as 'mean ± s.d.' in per cent."""
    return f'{100 * x.mean():.1f}' + (f' ± {100 * x.std():.1f}' if len(x) > 1 else '')


def table_of(records, columns, figure, arms, references):
    """Return a Markdown table: a row per policy, then one per reference {figure: label}."""
    lines = [['', *columns], ['---'] * (1 + len(columns))]
    for arm, policy in itertools.product(arms, ('clone', 'RL')):
        of_policy = records[(records.arm == arm) & (records.policy == policy)]
        by_seed = [of_policy[figure][of_policy.cell == column] for column in columns]
        if all(map(len, by_seed)):
            lines.append([f'{arm}, {policy}', *map(spread, by_seed)])
    means = records.groupby('cell')[list(references)].mean().reindex(columns)
    for reference, label in references.items():
        texts = ['' if np.isnan(x) else f'{100 * x:.1f}' for x in means[reference]]
        lines.append([label, *texts])
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines).replace('|  |', '| |', 1)


def turns_cell(turns):
    return f'{turns} turn{"s" * (turns > 1)}'


def tables(records):
    """Return {name: Markdown table}: rules, turns and turns with many tries of each world."""
    by_name, turns = {}, list(map(turns_cell, TURNS))
    both = {'random': 'random play', 'oracle': 'oracle'}
    for world, of_world in records.groupby('world'):
        rules = list(RULES[world])
        parts = [rules[i : i + 4] for i in range(0, len(rules), 4)]
        by_name |= {
            f'{world}_rules': '\n'.join(
                table_of(of_world, part, 'success', ARMS, both) for part in parts
            ),
            f'{world}_turns': table_of(of_world, turns, 'success', [TOLD_NOTHING], both),
            f'{world}_pass': table_of(
                of_world, turns, 'pass', [TOLD_NOTHING], {'random_pass': 'random play'}
            ),
        }
    return by_name


def draw(records, path):
    """Plot success over turns, for one and for many tries; thin: seeds, thick: their mean."""
    worlds = [world for world in RULES if world in set(records.world)]
    kinds = (('success', 'random', 'success'), ('pass', 'random_pass', f'pass@{TRIES}'))
    of_turns = records[records.arm == TOLD_NOTHING].set_index(['world', 'policy', 'seed'])
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(8, 6), layout='constrained')
        panels = figure.subplots(2, len(worlds), sharex=True, sharey='row', squeeze=False)
        for (field, player, name), row in zip(kinds, panels, strict=True):
            by_turns = 100 * of_turns.pivot(columns='cell', values=[field, player])
            for world, panel in zip(worlds, row, strict=True):
                for policy, colour in zip(('clone', 'RL'), plots.COLOURS, strict=False):
                    by_seed = by_turns[field].loc[world, policy][map(turns_cell, TURNS)]
                    panel.plot(TURNS, by_seed.T, color=colour, lw=0.7)
                    style = dict(color=colour, lw=2.5, marker='o', label=policy)
                    panel.plot(TURNS, by_seed.mean(), **style)
                by_chance = by_turns[player].loc[world, 'RL'][map(turns_cell, TURNS)].mean()
                style = dict(color=plots.REFERENCE_COLOUR, ls='--')
                panel.plot(TURNS, by_chance, label='random play', **style)
                panel.axvline(3, color=plots.OTHERS_COLOUR, lw=1, zorder=0)
                panel.set_title(f'{thinking.NAMES[world]}: {name}, %')
                panel.set_xticks(TURNS)
        for panel in panels[-1]:
            panel.set_xlabel('turns at test time (trained: 3)')
        panels[0][0].legend()
        figure.savefig(path, dpi=plots.DPI, metadata={'Software': None})


def embed(page, by_name):
    """Return the page with the tables inserted between their marks."""
    for name, table in by_name.items():
        marks = re.compile(f'(<!-- {name} -->\n).*?(<!-- end of {name} -->)', re.DOTALL)
        page = marks.sub(rf'\g<1>{table}\g<2>', page)
    return page


def main():
    if sys.argv[1:2] == ['train']:
        return common.main(__file__, __doc__, {'tiny': tiny}, sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--runs', default='', help='workdir of experiments.thinking')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--only', default='', help='only cells whose name contains this text')
    parser.add_argument('--show', action='store_true', help='print the committed results')
    parser.add_argument('--table', action='store_true', help='write the tables into the page')
    args = parser.parse_args()
    if args.runs:
        measure(pathlib.Path(args.runs), range(args.seeds), args.only)
    if args.show:
        print('\n'.join(tables(load()).values()))
    if args.table:
        path = FOLDER / 'README.md'
        page = path.read_text(encoding='utf-8')
        files.write_atomic(path, embed(page, tables(load())))
        draw(load(), FOLDER / 'turns.png')
    return 0


if __name__ == '__main__':
    sys.exit(main())
