"""What Megatron-Core 0.16.1 needs to run on a torch without CUDA. Test processes install it; production code never does.

`install()` patches torch for the whole process: CUDA's current device is the CPU, streams and events do nothing. Processes of
a Ray cluster install it at their start if `environment()` is in the environment of the run.
"""

import contextlib
import os
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

SITE = Path(__file__).parent / "megatron_site"
FACTORIES = ("empty", "ones", "tensor", "zeros")


class Nothing:
    """In the place of streams and events."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: Nothing()


def ignoring():
    """A function that does nothing; torch's compiler wants another one for each name."""
    return lambda *_, **__: None


def on_cpu(plain):
    """A factory of tensors that takes `cuda` for the CPU."""

    def make(*given, **named):
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return plain(*given, **named)

    return make


def install():
    if getattr(torch.cuda, "on_cpu", False):
        return
    torch.cuda.on_cpu = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch._dynamo.config.disable = True  # nothing is compiled
    torch.cuda.set_device, torch.cuda.synchronize = ignoring(), ignoring()
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = ignoring(), ignoring()
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.record_stream = ignoring()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    _types()
    _splits()
    _megatron()


def _types():
    """The optimizer asks whether a tensor is a torch.cuda.FloatTensor."""
    plain = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: plain(self, *a, **k) if a or k else f"torch.cuda.{plain(self).split('.')[-1]}"


def _splits():
    """Layers of experts give sizes as tensors and arrays; gloo takes lists."""
    plain = dist.all_to_all_single

    def listed(sizes):
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    def exchange(output, given, output_split_sizes=None, input_split_sizes=None, **named):
        return plain(output, given, listed(output_split_sizes), listed(input_split_sizes), **named)

    dist.all_to_all_single = exchange


def _megatron():
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe, "te_general_gemm"):  # 0.16.1 forgets the name without TransformerEngine
        moe.te_general_gemm = None


def environment():
    """The environment of processes in which Megatron-Core is to run on a CPU."""
    return {"PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])}
