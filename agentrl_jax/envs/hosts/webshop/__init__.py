"""A web shop: products, goals, pages and scoring."""
