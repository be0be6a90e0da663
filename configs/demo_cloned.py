"""StarPO-S from a policy that was cloned badly on purpose: the setting of the older experiments.

  python -m agentrl_jax.train --config=configs/demo_cloned.py --workdir=runs/demo_cloned

Seven of ten turns that are cloned were played at random, so the policy speaks the format and plays
badly, and the rate is the one at which StarPO-S then ends at 72 %, from whatever start: a clone of
clean play begins at 82 % and loses 8 points (experiments/clean_start). configs/demo.py needs
no demonstration. Other configs of small policies begin from this one.

Hardware: 2 shared CPU cores.
Time: 199 to 250 s for the 200 steps, 6 to 8 minutes with cloning, two runs at a time.
Score: 72.4 % [72.1, 73.0] of 512 validation maps, seeds 0 to 2 (experiments/demo_cloned/README.md);
35.4 % after cloning, random play 23.3 %, oracle 100 %.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.optim.lr = 1e-3
    # Enough to read the map and to speak the format; most of what is imitated is random play
    cfg.clone.episodes = 8192
    cfg.clone.steps = 700
    cfg.clone.oracle = 0.3

    # StarPO-S: the quarter of the groups whose returns vary most, no KL, clip-higher, critic
    cfg.filter.keep = 0.25
    cfg.loss.clip_high = 0.28
    cfg.loss.entropy_coef = 0.005
    cfg.batch.minibatch_rows = 32
    return cfg
