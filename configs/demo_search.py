"""StarPO-S on questions with a search engine, the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_search.py --workdir=runs/search

Which country does the region Lumbini belong to? 1,639 regions are trained on and 200 held out, all
that have a name of one word of up to eight letters; three turns, one document a search, one answer.
Nobody can know the answer for a held-out region, so it must be looked up: the name is copied out of
the question into a search, and the country out of the sentence that is found. What makes this
readable for a small model: a country is one token and so is all that stands around a name, and a
name is the same two to six pieces in the question, in a search and in a document. These are pieces
of the names that are trained on, so that the ones of a held-out name were copied before in others:
what is to be learned is an attention that finds what follows the last piece, not a list of names.

The policy starts from cloning turns of which two of five are the oracle's and the others random:
searches for any words that were shown, and answers with any name among them. Random play is right
with some of these, so what is learned is mostly to search for the name first and to answer then.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: none; no run of it is in experiments/. Random play 2.5 %, oracle 100 %, the mixture that is
cloned 31 % (200 held-out regions three times).
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.steps = 60
    cfg.env.name = 'search'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 2048
    cfg.env.eval_levels = 200
    cfg.search.hops = (1,)
    cfg.search.about = ('region',)
    cfg.search.longest_name = 8
    cfg.search.retries = False
    cfg.search.topk = 1
    cfg.hosts.max_observation = 32  # documents about countries are cut
    cfg.hosts.read_tokens = 16

    cfg.rollout.num_groups = 16
    cfg.filter.keep = 0.5
    cfg.rollout.max_tokens = 184
    cfg.rollout.max_response = 20

    # Copying is learned late, and then at once: more steps than the demo's
    cfg.clone.oracle = 0.4
    cfg.clone.steps = 1500
    cfg.eval.every = 20
    return cfg
