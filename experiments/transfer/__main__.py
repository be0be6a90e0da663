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
import collections
import contextlib
import functools
import json
import math
import pathlib
import sys
import tempfile

import matplotlib
import ml_collections
import numpy as np
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
    known = {tuple(record[name] for name in KEY) for record in load()}
    FOLDER.mkdir(exist_ok=True)
    for (world, arm, seed), workdir in runs(folder, seeds).items():
        start = folder.parent / 'starts' / f'{world}-{arm}-{seed}'
        for policy in ('clone', 'RL'):
            todo = {
                name: cell
                for name, cell in cells(world, arm).items()
                if (world, arm, seed, policy, name) not in known and only in name
            }
            if not todo:
                continue
            player = start_of(workdir, start) if policy == 'clone' else workdir
            for name, cell in todo.items():
                with tempfile.TemporaryDirectory() as out:
                    record = dict(zip(KEY, (world, arm, seed, policy, name), strict=True))
                    record |= play(player, cell, out)
                with RESULTS.open('a', encoding='utf-8') as f:
                    print(json.dumps(record), file=f)


def load():
    """Return all records, oldest first."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding='utf-8').splitlines()]


# ---- tables --------------------------------------------------------------------------------------


def values(records, field):
    """Return {(world, arm, policy, cell): {seed: value in per cent}}."""
    by_cell = collections.defaultdict(dict)
    for record in records:
        world, arm, seed, policy, cell = (record[name] for name in KEY)
        if field in record:
            by_cell[world, arm, policy, cell][seed] = 100 * record[field]
    return by_cell


def spread(x):
    """Format the values of seeds as 'mean ± s.d.'."""
    x = list(x)
    return f'{np.mean(x):.1f} ± {np.std(x, ddof=1):.1f}' if len(x) > 1 else f'{x[0]:.1f}'


def rows_of(records, world, columns, field, arms):
    """Return one table row per policy: success in each column."""
    by_cell = values(records, field)
    lines = []
    for arm in arms:
        for policy in ('clone', 'RL'):
            by_seed = [by_cell.get((world, arm, policy, column)) for column in columns]
            if all(by_seed):
                texts = ' | '.join(spread(x.values()) for x in by_seed)
                lines.append(f'| {arm}, {policy} | {texts} |')
    return lines


def reference_row(records, world, columns, field, label):
    """Return the table row of a reference that does not depend on the policy."""
    by_cell = values([r for r in records if r['world'] == world], field)
    texts = []
    for column in columns:
        of_cell = [x for key, by in by_cell.items() if key[3] == column for x in by.values()]
        texts.append(f'{np.mean(of_cell):.1f}' if of_cell else '')
    return f'| {label} | {" | ".join(texts)} |'


def heading(columns):
    return [f'| | {" | ".join(columns)} |', '| --- ' * (1 + len(columns)) + '|']


def turns_cell(turns):
    return f'{turns} turn{"s" * (turns > 1)}'


def tables(records):
    """Return {name: Markdown table}: rules, turns and turns with many tries of each world."""
    by_name = {}
    for world in RULES:
        rules, turns = list(RULES[world]), list(map(turns_cell, TURNS))
        if not any(record['world'] == world for record in records):
            continue
        parts = []
        for i in range(0, len(rules), 4):
            columns = rules[i : i + 4]
            lines = heading(columns) + rows_of(records, world, columns, 'success', ARMS)
            for field, label in (('random', 'random play'), ('oracle', 'oracle')):
                lines.append(reference_row(records, world, columns, field, label))
            parts.append('\n'.join(lines) + '\n')
        by_name[f'{world}_rules'] = '\n'.join(parts)
        for name, field, player in (
            ('turns', 'success', 'random'),
            ('pass', 'pass', 'random_pass'),
        ):
            lines = heading(turns) + rows_of(records, world, turns, field, [TOLD_NOTHING])
            lines.append(reference_row(records, world, turns, player, 'random play'))
            if field == 'success':
                lines.append(reference_row(records, world, turns, 'oracle', 'oracle'))
            by_name[f'{world}_{name}'] = '\n'.join(lines) + '\n'
    return by_name


def draw(records, path):
    """Plot success over turns, for one and for many tries; thin: seeds, thick: their mean."""
    worlds = [world for world in RULES if any(r['world'] == world for r in records)]
    kinds = (('success', 'random', 'success'), ('pass', 'random_pass', f'pass@{TRIES}'))
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(8, 6), layout='constrained')
        panels = figure.subplots(2, len(worlds), sharex=True, sharey='row', squeeze=False)
        for (field, player, name), row in zip(kinds, panels, strict=True):
            by_cell = values(records, field)
            random = values(records, player)
            for world, panel in zip(worlds, row, strict=True):
                for policy, colour in zip(('clone', 'RL'), plots.COLOURS, strict=False):
                    of_turns = [
                        by_cell[world, TOLD_NOTHING, policy, turns_cell(turns)] for turns in TURNS
                    ]
                    for seed in of_turns[0]:
                        panel.plot(TURNS, [x[seed] for x in of_turns], color=colour, lw=0.7)
                    means = [np.mean(list(x.values())) for x in of_turns]
                    panel.plot(TURNS, means, color=colour, lw=2.5, marker='o', label=policy)
                by_chance = [
                    np.mean(list(random[world, TOLD_NOTHING, 'RL', turns_cell(n)].values()))
                    for n in TURNS
                ]
                style = dict(color=plots.REFERENCE_COLOUR, ls='--')
                panel.plot(TURNS, by_chance, label='random play', **style)
                panel.axvline(3, color=plots.OTHERS_COLOUR, lw=1, zorder=0)
                panel.set_title(f'{thinking.NAMES[world]}: {name}, %')
                panel.set_xticks(TURNS)
        for panel in panels[-1]:
            panel.set_xlabel('turns at test time (trained: 3)')
        panels[0][0].legend()
        figure.savefig(path, dpi=plots.DPI, metadata={'Software': None})


def embed(page, found):
    """Return the page with the tables inserted between their marks."""
    for name, table in found.items():
        begin, end = f'<!-- {name} -->\n', f'<!-- end of {name} -->'
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f'{before}{begin}{table}{end}{after}'
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
