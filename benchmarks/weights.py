"""Measures a weight update by each transport of weight sync, against a plain copy of the same bytes on the same machine.

The weights are random, in the shapes of SmolLM2-135M in fp32 (538 MB). An update is timed from the learner's `send` until the
engine, another process, has all tensors: by shared memory copied into its parameters, by broadcast received, as the peer's one
tensor is; the times until loaded from there are beside them. Ours and the peer take turns in the same run. Ours holds two
buckets on each side, the peer all weights twice.

python benchmarks/weights.py
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import figure
from torch import Tensor

from drumroll.config.loading import load
from drumroll.weights import Meeting, Receiver, Sender
from drumroll.weights.broadcast import BroadcastReceiver, BroadcastSender
from drumroll.weights.shared_memory import SharedReceiver, SharedSender
from drumroll.workers.runtime import open_workers

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "recipe.yaml"
REPEATS = 9
LAYERS, HIDDEN, KV, INNER, VOCABULARY = 30, 576, 192, 1536, 49152


def smollm2() -> Iterator[tuple[str, Tensor]]:
    """Random tensors in the shapes of SmolLM2-135M."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    yield "model.embed_tokens.weight", torch.randn(VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        for name, shape in layer.items():
            yield f"model.layers.{i}.{name}.weight", torch.randn(shape)
    yield "model.norm.weight", torch.randn(HIDDEN)


def raw_group(meeting: Meeting, rank: int) -> Any:
    """Plain gloo, as the peer of our broadcast."""
    timeout = timedelta(seconds=meeting.seconds)
    store = dist.TCPStore(meeting.host, meeting.port, None, rank == 0, timeout, wait_for_workers=False)
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


def engine(calls: Connection, shared: Meeting, wire: Meeting, peer: Meeting) -> None:
    """The other process: receives a manifest and copies it into its parameters, or takes part in the peer's broadcast."""
    torch.set_num_threads(1)
    parameters = {name: torch.zeros_like(tensor) for name, tensor in smollm2()}
    flat = torch.zeros(sum(p.numel() for p in parameters.values()))
    receivers: dict[str, Receiver] = {"shared": SharedReceiver(shared, 1), "broadcast": BroadcastReceiver(wire, 1)}
    group = raw_group(peer, 1)
    while (call := calls.recv()) is not None:
        transport, manifest, loaded = call
        if transport == "gloo":
            group.broadcast(flat, 0).wait()
            received = zip(parameters, flat.split([p.numel() for p in parameters.values()]), strict=True)
        else:
            received = receivers[transport].receive(manifest)
        for name, tensor in received:
            if loaded:
                parameters[name].copy_(tensor.view_as(parameters[name]))
        calls.send("done")


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(*works: Callable[[], object]) -> list[float]:
    """Median milliseconds of each, taken in turn."""
    for work in works * 2:
        work()
    times = [[seconds(work) for work in works] for _ in range(REPEATS)]
    return [round(statistics.median(column) * 1e3, 1) for column in zip(*times, strict=True)]


def between_processes() -> None:
    """Shared memory against a memory copy, and our broadcast against gloo's own of one flat tensor."""
    tensors = dict(smollm2())
    flat = torch.cat([t.flatten() for t in tensors.values()])
    target = torch.zeros_like(flat)
    shared, wire = SharedSender(Meeting("127.0.0.1", 0, 2), "benchmark"), BroadcastSender(Meeting("127.0.0.1", 0, 2))
    senders: dict[str, Sender] = {"shared": shared, "broadcast": wire}
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = get_context("spawn")
    calls, theirs = context.Pipe()
    meetings = shared.meeting, wire.meeting, Meeting("127.0.0.1", store.port, 2)
    process = context.Process(target=engine, args=(theirs, *meetings), daemon=True)
    process.start()
    group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=300))
    versions = count()

    def publish(transport: str, *, loaded: bool = True) -> None:
        manifest = senders[transport].announce(next(versions))
        calls.send((transport, manifest, loaded))
        senders[transport].send(manifest, tensors.items())
        calls.recv()

    def gloo(*, loaded: bool = True) -> None:
        calls.send(("gloo", None, loaded))
        group.broadcast(flat, 0).wait()
        calls.recv()

    facts = {"repeats": REPEATS, "megabytes": round(flat.numel() * flat.itemsize / 1e6), "threads": 1}
    first = seconds(lambda: publish("shared")) * 1e3
    ours, copy = alternate(lambda: publish("shared"), lambda: target.copy_(flat))
    times = {"publish_to_loaded_ms": ours, "memory_copy_ms": copy, "first_publish_ms": round(first, 1)}
    figure("weights/shared_memory_fraction", copy / ours, "x", goal=0.35, **times, **facts)
    ours, peer = alternate(lambda: publish("broadcast", loaded=False), lambda: gloo(loaded=False))
    loaded, peer_loaded = alternate(lambda: publish("broadcast"), gloo)
    times = {"ours_ms": ours, "gloo_ms": peer, "ours_loaded_ms": loaded, "gloo_loaded_ms": peer_loaded}
    figure("weights/broadcast_fraction_of_gloo", peer / ours, "x", goal=0.8, **times, **facts)
    calls.send(None)
    process.join()
    for sender in senders.values():
        sender.close()


async def in_process() -> None:
    """The local runtime at staleness 0, where engines generate with the learner's own weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(str(RECIPE), [f"output={folder}", "threads=1", "rollout.max_staleness=0"]).config
    workers = await open_workers(config)
    times: list[float] = []
    for version in range(100):
        began = time.perf_counter()
        await workers.publish(version)
        times.append(time.perf_counter() - began)
    await workers.close()
    figure("weights/in_process_ms", statistics.median(times) * 1e3, "ms", goal=1.0, at_most=True, repeats=len(times))


def main() -> None:
    """All figures."""
    torch.set_num_threads(1)
    asyncio.run(in_process())
    between_processes()


if __name__ == "__main__":
    main()
