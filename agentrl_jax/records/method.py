"""The name of a config's method, for titles, legends and pages.

It is the name of the algorithm, with these exceptions:
  StarPO-S           ppo with the parts of RAGEN's stable variant (arXiv:2504.20073, 4.2): only the
                     groups with the largest variation of returns are kept (filter.rule=top_k,
                     filter.keep below 1, not filter.smallest), no KL term (loss.kl_coef=0), and
                     clip-higher (loss.clip_high above loss.clip_low);
  ..., filtered      any other config that does not train on all groups, except DAPO with its rule
                     filter.rule=varied;
  ..., ScalingInter  the number of turns grows over training (curriculum.rounds has several stages,
                     arXiv:2509.08755).
"""

from collections.abc import Mapping
from typing import Any

NAMES = {  # exceptions; other names are the config's algorithm in capitals
    'dr_grpo': 'Dr. GRPO',
    'reinforce_pp': 'REINFORCE++',
    'reinforce_pp_baseline': 'REINFORCE++-baseline',
    'gspo_turn': 'GSPO by turns',
    'gigpo': 'GiGPO',
    'turn_grpo': 'Turn-GRPO',
    'vine': 'Vine',
    'agent_evol': 'AgentEvol',
}
FIELDS = (  # inputs of the rules
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
    """Return the name of a config's method. fields: values by dotted name.

    Rules with missing fields (older records) or unset (unused) fields do not apply.
    """
    known = {name: fields[name] for name in FIELDS if name in fields and fields[name] is not None}
    algorithm = str(fields['algorithm'])
    name = NAMES[algorithm] if algorithm in NAMES else algorithm.upper().replace('_', '-')
    rule, keep = known.get('filter.rule'), known.get('filter.keep')
    filtered = rule not in (None, 'all') and (algorithm, rule) != ('dapo', 'varied')
    if keep is None or (rule == 'top_k' and keep >= 1):
        filtered = False
    if (
        filtered
        and len(known) == len(FIELDS)
        and (algorithm, rule) == ('ppo', 'top_k')
        and not known['filter.smallest']
        and known['loss.kl_coef'] == 0
        and known['loss.clip_high'] > known['loss.clip_low']
    ):
        name = 'StarPO-S'
    elif filtered:
        name += ', filtered'
    return name + (', ScalingInter' if len(known.get('curriculum.rounds', ())) > 1 else '')
