"""Games as worlds; pgx and gymnax, which most of them are of, are imported when one begins."""
