"""One place knows accelerators by name; on a machine without one it answers for the CPU."""

import io
import platform
import re
import tokenize
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drumroll.config.accelerators import ACCELERATORS, FAMILIES, Kind, is_accelerator
from drumroll.config.cluster import ClusterConfig
from drumroll.errors import ConfigError
from drumroll.processes import accelerator

SRC = Path(__file__).parents[2] / "src" / "drumroll"
PLACE = {"config/accelerators.py", "processes/accelerator.py"}
MEGATRON = {"learners/backends/megatron.py", "learners/megatron/groups.py", "learners/megatron/model.py"}
"""Megatron-Core computes on CUDA alone, and names it in its own functions."""
BACKENDS = {family.collectives for family in FAMILIES.values()} - {"gloo"}
NAMED = re.compile(rf"(?<![a-z])({'|'.join({*ACCELERATORS, *BACKENDS})})(?![a-z])", re.IGNORECASE)


def code_of(text):
    """The tokens of a program but for comments and docstrings: those may name an accelerator as an example for users."""
    start = True  # of a statement, where a string is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and start):
            continue
        start = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
        yield token.start[0], token.string


def named(text):
    return [f"{line}: {word}" for line, word in code_of(text) if NAMED.search(word)]


def test_nothing_else_names_an_accelerator():
    found = {p.relative_to(SRC).as_posix(): named(p.read_text()) for p in sorted(SRC.rglob("*.py"))}
    assert {path: where for path, where in found.items() if where and path not in PLACE | MEGATRON} == {}
    assert found["config/accelerators.py"], "the search finds nothing at all"


@pytest.mark.parametrize(
    "line", ['x = "cuda:0"', "torch.cuda.empty_cache()", "steer_nccl(1)", 'f(a, "xpu")', "Kind.MPS", 'e["HCCL_SOCKET_IFNAME"]']
)
def test_the_search_finds_names(line):
    assert named(f'"""A docstring about cuda."""\n\n{line}  # cuda\n') != []
    assert named('"""cuda."""\n# nccl\nclient = AsyncClient(lamps)\n') == []


def test_without_an_accelerator_everything_is_the_cpus():
    if accelerator.built():
        pytest.skip("this torch has an accelerator")
    assert (accelerator.kind(), accelerator.count(), accelerator.devices()) == ("cpu", 0, ())
    assert accelerator.total_memory() is None
    assert accelerator.take_peak() == 0
    assert accelerator.pick("auto") == accelerator.pick("cpu") == torch.device("cpu")
    for work in (accelerator.empty_cache, accelerator.synchronize, lambda: accelerator.select("cpu")):
        assert work() is None
    for device in ("xpu:1", "npu"):  # the second is a name that torch itself does not know here
        with pytest.raises(
            ConfigError, match=f"devices: {device} was asked for, but torch sees no such device here, only the CPU"
        ):
            accelerator.pick(device)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cuda:3", "nccl"), ("xpu", "xccl"), ("npu:0", "hccl"), ("cpu", "gloo"), ("mps", "gloo"), ("privateuseone", "gloo")],
)
def test_each_device_has_its_collectives(device, backend):
    assert accelerator.collectives(device) == backend
    assert is_accelerator(device) is (device.partition(":")[0] in ("cuda", "xpu", "npu", "mps"))


def test_torch_agrees_about_collectives():
    ours = {kind.value: family.collectives for kind, family in FAMILIES.items()}
    theirs = torch.distributed.Backend.default_device_backend_map
    assert {name: backend for name, backend in theirs.items() if name in ours}.items() <= ours.items()


def test_a_config_may_name_every_kind_and_no_other():
    for kind in ("auto", *Kind):
        assert ClusterConfig(kind=kind).kind == kind
    with pytest.raises(ValueError, match="kind"):
        ClusterConfig(kind="gpu")


def test_an_accelerator_is_asked_through_torch(monkeypatch):
    """With torch's answers for a machine with two GPUs."""
    told = []
    answers = SimpleNamespace(
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        device_count=lambda: 2,
        get_memory_info=lambda index: (1, (index + 1) * 2**30),
        memory_reserved=lambda: 5,
        max_memory_allocated=lambda: 7,
        reset_peak_memory_stats=lambda: told.append("reset"),
        empty_cache=lambda: told.append("emptied"),
        synchronize=lambda: told.append("waited"),
        set_device_index=told.append,
    )
    monkeypatch.setattr(torch, "accelerator", answers)
    module = SimpleNamespace(get_device_name=lambda i: f"GPU {i}", get_device_capability=lambda i: (7 + i, 0))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert (accelerator.kind(), accelerator.pick("auto"), accelerator.pick("cuda:1")) == (
        "cuda",
        torch.device("cuda"),
        torch.device("cuda", 1),
    )
    assert accelerator.devices() == (("GPU 0", 2**30, False), ("GPU 1", 2**31, True))
    assert (accelerator.take_peak(), accelerator.takes("nccl"), accelerator.takes("gloo")) == (7, "cuda", "cpu")
    accelerator.empty_cache()
    accelerator.synchronize()
    accelerator.select("cuda:1")
    accelerator.select("cpu")
    assert told == ["reset", "emptied", "waited", 1]
    for device in ("mps", "cuda:2"):
        with pytest.raises(ConfigError, match=f"{device} .* no such device here, 'cuda' up to cuda:1; use 'auto' or 'cpu'"):
            accelerator.pick(device)


def test_nothing_is_copied_to_a_cpu():
    array = np.arange(3)
    sent = accelerator.send(array, "cpu")
    assert sent.data_ptr() == array.ctypes.data
    assert accelerator.send(sent, "cpu") is sent


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no call for it")
def test_holes_in_the_heap_go_back_to_the_system():
    """Freed below a tensor that is held, memory stays with the process until somebody asks for it back."""

    def resident():
        return int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

    held = [torch.ones(16_000) for _ in range(4000)]  # 64 KB each, from the heap
    full, held = resident(), held[-1:]
    assert resident() > full - 50
    accelerator.empty_cache()
    assert resident() < full - 200
    assert held
