"""A shop to buy in: products, goals, pages, and what a purchase earns."""
