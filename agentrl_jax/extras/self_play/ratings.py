"""Elo ratings of players from games against each other (NumPy, on the host).

  P(i beats j) = 1 / (1 + 10^((r_j - r_i) / 400)),  a draw is half a win for both
Ratings maximise the likelihood (Bradley and Terry 1952), with r = 0 for the first player. One drawn
game against the first player is added per player, because a player who won or lost all games would
not have a finite rating. Intervals are bootstrap percentiles over deals; all games of a deal are
resampled together.
"""

import numpy as np

SCALE = 400 / np.log(10)  # Elo points per unit of log-odds
PASSES = 60  # Newton steps, each clipped to 2 units


def fit(points: np.ndarray, games: np.ndarray) -> np.ndarray:
    """Return the ratings, float [..., P].

    points [..., P, P]: points of each player (row) against each opponent (column), 1 for a win and
    0.5 for a draw; games [..., P, P]: number of games.
    """
    drawn = np.zeros(points.shape[-2:])
    drawn[0, 1:] = drawn[1:, 0] = 1
    points, games = points + drawn / 2, games + drawn
    strength = np.zeros(points.shape[:-1])
    index = np.arange(len(drawn))
    for _ in range(PASSES):
        gap = strength[..., :, None] - strength[..., None, :]
        wins = 1 / (1 + np.exp(-gap))
        slope = (points - games * wins).sum(-1)
        weight = games * wins * (1 - wins)
        curvature = -weight
        curvature[..., index, index] = weight.sum(-1) - weight[..., index, index]
        step = np.linalg.solve(curvature[..., 1:, 1:], slope[..., 1:, None])[..., 0]
        strength[..., 1:] += np.clip(step, -2, 2)
    return SCALE * strength


def intervals(
    scores: np.ndarray, *, resamples: int = 1000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ratings and their 95 % intervals: (ratings, low, high), float [P] each.

    scores [P, P, L, G]: points of the row's player in G games of each of L deals; nan for pairs
    without games.
    """
    scores = np.asarray(scores, np.float64)
    games = (~np.isnan(scores)).sum(-1)  # [P, P, L]
    won = np.nansum(scores, -1)
    rng, deals = np.random.default_rng(seed), scores.shape[2]
    times = rng.multinomial(deals, np.full(deals, 1 / deals), resamples)  # [R, L]
    again = fit(*(np.einsum('rl,pql->rpq', times, x) for x in (won, games)))
    low, high = np.quantile(again, [0.025, 0.975], axis=0)
    return fit(won.sum(-1), games.sum(-1)), low, high
