"""On-policy distillation: algorithm=opd, with teachers and privileged hints (opd.*)."""

from agentrl_jax.extras.distillation.opd import OPD
from agentrl_jax.extras.distillation.teachers import Distillation

ALGORITHMS = {'opd': OPD}
SECTIONS = {'distillation': Distillation}
