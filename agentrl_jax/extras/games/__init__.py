"""Games of pgx and gymnax as environments; the libraries are imported when a game starts."""
