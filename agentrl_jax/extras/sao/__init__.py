"""SAO: one episode per prompt, a critic, and a ratio to the sampler (algorithm=sao)."""

from agentrl_jax.extras.sao.sao import SAO

ALGORITHMS = {'sao': SAO}
