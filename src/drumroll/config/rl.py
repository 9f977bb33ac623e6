"""The config of reinforcement learning, and the checks that span its sections."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator
from typing_extensions import override

from drumroll.config.algorithm import GROUPED, WITHOUT_RATIO, AlgorithmConfig
from drumroll.config.distill import DemonstrationsConfig
from drumroll.config.divergence import DivergenceConfig
from drumroll.config.environment import NONE, EnvironmentConfig
from drumroll.config.rollout import RolloutConfig, default_length
from drumroll.config.run import RunConfig


class RLConfig(RunConfig):
    """Reinforcement learning: generate, score, train."""

    rollout: RolloutConfig = RolloutConfig()
    """Generation of training samples."""
    environment: EnvironmentConfig = NONE
    """What the policy talks to, turn by turn."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become gradients."""
    demonstrations: DemonstrationsConfig | None = None
    """Rows with answers that the policy imitates beside its own samples, by `algorithm.sft`."""

    @override
    def has_rollouts(self) -> bool:
        return True

    @override
    def rollout_section(self) -> RolloutConfig:
        return self.rollout

    @override
    def environment_section(self) -> EnvironmentConfig:
        return self.environment

    @override
    def has_episodes(self) -> bool:
        own = {dataset.environment for dataset in (*self.data.train.values(), *self.eval.sets.values())} - {None, "none"}
        return self.environment.use is not None or bool(own)

    @override
    def algorithm_section(self) -> AlgorithmConfig:
        return self.algorithm

    @override
    def demonstrations_section(self) -> DemonstrationsConfig | None:
        return self.demonstrations

    @override
    def divergence_section(self) -> DivergenceConfig | None:
        return self.algorithm.divergence if self.algorithm.teacher else None

    @override
    def batch_size(self) -> int:
        return self.rollout.prompts * self.rollout.most_samples

    @override
    def single_update(self) -> bool:
        samples = self.batch_size()
        return self.optim.epochs == 1 and (self.optim.minibatch or samples) >= samples

    @override
    def with_lengths(self, context: int | None) -> Self:
        if self.rollout.max_tokens is not None:
            return self
        longest = default_length(self.environment.context or context, self.data.max_prompt_tokens)
        made = self.model_copy(update={"rollout": self.rollout.model_copy(update={"max_tokens": longest})})
        if context is None or made.longest_trace() <= context or made.environment.mode == "step" or not made.has_episodes():
            return made
        return made.model_copy(update={"environment": self.environment.model_copy(update={"context": context})})

    @override
    def longest(self) -> int:
        return self.rollout.longest * (self.environment.max_turns if self.has_episodes() else 1)

    @override
    def longest_trace(self) -> int:
        turn, own = super().longest_trace(), self.environment
        if not self.has_episodes() or own.mode == "step":
            return turn
        return own.context or turn + (own.max_turns - 1) * 2 * self.rollout.longest

    @override
    def arithmetic(self) -> list[str]:
        prompts, samples = self.rollout.prompts, self.rollout.samples
        batch = prompts * samples
        mini = self.optim.minibatch or batch
        updates = batch // mini * self.optim.epochs
        traces = self.environment.max_turns if self.has_episodes() and self.environment.mode == "step" else 1
        most = batch * traces * self.longest_trace()
        return [
            f"{prompts} prompts × {samples} samples = {batch:,} samples a step, at most {batch * self.longest():,} new tokens",
            f"{batch:,} samples / minibatch {mini:,} × {self.optim.epochs} epochs = {updates} optimizer steps a step",
            f"at most {most:,} tokens a batch / micro_tokens {self.optim.micro_tokens:,} = at most {-(-most // self.optim.micro_tokens)} forward passes",
            f"{self.steps} steps × {batch:,} samples = {self.steps * batch:,} samples in all",
            f"engine: {min(self.roles.rollout.slots, batch):,} of {batch:,} samples generated at once",
        ]

    @model_validator(mode="after")
    def _is_a_trajectorys(self) -> Self:
        if self.environment.mode == "step" and self.environment.context is not None:
            raise ValueError(
                f"environment.context: {self.environment.context} bounds whole episodes, but with environment.mode: step a trace is "
                "one turn; data.max_prompt_tokens bounds what it shows"
            )
        if self.environment.mode == "step" and self.environment.earlier_turns == "sampled":
            raise ValueError(
                "environment.earlier_turns: sampled continues one trace, but with environment.mode: step every turn is a trace, which "
                "shows earlier turns as the chat template does; set environment.mode: trajectory"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        samples, mini = self.rollout.prompts * self.rollout.samples, self.optim.minibatch
        if mini is not None and samples % mini and not self.rollout.domains:
            fits = next(m for m in range(mini, 0, -1) if samples % m == 0)
            raise ValueError(
                f"{self.rollout.prompts} prompts × {self.rollout.samples} samples = {samples} samples do not divide into "
                f"minibatches of {mini}; optim.minibatch: {fits} would fit"
            )
        return self

    @model_validator(mode="after")
    def _has_a_reward(self) -> Self:
        if not any(self.rewards().values()) and not self.has_episodes():
            raise ValueError(
                "reward is missing: name a built-in (reward: exact) or your own function (reward: my_rewards:correct), or an environment (environment: {use: ...})"
            )
        return self

    @model_validator(mode="after")
    def _deterministic_is_synchronous(self) -> Self:
        if self.deterministic and (self.rollout.max_staleness > 0 or self.rollout.order != "draw"):
            raise ValueError(
                "deterministic: true needs rollout.order: draw and rollout.max_staleness: 0, because which weights write "
                f"which token depends on timing otherwise; got {self.rollout.order} and {self.rollout.max_staleness:g}"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_is_sound(self) -> Self:
        chosen, rollout = self.algorithm, self.rollout
        fewest = min([rollout.samples, *(d.samples for d in rollout.domains.values() if d.samples)])
        if chosen.advantage in GROUPED and fewest < 2:
            raise ValueError(
                f"algorithm.advantage: {chosen.advantage} compares the samples of a group, so rollout.samples must be at least 2, got 1"
            )
        if "group" in (chosen.reward_mean, chosen.reward_std) and fewest < 2:
            raise ValueError(
                f"algorithm.reward_mean: {chosen.reward_mean} and reward_std: {chosen.reward_std} compare the samples of a group, "
                "so rollout.samples must be at least 2, got 1"
            )
        if self.demonstrations is not None and not chosen.sft:
            raise ValueError("demonstrations are imitated by algorithm.sft, which is 0; give it a weight, for example 0.1")
        if chosen.teacher and not self.roles.teacher.models():
            raise ValueError(
                f"algorithm.teacher: {chosen.teacher:g} needs a model to learn from: name one under roles.teacher.model"
            )
        if chosen.advantage == "pass_at_k" and chosen.pass_k > fewest:
            raise ValueError(f"algorithm.pass_k: {chosen.pass_k} cannot be drawn from rollout.samples: {fewest}")
        if self.optim.epochs > 1 and chosen.loss in WITHOUT_RATIO:
            raise ValueError(
                f"optim.epochs: {self.optim.epochs} trains on samples again after the policy has moved, but algorithm.loss: {chosen.loss} "
                "has no ratio that would notice; set another loss (for example ppo), or epochs 1"
            )
        if rollout.max_staleness > 0 and chosen.loss in WITHOUT_RATIO and chosen.correction == "none":
            raise ValueError(
                f"rollout.max_staleness: {rollout.max_staleness:g} trains on samples of older weights, but algorithm.loss: {chosen.loss} "
                "has no ratio that would notice; set algorithm.correction (for example truncate), another loss, or staleness 0"
            )
        return self
