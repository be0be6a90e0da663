"""Running totals of a run: sums over its steps, carried from row to row of its metrics."""

import math
from collections.abc import Mapping, Sequence

TOTALS = ('progress/tokens', 'progress/trained_tokens', 'progress/episodes')


def so_far(
    history: Sequence[Mapping[str, float]],
    row: Mapping[str, float],
    step: int,
    *,
    sampled: int,
    episodes: int,
) -> dict[str, int]:
    """Return the progress/ metrics of a step: the totals of the previous row plus this step.

    sampled: tokens; episodes: per rollout, of which a step has filter/collects. A resumed run has
    the earlier rows, so its totals are the same. {} if the previous row is missing.
    """
    before = dict.fromkeys(TOTALS, 0)
    if step:
        last = history[-1] if history else {}
        if not {'step', *TOTALS} <= last.keys() or last['step'] != step - 1:
            return {}
        before = {name: last[name] for name in TOTALS}
    trained = float(row['batch/trained_tokens']) if 'batch/trained_tokens' in row else 0.0
    collects = int(row['filter/collects']) if 'filter/collects' in row else 0
    added = (sampled, int(trained) if math.isfinite(trained) else 0, episodes * collects)
    return {name: before[name] + more for name, more in zip(TOTALS, added, strict=True)}
