"""Existing agents as environments: programs that call the policy through an OpenAI client."""
