"""Existing agents as environments: programs that call the policy through a client of OpenAI or Anthropic."""
