"""Existing agents as environments: programs that call the policy through a vendor's client."""
