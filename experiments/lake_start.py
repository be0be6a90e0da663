"""A start that nobody spoiled and that leaves room: the lake's policy after a few demonstrations.

256 clean episodes of the expert for 150 steps of cloning, about 47 % of held-out maps, of which RL
makes 75 % (experiments/beyond_clone_tiny); all arms of a seed share it.
"""

CONFIG = 'configs/demo.py'
FEW = {
    'clone.episodes': 256,
    'clone.oracle': 1.0,
    'clone.steps': 150,
    'clone.batch': 64,
    'clone.lr': 2e-3,
}
CONSTANT = {'optim.schedule': 'constant', 'optim.schedule_steps': 0, 'optim.final_lr': 0.0}
EPISODES = 128  # of a step, as in RAGEN
EVALUATIONS = 8  # of a run
RATES = (1e-3, 2.5e-4)
