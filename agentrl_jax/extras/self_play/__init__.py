"""Self-play in two-player games: RAE, snapshots as opponents, ratings, exploitability."""

from agentrl_jax.extras.self_play.rae import RAE
from agentrl_jax.extras.self_play.section import SelfPlay

ALGORITHMS = {'rae': RAE}
SECTIONS = {'self_play': SelfPlay}
