"""The name of what a config trains with, for titles, legends and pages.

It is the name of the algorithm, except that
  StarPO-S           is ppo with the parts of RAGEN's stable variant (arXiv:2504.20073, 4.2): only
                     groups whose returns vary most are kept (filter.rule=top_k, filter.keep below
                     1, not filter.smallest), no KL term (loss.kl_coef=0), and clip-higher
                     (loss.clip_high above loss.clip_low);
  ..., filtered      is any other config that does not train on all groups, but for DAPO's own rule,
                     filter.rule=varied;
  ..., ScalingInter  is one whose turns grow over training (curriculum.rounds has several stages,
                     arXiv:2509.08755).
"""

from collections.abc import Mapping
from typing import Any

NAMES = {  # where the name is not the config's own in capitals
    'dr_grpo': 'Dr. GRPO',
    'reinforce_pp': 'REINFORCE++',
    'reinforce_pp_baseline': 'REINFORCE++-baseline',
    'gspo_turn': 'GSPO by turns',
    'gigpo': 'GiGPO',
    'turn_grpo': 'Turn-GRPO',
    'agent_evol': 'AgentEvol',
}
FIELDS = (  # what the rules look at
    'algorithm',
    'filter.rule',
    'filter.keep',
    'filter.smallest',
    'loss.kl_coef',
    'loss.clip_low',
    'loss.clip_high',
    'curriculum.rounds',
)


def method(fields: Mapping[str, Any]) -> str:
    """The name of a config given as dotted fields.

    A record of an older version may lack some: then nothing is known but the algorithm's name.
    """
    algorithm = str(fields['algorithm'])
    name = NAMES[algorithm] if algorithm in NAMES else algorithm.upper().replace('_', '-')
    if any(field not in fields for field in FIELDS):
        return name
    rule = fields['filter.rule']
    top = rule == 'top_k'
    filtered = fields['filter.keep'] < 1 if top else rule != 'all'
    filtered = filtered and (algorithm, rule) != ('dapo', 'varied')
    stable = (
        (algorithm == 'ppo' and top and filtered and not fields['filter.smallest'])
        and fields['loss.kl_coef'] == 0
        and fields['loss.clip_high'] > fields['loss.clip_low']
    )
    if stable:
        name = 'StarPO-S'
    elif filtered:
        name += ', filtered'
    return name + (', ScalingInter' if len(fields['curriculum.rounds']) > 1 else '')
