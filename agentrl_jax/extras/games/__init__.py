"""Games of pgx and gymnax as worlds; these libraries are imported when a game starts."""
