"""What each metric means, in a sentence: for `drumroll train -v`, the report, and people who read metrics.jsonl."""

from __future__ import annotations

import re

LEGEND = (
    (r"reward/[^/]+", "Mean reward of the samples trained on, of one domain."),
    (r"reward/[^/]+/.+", "Mean of one part of the reward, before its weight."),
    (r"eval/[^/@]+", "Mean reward on a held-out set, as its section decodes it (greedy by default)."),
    (r"eval/.+/pass@\d+", "Share of a held-out set's prompts of which at least one of so many samples passes."),
    (r"eval/[^/@]+/sampled", "Mean reward on a held-out set of samples drawn at a temperature."),
    (r"eval/[^/@]+/loss", "Loss on a held-out set with answers, as in training; lower is better."),
    (
        r"eval/[^/@]+/perplexity",
        "e to the mean negative log-likelihood of the answers' tokens of a held-out set; lower is better.",
    ),
    (r"(train|eval/[^/@]+)/accuracy", "Share of preferences that the policy's implied rewards agree with."),
    (r"(train|eval/[^/@]+)/margin", "Mean implied reward of chosen minus rejected answers."),
    (r"(train|eval/[^/@]+)/reward_(chosen|rejected)", "Mean implied reward of chosen or rejected answers."),
    (r"(train|eval/[^/@]+)/logprob_(chosen|rejected)", "Mean log-probability of whole chosen or rejected answers."),
    (r"(environment|eval)/.+/success", "Share of episodes that succeed."),
    (r"(environment|eval)/.+/effective", "Share of actions that change the environment."),
    (r"(environment|eval)/.+/malformed", "Share of turns that the environment cannot read."),
    (r"(environment|eval)/.+/turns", "Turns per episode."),
    (
        r"train/loss",
        "The objective that is minimised. Of a policy that learns from rewards a value near 0 is normal (minus the mean advantage, "
        "where every ratio is 1) and says little: look at the reward.",
    ),
    (r"(train|eval/.+)/accuracy", "Share of pairs whose chosen answer is preferred by the model."),
    (r"(train|eval/.+)/margin", "Mean reward, or score, of chosen less rejected answers."),
    (r"(train|eval/.+)/score_(chosen|rejected)", "Mean score that the reward model gives."),
    (
        r"eval/.+/calibration_error",
        "Expected calibration error: how far the probability of a preference is from its frequency.",
    ),
    (r"critic/loss", "Squared error of the critic's values."),
    (r"(train|critic)/tokens", "Tokens that were trained on; groups without signal are left out where that is exact."),
    (r"(train|critic)/grad_norm", "Norm of the gradient before clipping."),
    (r"(train|critic)/lr", "Learning rate."),
    (r"train/entropy", "Mean entropy of the policy at the tokens trained on, in nats."),
    (
        r"train/kl_behaviour",
        "Mean log-prob of the trained tokens when they were sampled, minus now: how far the updates of this step moved the policy "
        "from the one that sampled. It is no KL to a reference.",
    ),
    (r"train/kl_reference", "KL of the policy to the reference model, per token, as the algorithm estimates it."),
    (r"train/kl_teacher", "KL of the policy to the teacher, per token, as the algorithm estimates it."),
    (r"train/kl_reward", "KL to the reference that was subtracted from the rewards."),
    (r"train/kl_coefficient", "Present coefficient of the KL term."),
    (r"train/mismatch", "Largest gap of a step between the log-probs that engine and learner give the same token."),
    (
        r"train/ratio.*",
        "Ratio of a token's probability now to that at the start of the update; 1 if there is one update per batch.",
    ),
    (r"train/behaviour_ratio.*", "Ratio of a token's probability at the start of the update to that when it was sampled."),
    (r"(train|critic)/clipped", "Share of tokens at which clipping holds the update back."),
    (r"train/correction.*", "Weight by which tokens of older weights are corrected."),
    (r"train/effective_samples", "Effective sample size of the corrected tokens, as a share."),
    (r"(train|critic)/expert_load/.+", "Tokens of the busiest expert, relative to the mean."),
    (r"(train|critic)/experts_idle", "Share of experts that no token visited."),
    (r"(train|critic)/router_entropy", "Mean entropy of the choice of experts, in nats."),
    (r"critic/explained", "Share of the returns' variance that the critic explains."),
    (r"critic/value", "Mean value that the critic gives."),
    (r"rollout/tokens", "Tokens that the policy wrote in this step's samples."),
    (r"rollout/length", "Mean tokens that the policy wrote per sample."),
    (r"rollout/length_max", "Tokens of the longest sample."),
    (r"rollout/truncated", "Share of samples that were cut at rollout.max_tokens or at the context."),
    (r"rollout/staleness", "Mean age of the weights that wrote the samples, in updates."),
    (
        r"rollout/zero_variance",
        "Share of groups whose samples all got the same reward: no signal for group-relative advantages.",
    ),
    (r"rollout/started", "Samples started since the last step."),
    (r"rollout/retried", "Generations and rewards that were tried again."),
    (r"rollout/failed", "Samples that failed."),
    (r"rollout/length_bias", "How much longer (or, below 0, shorter) accepted samples are than all that finished, as a share."),
    (r"rollout/groups_.+", "Groups that were not trained on, by fate."),
    (r"rollout/deadlines/.+", "Rewards that ran into a time limit, by the clock that struck."),
    (r"rollout/tokens_per_s", "Tokens written per second of generation."),
    (r"time/tokens_per_s", "Tokens written per second of the whole step."),
    (r"time/step", "Seconds of the step, without evaluation and checkpoints."),
    (r"time/checkpoint_write", "Seconds in which a checkpoint was written beside the loop."),
    (r"time/.+", "Seconds in a stage of the step."),
    (r"memory/.+", "Peak memory of a role in a stage, in GB: the sum of its processes, `max` the largest."),
    (r"data/overlong", "Prompts that were left out because they are longer than data.max_prompt_tokens."),
    (r"data/dropped/.+", "Rows that could not be used, by reason."),
    (r"data/truncated", "Rows that were longer than `max_tokens` and lost their end."),
    (r"data/epoch", "Passes over the largest dataset."),
    (r"judge/.+", "Questions to the judge: how many, how long, at what cost."),
)
"""Patterns of names and their meanings; the first that fits counts."""
_COMPILED = tuple((re.compile(pattern), meaning) for pattern, meaning in LEGEND)


def meaning(name: str) -> str:
    """Return what a metric means; an empty text for a name that is not ours."""
    return next((text for pattern, text in _COMPILED if pattern.fullmatch(name)), "")
