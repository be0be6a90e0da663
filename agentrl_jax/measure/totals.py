"""What a run has spent so far: sums over its steps, carried from row to row of its metrics."""

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
    """The progress/ metrics of a step: those of the row before it and what it adds itself.

    sampled: tokens; episodes: of one of its filter/collects rollouts. A resumed run has the rows
    before it, so its sums are the same. {} where the row before is lost: the sums are not known.
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
