"""OPD, on-policy distillation: the policy plays and learns the probabilities of its teachers.

  full     loss_t = sum_v p_v (log p_v - log q_v), p = pi(. | s_t), q = mean of the teachers'
           probabilities; p has a gradient, q and s_t have none (GKD's reverse KL, arXiv:2306.13649)
  sampled  A[b, t] = log q(y_t) - log pi_old(y_t) in PPO's clipped surrogate (Lu, 'On-Policy
           Distillation', Thinking Machines 2025): at the first optimiser step it has the expected
           gradient of `full`, from one draw of y_t instead of all tokens
Both are at rollout.temperature and, with rollout.constrain, over the legal tokens. All episodes
have the same weight (seq_mean_token_mean), as in GKD and TCOD. opd.reward_coef * (R - group mean)
is added to the advantages.

Bias: states are treated as fixed. A token is not charged for the KL of later tokens, so this is not
the gradient of the KL between episodes. (MiniLLM, arXiv:2306.08543, has that term, and
tinker-cookbook has it with kl_discount_factor, 0 by default.) Reverse KL commits to some of the
teachers' behaviour instead of covering all of it. With a mean of probabilities no teacher can
forbid a token: it costs at most log n more than under its best teacher. With a mean of logarithms,
a product of experts, the cost would be unbounded wherever two good teachers differ.

Other code differs from the papers. verl's GKD is a forward KL over the teacher's 32 best tokens;
its other variant is `sampled` with k3 unless k1 is set. TRL's GKD is a JSD with beta .5, which is
this KL at beta 1. prime-rl does not clip and drops tokens with a probability that fell by .2. slime
and tinker-cookbook add A to the advantages of RL, and slime's text writes the KL with the teacher
first. TCOD's curriculum is curriculum.rounds.

opd.privileged=plan: teachers read the prompts of env.hint=plan, the policy those of env.hint=none
(hints.py). q is then conditioned on a solution that p does not have, as in OPSD (arXiv:2601.18734).
Without opd.teachers the teacher is the policy of step 0. A teacher that moves with the policy can
agree with it by ignoring the hint. In a trial this happened: a clone trained on plans and played
without fell in 40 steps from 1.6 to .01 nats of KL, and from 23 to 14 % success. Decisions that
depend on the hint and not on the prompt cannot be learnt: there the policy commits to a guess and
the KL stays above 0 (leaks of privileged information, unstable long runs: arXiv:2604.03128). A
small policy cannot use a hint without training: it, or its teacher, must be trained with
env.hint=plan.
"""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import Clip, ClippedSurrogate, Weights, build_batch, trained
from agentrl_jax.settings.marks import POSITIVE, ZERO, ConfigName, In, MustBe
from agentrl_jax.settings.rules import Must, Rule, exclude, must

Divergence = Literal['full', 'sampled']


@dataclasses.dataclass(frozen=True)
class OPD(ClippedSurrogate):
    weights: Weights = Weights('seq_mean_token_mean')
    teachers: Annotated[
        tuple[str, ...], ConfigName('opd.teachers'), MustBe("paths, such as ('runs/teacher',)")
    ] = ()  # HuggingFace folders, .gguf or workdirs of runs, of any size, with the same vocabulary;
    # with opd.privileged, () = the policy of step 0
    privileged: Annotated[Literal['none', 'plan'], ConfigName('opd.privileged')] = 'none'  # extra
    # text for teachers only: plan, the first prompt of env.hint=plan
    divergence: Annotated[Divergence, ConfigName('opd.divergence')] = 'full'  # reverse KL over all
    # tokens (full), or at the sampled token
    reward_coef: Annotated[float, ZERO, ConfigName('opd.reward_coef')] = 0.0  # weight of the
    # return minus the group mean, added to the KL

    RULES = (
        must(
            'opd.teachers',
            "checkpoints, or opd.privileged to 'plan'",
            lambda run: run.algorithm.other_models,
        ),
        Rule({'loss.kl_coef': 0}, 'the teachers replace the initial policy'),
        *exclude(
            {'opd.divergence': 'sampled', 'opd.reward_coef': POSITIVE},
            {
                'loss.sampler_correction': 'off',
                'loss.clip_low': Must(
                    'its default, like loss.clip_high and loss.dual_clip',
                    lambda run: run.algorithm.clip == Clip(),
                ),
            },
            'the loss has no advantages',
        ),
        *exclude(
            {'opd.privileged': 'none'},
            {
                'env.hint': 'none',
                'env.mix': (),
                'env.name': Must('an environment on the device', lambda run: not run.on_hosts),
            },
        ),
        Rule({'opd.reward_coef': 0, 'rollout.group_size': In(low=2)}, 'groups are compared'),
    )
    COMPARES_GROUPS = False
    COMPARES_REFERENCE = False

    @property
    def teaches_itself(self) -> bool:
        """Whether the policy of step 0 is the teacher."""
        return self.privileged != 'none' and not self.teachers

    @property
    def uses_reference(self) -> bool:
        return self.teaches_itself

    @property
    def other_models(self) -> int:
        return len(self.teachers) + self.teaches_itself

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with advantages from teachers and, with reward_coef, from returns."""
        rows, mask = trained(rollout, keep)
        advantages = jnp.zeros_like(scores.old_logprobs)
        if self.divergence == 'sampled':
            advantages = jnp.where(mask, scores.ref_logprobs - scores.old_logprobs, 0.0)
        if self.reward_coef:
            centred = adv.group_center(
                rollout.returns, rows, group_size=group_size, scale=rollout.magnitudes.returns
            )
            advantages = advantages + self.reward_coef * centred[:, None] * mask
        return build_batch(rollout, scores, mask, advantages)
