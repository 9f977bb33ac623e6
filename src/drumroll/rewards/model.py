"""A reward model: a sequence classifier that scores a prompt with its completion.

Samples are scored when they come, and those that wait at the same time in one pass: nothing waits for a batch to fill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from drumroll.config.roles import RewardModelRole
from drumroll.data.render import Content, Renderer
from drumroll.errors import ConfigError, ModelError
from drumroll.processes.memory import Peak, peak_gb
from drumroll.rewards import REWARDS, Rate
from drumroll.rewards.templates import spelled


class Workers(Protocol):
    """The workers of the role, as `workers.group.WorkerGroup` calls them."""

    @property
    def size(self) -> int: ...
    async def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any: ...
    async def close(self) -> None: ...


class Classifier:
    """The worker of the role: token sequences in, a number each out."""

    def __init__(self, role: RewardModelRole, device: str = "auto") -> None:
        import torch

        from drumroll.models.loading import load_classifier

        self.role = role
        self.module, self._pad = load_classifier(role.model, dtype=role.dtype, device=device)
        self.labels = int(self.module.config.num_labels)
        if role.label is not None and role.label >= self.labels:
            raise ModelError(f"roles.reward_model.label: {role.label}, but {role.model} has {self.labels} outputs.")
        self._torch = torch

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One number per row; rows are padded on the right, and what is padded is not attended to."""
        torch, width = self._torch, max(map(len, rows))
        tokens = torch.full((len(rows), width), self._pad)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        device = self.module.device
        with torch.inference_mode():
            logits = self.module(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits.float()
        if self.labels == 1 and self.role.label is None:
            return logits[:, 0].tolist()
        chosen = self.labels - 1 if self.role.label is None else self.role.label
        return logits.softmax(-1)[:, chosen].tolist()

    def memory(self) -> Peak:
        """Peak memory since the last call."""
        return peak_gb()


class RewardModel:
    """What a reward asks: puts together what waits, and gives it to the next free worker.

    `alone`: score every sample by itself, because who waits together depends on timing, and the last digits on who is padded.
    """

    def __init__(self, role: RewardModelRole, group: Workers, tokenizer: Any, *, alone: bool = False) -> None:
        self.role, self.group = role, group
        self.renderer = Renderer(tokenizer).given(role.template, "roles.reward_model.template")
        if (role.system is not None or role.chat) and not self.renderer.has_template:
            key = "system" if role.system is not None else "chat"
            raise ConfigError(f"roles.reward_model.{key} needs a chat template, and the tokenizer of {role.model} has none.")
        self._most = 1 if alone else role.batch_size
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._free = list(range(group.size))
        self._running: set[asyncio.Task[None]] = set()
        self.passes = 0

    async def __call__(self, prompt: Content, completion: str) -> float:
        """The score of a completion."""
        tokens = self._tokens(prompt, completion)[-self.role.max_tokens :]
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        asyncio.get_running_loop().call_soon(self._start)
        return await future

    def _tokens(self, prompt: Content, completion: str) -> list[int]:
        """By the model's chat template, as plain text, or (encoders such as BERT) as a pair of texts."""
        tokenizer, text = self.renderer.tokenizer, spelled(prompt)
        if tokenizer.eos_token_id is None:
            return self.renderer.controls.pair(text, completion)
        content = prompt if self.renderer.has_template else text
        shown = {"chat": self.role.chat, "system": self.role.system}
        return [*self.renderer.prompt(content, **shown), *self.renderer.answer(content, completion, **shown)]

    def _start(self) -> None:
        self._waiting = [each for each in self._waiting if not each[1].done()]
        while self._waiting and self._free:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            task = asyncio.ensure_future(self._pass(self._free.pop(), batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _pass(self, rank: int, batch: list[tuple[list[int], asyncio.Future[float]]]) -> None:
        try:
            async with asyncio.timeout(self.role.timeout):
                scores = await self.group.call(rank, Classifier.score, [tokens for tokens, _ in batch])
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        finally:
            self.passes += 1
            self._free.append(rank)
            self._start()

    async def close(self) -> None:
        """Free the workers."""
        for task in self._running:
            task.cancel()
        await self.group.close()


@REWARDS.register("reward_model")
async def reward_model(prompt: Any, completion: str, reward_model: Rate) -> float:
    """What the reward model gives."""
    return await reward_model(prompt, completion)
