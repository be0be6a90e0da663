"""StarPO-S on questions with a search engine, the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_search.py --workdir=runs/search

Which country does the region Lunde belong to? One of eight documents says it, of regions that do
not exist: they are drawn anew for each question, so nothing can be known by heart. The region is to
be copied out of the question into a search, and the country out of the sentence that is found, in
three turns at most, with one document a search and one answer. Each name is a token, and so is all
that stands around names.

The policy starts from cloning turns of which two of five are the oracle's and the others random:
searches for any words that were shown, and answers with any name among them.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: none; no run of it is in experiments/. Random play 1.7 %, oracle 100 %.
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.steps = 60
    cfg.env.name = 'search'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 2048
    cfg.env.eval_levels = 256
    cfg.search.questions = ('drawn',)
    cfg.search.retries = False
    cfg.search.topk = 1
    cfg.search.turns = cfg.env.max_turns
    cfg.hosts.max_observation = 16
    cfg.hosts.read_tokens = 16

    cfg.rollout.num_groups = 16
    cfg.filter.keep = 0.5
    cfg.rollout.max_tokens = 112
    cfg.rollout.max_response = 16

    cfg.clone.oracle = 0.4
    cfg.clone.steps = 700
    cfg.eval.every = 10
    return cfg
