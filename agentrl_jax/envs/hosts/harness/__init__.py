"""Agents that exist already: programs around an OpenAI client, as worlds whose policy they call."""
