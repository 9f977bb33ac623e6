"""The plain PyTorch learner: a device a rank, CPU or CUDA by the same code; ranks are data-parallel.

It does only needed work: packed tokens without padding, the prompt that samples share once, logits only where a token
is trained and in chunks, micro-batches by a token budget. The result does not depend on how a batch is cut, because
every token carries its share of the loss.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumroll.algorithms.losses import Tokens, ValueLoss
from drumroll.batch import Batch
from drumroll.config.optim import OptimConfig
from drumroll.errors import AlgorithmError, Interrupted, PeerFailed, StoreError
from drumroll.learners import Metrics, Update
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.learners.totals import Totals
from drumroll.models.adapters import save_model, without_adapters
from drumroll.models.head import score
from drumroll.models.loading import LoadedModel
from drumroll.models.prefix_tree import PrefixTree

STATE = "learner.json"
MASTER = "master.safetensors"
MOMENTS = "optimizer.safetensors"


class TorchLearner:
    """Implements `Learner`. Working weights may be bfloat16; gradients add up in float32, and the optimizer works in it.

    Without `config` it is frozen: it has no optimizer and only computes log-probs. Dropout stays off in updates too:
    the log-probs trained on must be those of the policy that sampled.
    """

    area = "train"  # of its metrics

    def __init__(self, model: LoadedModel, config: OptimConfig | None, *, total_steps: int = 1, ranks: Ranks = ALONE) -> None:
        self.model = model
        self.ranks = ranks
        self.config = config or OptimConfig()
        self.total_steps = total_steps
        self.step = 0
        self._stop = threading.Event()
        self._partial = False
        self.device = next(model.module.parameters()).device
        model.module.eval()
        if config is None:
            model.module.requires_grad_(False)
            return
        self.names, self.working = zip(*((n, p) for n, p in model.module.named_parameters() if p.requires_grad), strict=True)
        self.master = [p if p.dtype in (torch.float32, torch.float64) else p.detach().float() for p in self.working]
        for master, working in zip(self.master, self.working, strict=True):
            if master is not working:
                working.register_post_accumulate_grad_hook(partial(_accumulate, master))
        self.optimizer = torch.optim.AdamW(self._groups(), lr=config.lr, betas=config.betas, fused=True)

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: weight decay spares norms and biases."""
        spared = [p.dim() < 2 or name.endswith("bias") for name, p in zip(self.names, self.master, strict=True)]
        return [
            {"params": [p for p, spare in zip(self.master, spared, strict=True) if spare is kind], "weight_decay": decay}
            for kind, decay in ((False, self.config.weight_decay), (True, 0.0))
        ]

    # --- passes ---

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        return self._each_token(batch, lambda micro: self._forward(micro, temperature, entropy_gradient=False)[0])

    def reference_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        with without_adapters(self.model.module):
            return self.logprobs(batch, temperature)

    def values(self, batch: Batch) -> Tensor:
        raise NotImplementedError("a policy has no values")

    def _each_token(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """[tokens of this rank's share] what `compute` gives for trained tokens, 0 elsewhere; without gradient."""
        batch = self._share(batch)
        result = torch.zeros(len(batch.tokens))
        starts = torch.cumsum(batch.lengths, 0) - batch.lengths
        with torch.no_grad():
            for traces in batch.micro_batches(self.config.micro_tokens):
                self._check_stop()
                micro = batch.select(traces)
                where = torch.cat([torch.arange(int(starts[t]), int(starts[t] + batch.lengths[t])) for t in traces])
                result[where[micro.mask]] = compute(micro).float().cpu()
        return result

    def _forward(self, micro: Batch, temperature: float, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies at the trained tokens of a micro-batch."""
        tree = micro.tree()
        before = tree.node_of[micro.mask.nonzero()[:, 0] - 1].to(self.device)
        tokens, chosen = tree.tokens.to(self.device), micro.tokens[micro.mask].to(self.device)
        layout = PrefixTree(tree.paths, self.device)
        return score(self.model.module, tokens, layout, before, chosen, temperature, entropy_gradient=entropy_gradient)

    # --- the update ---

    def update(self, work: Update) -> Metrics:
        totals = Totals(self.area)
        with self._agreed():
            minibatches = [] if work.idle else self._minibatches(work.batch)
        for mini in minibatches * self.config.epochs:
            self._minibatch(mini, work, totals)
            self._partial = True
        self.step += 1
        self._partial = False
        return {} if work.idle else totals.metrics()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in zip(self.names, self.working, strict=True)}

    def interrupt(self) -> None:
        self._stop.set()

    def _share(self, batch: Batch) -> Batch:
        return batch if self.ranks.count == 1 else batch.select(batch.shares(self.ranks.count)[self.ranks.rank])

    def _minibatches(self, batch: Batch) -> list[Batch]:
        size = self.config.minibatch or batch.num_samples
        owner = batch.sample_of.tolist()
        chunks: list[list[int]] = [[] for _ in range(math.ceil(batch.num_samples / size))]
        for trace, sample in enumerate(owner):
            chunks[sample // size].append(trace)
        return [batch.select(traces) for traces in chunks if traces]

    def _minibatch(self, mini: Batch, work: Update, totals: Totals) -> None:
        """Take one optimizer step with all ranks, or with none. Gradients of ranks add up, as each has its share of the loss."""
        with self._agreed():
            self._gradients(mini, work, totals)
        self.ranks.add([master.grad for master in self.master if master.grad is not None])
        with self._agreed():
            norm = self._clip()
        with self.ranks.failing_together():
            self.optimizer.step()
            self._drop_gradients()
            self._refresh_working()
        totals.steps.append((norm, self.learning_rate()))

    @contextmanager
    def _agreed(self) -> Generator[None]:
        """Run a block of local work on every rank; if it fails on one, all drop their gradients and raise."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        try:
            stopped = self.ranks.any(failure is not None)
        except PeerFailed as lost:
            if failure is None:
                raise
            raise failure from lost
        if stopped:
            self._drop_gradients()
            raise failure or Interrupted("another rank stopped in this update")

    def _gradients(self, mini: Batch, work: Update, totals: Totals) -> None:
        """Compute the gradients of this rank's share of a minibatch. Shares of the loss are those of the whole minibatch."""
        mini = self._share(mini.with_(weights=work.aggregate(mini)))
        self._recomputing(True)
        try:
            needed = _needed(mini) if getattr(work.loss, "skips_zero_advantage", False) else mini
            for traces in needed.micro_batches(self.config.micro_tokens):
                self._check_stop()
                self._backward(needed.select(traces), work, totals)
            self._check_stop()
        finally:
            self._recomputing(False)
        for master in self.master:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _recomputing(self, on: bool) -> None:
        """Layers that recompute activations do so in training mode only; all others, dropout among them, never leave eval."""
        for layer in self.model.module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = on

    def _backward(self, micro: Batch, work: Update, totals: Totals) -> None:
        if not micro.mask.any():
            return
        assert micro.weights is not None
        weights = micro.weights[micro.mask].to(self.device)
        per_token, stats = self._loss(micro, work)
        loss = (per_token * weights).sum()
        if not torch.isfinite(loss):
            self._explain_loss(per_token, micro, work)
        loss.backward()
        totals.add(loss.detach(), len(weights), stats)

    def _loss(self, micro: Batch, work: Update) -> tuple[Tensor, dict[str, Tensor]]:
        """[trained tokens] the loss, and diagnostics for people."""
        assert not isinstance(work.loss, ValueLoss)
        logprobs, entropy = self._forward(micro, work.temperature, entropy_gradient=work.loss.entropy_gradient)
        old, advantages = self._trained(micro, micro.old), self._trained(micro, micro.advantages)
        tokens = Tokens(
            logprobs=logprobs,
            entropy=entropy,
            old=logprobs.detach() if old is None else old,
            behaviour=micro.behaviour[micro.mask].to(self.device),
            advantages=torch.zeros_like(logprobs) if advantages is None else advantages,
            reference=self._trained(micro, micro.reference),
            teacher=self._trained(micro, micro.teacher),
            sequence=micro.trace_of_token()[micro.mask].to(self.device),
            rewards=micro.rewards[micro.sample_of_token()][micro.mask].to(self.device),
        )
        per_token, stats = work.loss(tokens)
        now = logprobs.detach()
        before = tokens.old if self._partial else now  # the first optimizer step starts from the policy before the update
        gap = before - tokens.behaviour
        kl = tokens.behaviour - now
        return per_token, {**stats, "entropy": entropy.detach(), "kl": kl, "mismatch": gap.abs(), "behaviour_ratio": gap.exp()}

    def _trained(self, micro: Batch, column: Tensor | None) -> Tensor | None:
        return None if column is None else column[micro.mask].to(self.device)

    def _explain_loss(self, per_token: Tensor, micro: Batch, work: Update) -> None:
        """No NaN escapes: name the loss and the sample."""
        bad = int((~torch.isfinite(per_token.detach())).nonzero()[0, 0]) if not torch.isfinite(per_token).all() else 0
        sample = int(micro.sample_of_token()[micro.mask][bad])
        raise AlgorithmError(
            f"loss '{work.loss.name}' gave {per_token[bad].item()} for a token of sample {sample} of the batch "
            f"(domain '{micro.domains[sample]}') at step {self.step + 1}."
        )

    def _clip(self) -> float:
        """Clip the gradient and set the learning rate; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.master, self.config.grad_clip or math.inf)
        if not torch.isfinite(norm):
            raise AlgorithmError(
                f"the gradient at step {self.step + 1} has norm {norm.item()} though the loss is finite; the weights were left as they are."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        return float(norm)

    def _refresh_working(self) -> None:
        with torch.no_grad():
            for master, working in zip(self.master, self.working, strict=True):
                if master is not working:
                    working.copy_(master)

    def learning_rate(self) -> float:
        """The rate of the current step: linear warm-up, then the schedule down to 0 at the last step."""
        config = self.config
        if self.step < config.warmup:
            return config.lr * (self.step + 1) / (config.warmup + 1)
        progress = (self.step - config.warmup) / max(1, self.total_steps - config.warmup)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, progress))),
        }[config.schedule]
        return config.lr * max(0.0, factor)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted("the update was interrupted")

    # --- state ---

    def save(self, folder: Path) -> None:
        save_file({n: p.detach().contiguous() for n, p in zip(self.names, self.master, strict=True)}, folder / MASTER)
        moments: dict[str, Tensor] = {}
        for name, parameter in zip(self.names, self.master, strict=True):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{name}/{key}"] = value.contiguous()
        save_file(moments, folder / MOMENTS)
        (folder / STATE).write_text(json.dumps({"step": self.step}))

    def load(self, folder: Path) -> None:
        master = load_file(folder / MASTER)
        if set(master) != set(self.names):
            raise StoreError(f"the checkpoint {folder} holds another model than the config names")
        moments = load_file(folder / MOMENTS)
        with torch.no_grad():
            for name, parameter in zip(self.names, self.master, strict=True):
                parameter.copy_(master[name])
        state: dict[int, dict[str, Tensor]] = {}
        name_of = {parameter: name for name, parameter in zip(self.names, self.master, strict=True)}
        ordered = [name_of[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, name in enumerate(ordered):
            keys = {k.rpartition("/")[2]: v for k, v in moments.items() if k.rpartition("/")[0] == name}
            if keys:
                state[index] = {k: v if k == "step" else v.to(self.device) for k, v in keys.items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.step = json.loads((folder / STATE).read_text("utf-8"))["step"]
        self._refresh_working()

    def export(self, folder: Path) -> None:
        save_model(self.model, folder)

    # --- sharing a device ---

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """Parameters keep their identity, so that optimizer and engine still hold the same ones."""
        if self.device.type == "cpu":
            return
        for tensor in [*self.model.module.parameters(), *self.model.module.buffers(), *self.master]:
            tensor.data = tensor.data.to(device)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)
        torch.cuda.empty_cache()


def _accumulate(master: Tensor, working: Tensor) -> None:
    """Add a working weight's new gradient to its master's in float32, and free it."""
    assert working.grad is not None
    if master.grad is None:
        master.grad = working.grad.float()
    else:
        master.grad.add_(working.grad)
    working.grad = None


def _needed(mini: Batch) -> Batch:
    """Without the traces whose advantage is zero throughout: they add nothing to the gradient.

    Their tokens still count in the weights, which were computed before, and the optimizer still steps.
    """
    assert mini.advantages is not None
    moved = torch.zeros(mini.num_traces).index_add_(0, mini.trace_of_token(), mini.advantages.abs())
    return mini.select(moved.nonzero()[:, 0].tolist())
