"""vLLM as an engine: its `AsyncLLM` behind our contract, for GPUs and for models too large for one process.

vLLM runs in its own processes. Only its frontend lives here, on an event loop in a separate thread, so that every
method can be called from any thread and any event loop. Three things make its samples fit to train on:

- Log-probs are those of the scaled logits (`processed_logprobs`), as the learner computes them.
- vLLM's own core, which samples the tokens, reports the version of each; the version changes only while the core is
  paused.
- Cached prefixes carry the version they were computed with (a salt). vLLM cannot empty that cache while requests run,
  and a request that arrives after a switch must not read keys and values from before it.

vLLM's workers receive new weights themselves (`weights/`) and shard them like a checkpoint; adapters travel as files. If
a stream breaks, vLLM stays paused until it has loaded a whole version. vLLM is imported only when an engine is made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from drumroll.config.accelerators import is_accelerator
from drumroll.config.engines import ENGINES
from drumroll.engines import Completion, EngineBackend, EngineLost, EngineSetup, Request
from drumroll.errors import ConfigError, ModelError, did_you_mean
from drumroll.models import tiny
from drumroll.models.loading import end_tokens
from drumroll.processes import accelerator
from drumroll.processes.rendezvous import LOOPBACK
from drumroll.sample import StopReason, Version, sample_seed
from drumroll.weights import SHOWN, Meeting, Named, Receiver, WeightManifest, WeightSyncError, WrongWeights, exhausted
from drumroll.weights.shared_memory import SharedSender
from drumroll.weights.transport import open_receiver

OWN = ("model", "logprobs_mode", "worker_extension_cls")
CPU_KV_BYTES = 2**30
T = TypeVar("T")


class VllmEngine:
    """Implements `Engine` with vLLM. `model` is a built-in, a Hugging Face directory or a hub id.

    `options` are fields of vLLM's `AsyncEngineArgs` (tensor_parallel_size, pipeline_parallel_size,
    enable_expert_parallel, enable_prefix_caching, enable_lora, max_lora_rank, dtype, gpu_memory_utilization, ...). They
    override the defaults; `max_num_seqs` and `max_model_len` override `slots` and `context`.

    With `top_p`, `top_k` or `min_p`, log-probs are those of the restricted distribution. On a CPU the key-value cache
    has 1 GiB unless `kv_cache_memory_bytes` is set.
    """

    def __init__(
        self, model: str, *, slots: int, context: int, eos: frozenset[int], options: Mapping[str, Any] | None = None
    ) -> None:
        defaults = {"max_num_seqs": slots, "max_model_len": context}
        arguments = _arguments(model, defaults, dict(options or {}))
        self.eos = sorted(eos)
        self.slots: int = arguments.max_num_seqs
        self.context: int = arguments.max_model_len
        self.version: Version = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="drumroll-vllm-")
        self._llm: Any = None
        self._adapter: Any = None
        self._sender: SharedSender | None = None
        self._sending = threading.Lock()
        self._whole = True  # no stream of weights has broken since the last whole one
        self._live: set[str] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._start(arguments))
        except Exception as error:
            self.close()
            raise ModelError(f"model: vLLM cannot serve {model}: {_reason(error)}") from error

    # --- the contract ---

    async def generate(self, request: Request) -> Completion:
        if len(request.tokens) >= self.context:
            return Completion(stop=StopReason.CONTEXT)
        return await asyncio.wrap_future(self._submit(self._generate(request)))

    def abort(self, request_id: str) -> None:
        self._abort(lambda: {request_id})

    def interrupt(self) -> None:
        self._abort(lambda: self._live)

    def set_version(self, version: Version) -> None:
        self.version = version
        self._call(self._llm.update_weight_version(str(version)))

    def load(self, version: Version, weights: Named, *, recompute: bool) -> None:
        """Send new weights from this process to vLLM's workers, each parameter by its name in a checkpoint."""
        if self._sender is None:
            self._sender = SharedSender(Meeting(LOOPBACK, 0, 1 + self.receivers(), kind="shared"), "vllm")
            self.connect(self._sender.meeting, 1, LOOPBACK)
        manifest = self._sender.announce(version)
        receiving = self._submit(self._switch(version, recompute, lambda: self._fetch(manifest)))
        with self._sending:
            try:
                self._sender.send(manifest, weights)
            except BaseException:
                with suppress(WeightSyncError):  # a consequence, unlike the loss of the engine
                    receiving.result()
                raise
        receiving.result()

    def receivers(self) -> int:
        return self._llm.vllm_config.parallel_config.world_size

    def connect(self, meeting: Meeting, first: int, address: str) -> None:
        self._call(self._llm.collective_rpc("meet_sender", args=(list(dataclasses.astuple(meeting)), first, address)))

    def receive(self, manifest: WeightManifest, *, recompute: bool) -> None:
        self._call(self._switch(manifest.version, recompute, lambda: self._fetch(manifest)))

    def load_adapter(self, version: Version, adapter: Named, config: Mapping[str, Any], *, recompute: bool = False) -> None:
        """Switch all requests to a new LoRA adapter, with PEFT's names and config (needs `enable_lora`)."""
        if self._adapter is None:
            raise ConfigError("roles.rollout.options: serving LoRA adapters by vLLM needs enable_lora: true.")
        self._write_adapter(dict(adapter), config)
        self._call(self._switch(version, recompute, lambda: self._llm.add_lora(_lora_request(self._folder, in_place=True))))

    def capacity(self) -> int:
        return self.slots

    def sleep(self, level: int = 1) -> None:
        """End all requests and free GPU memory.

        Level 1 moves the weights to the CPU, level 2 drops them (then call `load` after `wake`). Needs the option
        `enable_sleep_mode`; on a CPU nothing is freed.
        """
        self._call(self._llm.sleep(level))

    def wake(self) -> None:
        """Allocate the memory again. vLLM resumes with it, so an engine that holds parts of two versions is lost."""
        if not self._whole:
            raise self._lose("vLLM slept before it held a whole version of the weights")
        self._call(self._llm.wake_up())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._scratch.cleanup()
        with self._sending:
            if self._sender is not None:
                self._sender.close()

    # --- from the caller's thread to vLLM's loop ---

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise EngineLost("the engine is closed")
        return asyncio.run_coroutine_threadsafe(self._translated(work), self._loop)

    async def _translated(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work; raise `EngineLost` if vLLM died or the engine was closed meanwhile."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise EngineLost("the engine was closed") from None
            raise
        except Exception as error:
            if self._llm is not None and self._llm.errored:
                raise EngineLost(f"vLLM's engine process died: {_reason(error)}") from error
            raise

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    def _abort(self, which: Callable[[], set[str]]) -> None:
        """Abort requests in a task, which runs after the requests that were submitted before it."""

        async def abort() -> None:
            await self._llm.abort(list(which()))

        if not self._closed:
            self._submit(abort())

    # --- on vLLM's loop ---

    async def _start(self, arguments: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(arguments)
        await self._llm.collective_rpc("leave_with", args=(os.getpid(),))
        await self._llm.get_supported_tasks()  # cache the answer, so that a request is registered without waiting
        await self._llm.update_weight_version(str(self.version))
        if arguments.enable_lora:  # an adapter that changes nothing, so that requests running at the first switch have one too
            self._write_adapter(*_idle_adapter(*(await self._llm.collective_rpc("adaptable_layer"))[0]))
            self._adapter = _lora_request(self._folder)
            await self._llm.add_lora(self._adapter)

    async def _stop(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, request: Request) -> Completion:
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(request.tokens), cache_salt=str(self.version))
        self._live.add(request.id)
        outputs = self._llm.generate(prompt, self._params(request), request.id, lora_request=self._adapter)
        try:
            [final] = [output async for output in outputs]
        finally:
            self._live.discard(request.id)
        return _completion(request, final.outputs[0])

    def _params(self, request: Request) -> Any:
        """Return the sampling parameters.

        The seed is mixed with the length, so a request that is sent again continues with new random numbers.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            seed=sample_seed(request.seed, "vllm", len(request.tokens), 0),
            stop=list(sampling.stop),
            stop_token_ids=self.eos,
            ignore_eos=True,  # only `stop_token_ids` end a request, whatever the model's files say
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            logprobs=sampling.top_logprobs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _switch(self, version: Version, recompute: bool, bring: Callable[[], Awaitable[Any]]) -> None:
        """Switch between two tokens. If vLLM fails here, its state is inconsistent, so the engine is lost.

        If only the stream of weights breaks, vLLM stays paused, and a later switch resumes it.
        """
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self.version = version  # also the salt of requests that come from now on
            await bring()
            if recompute:
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.update_weight_version(str(version))
            if self._whole:
                await self._llm.resume_generation()
        except (WeightSyncError, WrongWeights):
            raise
        except Exception as error:
            raise self._lose(f"vLLM could not take version {version}: {_reason(error)}") from error

    def _lose(self, why: str) -> EngineLost:
        """Close an unusable engine; returns the error to raise."""
        threading.Thread(target=self.close, name="vllm-close").start()
        return EngineLost(why)

    async def _fetch(self, manifest: WeightManifest) -> None:
        """Let all workers receive a version; raises what broke the stream of one of them."""
        self._whole = False
        for broken, lacking in await self._llm.collective_rpc("receive_weights", args=(manifest.version, manifest.attempt)):
            if broken:
                raise WeightSyncError(f"Version {manifest.version} did not reach a worker of vLLM: {broken}")
            if lacking:
                raise WrongWeights(f"The weights lack parameters of vLLM's model: {', '.join(lacking)}.")
        self._whole = True

    # --- adapters ---

    @property
    def _folder(self) -> Path:
        return Path(self._scratch.name)

    def _write_adapter(self, adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Overwrite the adapter's files: vLLM reads them again after new base weights."""
        named = {name.replace(".default.", "."): value for name, value in adapter.items()}
        _write(named, self._folder / "new.safetensors").replace(self._folder / "adapter_model.safetensors")
        (self._folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))


class WeightReceiver:
    """Mixed into vLLM's workers and runs in their processes."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: Any
    receiver: Receiver | None = None

    def meet_sender(self, where: list[Any], first: int, address: str) -> None:
        """Meet a sender, as its receiver `first` plus this worker's rank, and leave the one before."""
        meeting = Meeting(*where)
        if meeting.device != "cpu":
            meeting = dataclasses.replace(meeting, device=str(self.device))
        if self.receiver is not None:
            with suppress(Exception):
                self.receiver.close()
        self.receiver = open_receiver(meeting, first + self.rank, address)

    def receive_weights(self, version: Version, attempt: int) -> tuple[str, list[str]]:
        """Load a version, like a checkpoint; returns why its stream broke, and some parameters that it lacked.

        A stream that breaks just ends for vLLM, which leaves every layer in order, though with weights of two versions.
        On a CPU, linear layers hold packed copies, which vLLM remakes layer by layer as weights arrive. An output layer
        that is tied to the embedding receives no weights, so its copy is remade here.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        broken, model = list[str](), self.model_runner.get_model()
        stream = exhausted(self._arriving(WeightManifest(version, attempt), broken))
        with set_current_vllm_config(self.vllm_config), _noted(model) as loaded, stream as weights:
            self.model_runner.reload_weights(weights_iterator=weights)
            for layer in model.modules():
                if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
                    layer.quant_method.process_weights_after_loading(layer)
        plain = self.vllm_config.model_config.quantization is None and loaded
        wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} if plain else set[str]()
        return " ".join(broken), sorted(wanted - loaded)[:SHOWN]

    def _arriving(self, manifest: WeightManifest, broken: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version as copies, because vLLM keeps those of a fused layer until it has all of its parts."""
        assert self.receiver is not None
        try:
            for name, tensor in self.receiver.receive(manifest):
                yield name, tensor.clone()
        except WeightSyncError as error:
            broken.append(str(error))

    def leave_with(self, owner: int) -> None:
        """End this process, and vLLM's core above it, when the owner's process is gone.

        A killed owner cannot shut them down itself.
        """
        above = os.getppid()

        def wait() -> None:
            gone = select.poll()
            gone.register(os.pidfd_open(owner), select.POLLIN)
            gone.poll()
            if above != owner:
                os.kill(above, signal.SIGKILL)
            os._exit(1)

        if hasattr(os, "pidfd_open"):  # Linux
            threading.Thread(target=wait, name="leave-with-owner", daemon=True).start()

    def adaptable_layer(self) -> tuple[str, int, int]:
        """Return the name and the input and output sizes of a layer that can take an adapter."""
        from vllm.lora.layers import RowParallelLinearWithLoRA

        named = self.model_runner.get_model().named_modules()
        name, layer = next((n, m.base_layer) for n, m in named if isinstance(m, RowParallelLinearWithLoRA))
        return name, layer.input_size, layer.output_size


def _arguments(model: str, defaults: dict[str, Any], options: dict[str, Any]) -> Any:
    """Make vLLM's arguments: those that exactness needs, then the user's options, then defaults for the machine."""
    _prepare_environment()
    try:
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            f"roles.rollout.backend: vllm needs vLLM ({error}): `pip install vllm` on GPUs, `make vllm` on a CPU."
        ) from error
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - set(OWN)
    for key in options:
        if key not in known:
            raise ConfigError(f"roles.rollout.options: vLLM has no option '{key}' to be set here.{did_you_mean(key, known)}")
    if model in tiny.RANDOM:
        trained = model.removesuffix("-random")
        raise ConfigError(f"roles.rollout.backend: vllm loads models from files, and {model} has none; use `{trained}`.")
    if current_platform.is_cpu():
        defaults |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": CPU_KV_BYTES}
    return AsyncEngineArgs(
        **{"disable_log_stats": True, "generation_config": "vllm", **defaults, **options},
        model=str(tiny.SHIPPED.get(model, model)),
        logprobs_mode="processed_logprobs",
        worker_extension_cls=f"{__name__}.{WeightReceiver.__name__}",
    )


def _prepare_environment() -> None:
    """Set environment variables that vLLM's processes inherit.

    They make vLLM quiet and start fresh processes, because this one has threads. On a CPU they give it as many threads
    as this process, not bound to cores that others may use, and disable the compiler.
    """
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    threads = str(torch.get_num_threads())
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads, "TORCH_COMPILE_DISABLE": "1"}
    for name, value in {**quiet, **({} if accelerator.count() else cpu)}.items():
        os.environ.setdefault(name, value)


def _completion(request: Request, output: Any) -> Completion:
    tokens, count = list(output.token_ids), request.sampling.top_logprobs
    flat = list(output.logprobs.logprobs) if tokens else []  # per token: itself, then the likeliest
    logprobs = flat[:: 1 + count]
    pairs = list(zip(output.logprobs.token_ids, flat, strict=True)) if tokens and count else []
    top = [[(int(t), p) for t, p in pairs[i + 1 : i + 1 + count]] for i in range(0, len(pairs), 1 + count)]
    versions = [int(span.version) for span in output.weight_versions or () for _ in range(span.start, span.end)]
    assert len(tokens) == len(logprobs) == len(versions), f"{request.id}: {len(tokens)}, {len(logprobs)}, {len(versions)}"
    return Completion(tokens, logprobs, versions, _stop_reason(request, output), top)


def _stop_reason(request: Request, output: Any) -> StopReason:
    if output.finish_reason == "stop":
        return StopReason.STOP_STRING if isinstance(output.stop_reason, str) else StopReason.EOS
    if output.finish_reason == "length":
        return StopReason.LENGTH if len(output.token_ids) >= request.sampling.max_tokens else StopReason.CONTEXT
    if output.finish_reason == "abort":
        return StopReason.ABORTED
    raise RuntimeError(f"vLLM ended request {request.id} with '{output.finish_reason}'")


def _idle_adapter(layer: str, size_in: int, size_out: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"{layer}.lora_A.weight": torch.zeros(1, size_in), f"{layer}.lora_B.weight": torch.zeros(size_out, 1)}
    return tensors, {"r": 1, "lora_alpha": 1, "target_modules": [layer.rpartition(".")[-1]]}


def _lora_request(folder: Path, *, in_place: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, str(folder), load_inplace=in_place)


@contextmanager
def _noted(model: Any) -> Generator[set[str]]:
    """Within the block the set collects the parameters that vLLM loads; it only logs those that are missing."""
    loaded, load = set[str](), model.load_weights

    def noting(weights: Named) -> Any:
        found = load(weights)
        loaded.update(found or ())
        return found

    model.load_weights = noting
    try:
        yield loaded
    finally:
        del model.load_weights


def _write(tensors: Mapping[str, Tensor], path: Path) -> Path:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    return path


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _make(setup: EngineSetup) -> VllmEngine:
    role, path = setup.role, Path(setup.model).expanduser()
    sizes = {f"{name}_parallel_size": size for name, size in role.parallel.items()}
    lora = {} if setup.lora is None else {"enable_lora": True, "max_lora_rank": max(8, setup.lora.rank)}
    naps = {"enable_sleep_mode": True} if is_accelerator(setup.device) else {}
    several = {"distributed_executor_backend": "mp"} if sizes else {}  # else it would ask the Ray around it for devices
    return VllmEngine(
        str(path) if path.exists() else setup.model,
        slots=role.slots,
        context=setup.context,
        eos=end_tokens(setup.model),
        options={"dtype": setup.dtype, **sizes, **several, **lora, **naps, **role.options},
    )


BACKEND = EngineBackend(_make, ENGINES["vllm"])
