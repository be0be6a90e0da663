"""Update of on-policy distillation, from the probabilities of teachers."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.distillation.hints import read_hint
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import Extra, Learner
from agentrl_jax.rl.score import TokenRows, of_tokens
from agentrl_jax.rollout.windows import of_episode
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class Distilling(Extra):
    """KL to teachers in the loss (full), or their log-probabilities instead of the reference's."""

    full: bool
    teachers: tuple[ModelFns, ...] = ()  # functions of FrozenParams.extra['teachers']; (): the
    # policy of step 0 is the teacher
    prefix: int = 0  # length of the prefix of every episode, after which teachers read hints

    METRICS = ('policy/kl_teacher',)

    def read(
        self, learner: Learner, tokens: jax.Array, attention: jax.Array, hint: jax.Array | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Return (hidden states [B, T, D] in rows with hints, head) of each teacher."""
        teachers = [(learner.fns, learner.frozen.reference)]
        if self.teachers:
            teachers = zip(self.teachers, learner.frozen.extra['teachers'], strict=True)
        return [
            (read_hint(fns, params, tokens, attention, hint, prefix=self.prefix), fns.head(params))
            for fns, params in teachers
        ]

    def score(self, rollout, scores, learner, windows):
        if self.full:
            return scores
        rows, settings = TokenRows.of(rollout, windows), learner.settings
        hint = self.arrays(rollout, rollout.action_mask, learner).get('hint')
        if hint is not None and windows is not None:
            hint = of_episode(hint, windows)

        def mean(rows, hint):
            each = self.read(learner, rows.tokens, rows.attention_mask, hint)
            return mixture([rows.logprobs(hidden, head, settings) for hidden, head in each])

        ref = of_tokens(mean, (rows, hint), rollout=rollout, settings=settings, windows=windows)
        return scores.replace(ref_logprobs=jnp.where(rollout.action_mask, ref, 0.0))

    def arrays(self, rollout, mask, learner):
        hints = learner.frozen.extra.get('hints')
        return {} if hints is None else {'hint': hints[rollout.level]}

    def loss(self, forward, batch: Batch, weights, total, learner):
        if not self.full:
            gap = losses.log_ratio(forward.logprobs, batch.ref_logprobs, batch.mask)
            return jnp.zeros(()), {'policy/kl_teacher': gap.sum()}
        hint = batch.extra.get('hint')
        each = self.read(learner, batch.tokens, batch.attention_mask, hint)
        student = forward.hidden, learner.fns.head(forward.params)
        masks = dict(mask=batch.mask, allowed=batch.allowed)
        models = [student, *each]
        (kl,) = losses.of_logits(divergence, models, batch.tokens, learner.settings.head, **masks)
        kl = jnp.where(batch.mask, kl, 0.0)
        return losses.weighted_sum(weights, kl), {'policy/kl_teacher': kl.sum()}


def divergence(targets: jax.Array, *logits: jax.Array) -> tuple[jax.Array]:
    """Return reverse_kl of logits [..., V]; the first are the student's."""
    student, *taught = map(jax.nn.log_softmax, logits)  # equal logits give equal bits
    return (reverse_kl(student, taught),)


def mixture(logprobs: Sequence[jax.Array]) -> jax.Array:
    """Return the log of the mean of n probabilities, from log-probabilities of the same shape."""
    return jax.nn.logsumexp(jnp.stack(logprobs), axis=0) - np.float32(np.log(len(logprobs)))


def reverse_kl(logprobs: jax.Array, teachers: Sequence[jax.Array]) -> jax.Array:
    """sum_v p_v (log p_v - log q_v), q the mixture of the teachers; [..., V] each -> [...].

    The gradient of log p_v is omitted, because it adds up to sum_v p_v grad log p_v = grad 1 = 0.
    For p = q the gradient is then exactly 0, without rounding.
    """
    gap = jax.lax.stop_gradient(logprobs - mixture(teachers))
    return (jnp.exp(logprobs) * gap).sum(-1)
