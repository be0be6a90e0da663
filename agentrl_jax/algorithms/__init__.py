"""Registry of algorithms by name. Each module has one frozen dataclass: the settings with the
values of the paper, make_batch and loss (rl.algorithm.Algorithm).
"""

from agentrl_jax.algorithms.agent_evol import AgentEvol
from agentrl_jax.algorithms.cispo import CISPO
from agentrl_jax.algorithms.dapo import DAPO
from agentrl_jax.algorithms.dppo import DPPO
from agentrl_jax.algorithms.dr_grpo import DrGRPO
from agentrl_jax.algorithms.gigpo import GiGPO
from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.algorithms.gspo import GSPO
from agentrl_jax.algorithms.gspo_turn import GSPOTurn
from agentrl_jax.algorithms.maxrl import MaxRL
from agentrl_jax.algorithms.mt_grpo import MTGRPO
from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.algorithms.reinforce_pp import ReinforcePP
from agentrl_jax.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from agentrl_jax.algorithms.rloo import RLOO
from agentrl_jax.algorithms.sapo import SAPO
from agentrl_jax.algorithms.turn_grpo import TurnGRPO

ALGORITHMS = {
    'ppo': PPO,
    'grpo': GRPO,
    'dr_grpo': DrGRPO,
    'dapo': DAPO,
    'rloo': RLOO,
    'reinforce_pp': ReinforcePP,
    'reinforce_pp_baseline': ReinforcePPBaseline,
    'turn_grpo': TurnGRPO,
    'mt_grpo': MTGRPO,
    'gspo': GSPO,
    'gspo_turn': GSPOTurn,
    'cispo': CISPO,
    'sapo': SAPO,
    'dppo': DPPO,
    'maxrl': MaxRL,
    'gigpo': GiGPO,
    'agent_evol': AgentEvol,
}
