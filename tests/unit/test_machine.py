"""What a machine has is read from the kernel's files (here: trees of files as kernels write them), then judged."""

import dataclasses
import io
import json
import os
import socket

import pytest
from rich.console import Console

from drumroll.checks.machine import (
    Cpu,
    Gpu,
    Machine,
    Memory,
    Ray,
    Space,
    Vllm,
    ask_ray,
    look,
    read_cpu,
    read_gpus,
    read_memory,
    try_bwrap,
)
from drumroll.checks.readiness import as_json, parts, readiness_tables, size, warnings

GIB = 2**30
XEON = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n\nprocessor\t: 1\n"
OLD = "model name\t: Old\nflags\t\t: fpu sse2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"


@pytest.fixture
def tree(tmp_path):
    """A root with the given files."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def machine(**changes):
    """A good machine without GPUs, with changes."""
    sets = {"avx2": True, "avx512": True, "amx": True, "bf16": True}
    names = ("python", "drumroll", "torch", "transformers", "ray", "vllm", "megatron-core", "deepspeed", "peft")
    good = Machine(
        cpu=Cpu("Xeon", "x86_64", 8, 8, 8, sets),
        gpus=(),
        gpu_driver=False,
        gpu_problem="",
        memory=Memory(64 * GIB, 48 * GIB),
        disk=Space(500 * GIB, 100 * GIB),
        shared_memory=Space(32 * GIB, 32 * GIB),
        versions=dict.fromkeys(names, "1.0"),
        vllm=Vllm(for_cpu=True),
        ray=Ray(),
        bwrap="/usr/bin/bwrap",
        bwrap_problem="",
        compiler="/usr/bin/cc",
        browser="/usr/bin/chromium",
        omp_threads=None,
    )
    return dataclasses.replace(good, **changes)


def cpu(cores=8.0, allowed=8, **sets):
    return Cpu("Xeon", "x86_64", cores, allowed, 8, {"avx2": True, "avx512": True, "amx": False, "bf16": True} | sets)


def part(found, name):
    [one] = [p for p in parts(found) if p.name.endswith(name)]
    return one


# --- reading ---


def test_processor_and_instruction_sets(tree):
    root = tree({"proc/cpuinfo": XEON})
    found = read_cpu(root, allowed=2, present=4, architecture="x86_64")
    assert (found.model, found.cores, found.present) == ("Intel(R) Xeon(R)", 2, 4)
    assert found.instructions == {"avx2": True, "avx512": True, "amx": True, "bf16": True}
    tree({"proc/cpuinfo": OLD})
    assert not any(read_cpu(root, architecture="x86_64").instructions.values())
    tree({"proc/cpuinfo": ARM})
    assert read_cpu(root, architecture="arm64").instructions == {"neon": True, "sve": False, "i8mm": False, "bf16": True}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/outer/inner/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
    ids=["no cgroups", "unlimited", "fraction", "the outer one is tighter", "version 1", "version 1, unlimited"],
)
def test_cores_by_cgroup(tree, files, cores):
    assert read_cpu(tree(files), allowed=8, present=16).cores == cores


def test_memory_is_what_the_tightest_cgroup_leaves(tree):
    root = tree({"proc/meminfo": MEMINFO})
    assert read_memory(root) == Memory(64 * GIB, 48 * GIB)
    tree(
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/box/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
        }
    )
    assert read_memory(root) == Memory(8 * GIB, 5 * GIB, limited=True)
    tree({"sys/fs/cgroup/box/memory.max": "max\n"})
    assert read_memory(root) == Memory(64 * GIB, 48 * GIB)


def test_memory_by_version_1(tree):
    root = tree(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/not/mounted/here\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        }
    )
    assert read_memory(root) == Memory(4 * GIB, 3 * GIB, limited=True)
    tree({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert read_memory(root) == Memory(64 * GIB, 48 * GIB)


def test_a_torch_that_could_not_see_a_gpu_is_not_imported():
    assert read_gpus(None) == ((), "torch is not installed")
    assert read_gpus("2.13.0+cpu") == ((), "this torch is a build for CPUs only")


def test_an_empty_machine_is_looked_at_without_an_error(tmp_path):
    found = look(tmp_path / "nowhere", tmp_path, env={"PATH": str(tmp_path), "OMP_NUM_THREADS": "4,2"})
    assert (found.disk, found.shared_memory, found.bwrap, found.browser) == (None, None, None, None)
    assert (found.cpu.instructions, found.omp_threads, found.ray) == ({}, 4, Ray())
    assert readiness_tables(found)


def test_a_sandbox_that_may_not_make_namespaces_says_so(tmp_path):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    assert try_bwrap(str(bwrap)) == "bwrap: No permissions to create new namespace"
    bwrap.write_text("#!/bin/sh\nexit 0\n")
    assert try_bwrap(str(bwrap)) == ""
    assert try_bwrap(str(tmp_path / "gone")) == "No such file or directory"


def test_ray_is_asked_only_where_somebody_listens():
    assert ask_ray(None) == ask_ray("") == Ray()
    assert ask_ray("local") == Ray("local")
    assert ask_ray("127.0.0.1:6379", installed=False) == Ray("127.0.0.1:6379")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but not listening
        for scheme in ("", "ray://"):
            address = f"{scheme}127.0.0.1:{free.getsockname()[1]}"
            assert ask_ray(address) == Ray(address, problem="nothing answers there (Connection refused)")


def test_ray_that_does_not_answer_is_given_up_at_the_deadline():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert ask_ray(address, seconds=0.2) == Ray(address, problem="no Ray answered in 0.2 s")


# --- judging ---


def test_a_good_machine_runs_everything_that_needs_no_gpu_and_has_no_warnings():
    assert [p.name for p in parts(machine()) if not p.runs] == ["actor: torch on a GPU", "actor: megatron"]
    assert warnings(machine()) == []


def test_what_is_missing_comes_with_the_command_that_brings_it():
    bare = machine(versions=dict.fromkeys(machine().versions), vllm=None, bwrap=None, browser=None, compiler=None)
    assert {p.name.split(": ")[-1]: p.install for p in parts(bare) if not p.runs and p.install} == {
        "torch on CPU": "pip install torch",
        "megatron": "pip install 'drumroll[megatron]'",
        "deepspeed": "pip install 'drumroll[deepspeed]'",
        "native": "pip install torch",
        "kernels": "apt-get install gcc",
        "vllm": "make vllm",
        "ray": "pip install 'drumroll[ray]'",
        "LoRA adapters": "pip install 'drumroll[lora]'",
        "bubblewrap": "apt-get install bubblewrap",
        "chromium": "apt-get install chromium",
    }


GPU = Gpu("H100", 80 * GIB, bf16=True)


@pytest.mark.parametrize(
    ("changes", "runs", "note", "install"),
    [
        ({"vllm": None, "gpus": (GPU,)}, False, "not installed", "pip install vllm"),
        ({"vllm": None, "cpu": cpu(avx512=False)}, False, "not installed", "make vllm"),
        ({"vllm": None, "cpu": cpu(avx512=False, avx2=False)}, False, "no GPU, and the CPU lacks AVX2 and AVX-512", ""),
        ({"vllm": Vllm(for_cpu=False)}, False, "this build needs a GPU that torch sees", "make vllm"),
        ({"vllm": Vllm(for_cpu=False), "gpus": (GPU, GPU)}, True, "2 GPUs", ""),
        ({"vllm": Vllm(for_cpu=True)}, True, "on the CPU", ""),
        ({"vllm": Vllm(for_cpu=True), "cpu": cpu(avx512=False)}, False, "no GPU, and the CPU lacks AVX-512", ""),
        (
            {"vllm": Vllm(for_cpu=True, for_avx2=True), "cpu": cpu(avx512=False)},
            True,
            "on the CPU, by AVX2 kernels: slower than with AVX-512",
            "",
        ),
    ],
)
def test_vllm_needs_a_gpu_or_the_right_instructions(changes, runs, note, install):
    found = part(machine(**changes), "vllm")
    assert (found.runs, found.note, found.install) == (runs, note, install)


def test_a_gpu_says_why_not():
    assert part(machine(gpus=(GPU,), gpu_driver=True), "on a GPU").note == "1 GPU"
    wrong = part(machine(gpu_driver=True, gpu_problem="this torch is a build for CPUs only"), "on a GPU")
    assert (wrong.runs, wrong.install) == (False, "pip install --force-reinstall torch")
    broken = part(machine(gpu_driver=True, gpu_problem="driver too old"), "on a GPU")
    assert (broken.note, broken.install) == ("a GPU is here, but driver too old", "")


def test_learner_backends_and_what_they_lack():
    here = machine(versions={**machine().versions, "megatron-core": "0.16.1", "deepspeed": "0.19.8"})
    assert (part(here, "megatron").runs, part(here, "megatron").note) == (False, "megatron-core 0.16.1 needs a GPU")
    assert (part(here, "deepspeed").runs, part(here, "deepspeed").note) == (True, "deepspeed 0.19.8, on the CPU")
    assert part(dataclasses.replace(here, gpus=(GPU,)), "megatron").runs
    assert part(dataclasses.replace(here, gpus=(GPU,)), "deepspeed").note == "deepspeed 0.19.8, on GPUs"
    bare = machine(versions={**machine().versions, "megatron-core": None, "deepspeed": None})
    for name in ("megatron", "deepspeed"):
        assert not part(bare, name).runs
        assert part(bare, name).note.startswith("not installed")
        assert part(bare, name).install == f"pip install 'drumroll[{name}]'"


def test_ray_and_its_address():
    assert part(machine(), "ray").note == "its own cluster on this machine"
    there = machine(ray=Ray("head:6379", 2, {"CPU": 16.0, "GPU": 4.0}))
    assert part(there, "ray").note == "the cluster at RAY_ADDRESS"
    assert "head:6379: 2 nodes, 16 CPU, 4 GPU" in shown(there, 80)
    gone = machine(ray=Ray("head:6379", problem="nothing answers there"))
    assert not part(gone, "ray").runs
    assert "head:6379: nothing answers there" in shown(gone, 80)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"cpu": cpu(bf16=False)}, "keep dtype: float32"),
        ({"cpu": cpu(bf16=False), "gpus": (GPU,)}, None),
        ({"gpus": (Gpu("V100", 16 * GIB, bf16=False),)}, "V100 has no bfloat16 units"),
        ({"cpu": cpu(1, 1)}, "Only 1 core:"),
        ({"cpu": cpu(0.5, 1), "omp_threads": 1}, "Only 0.5 cores:"),
        ({"omp_threads": 8}, None),
        ({"omp_threads": 9}, "OMP_NUM_THREADS=9 is more than the 8 cores"),
        ({"cpu": cpu(2.5)}, "torch starts 8 threads, but the cgroup allows 2.5 cores: set OMP_NUM_THREADS=3"),
        ({"cpu": cpu(2.5), "omp_threads": 3}, None),
        ({"shared_memory": Space(64 * 2**20, 64 * 2**20)}, "/dev/shm has 64 MiB"),
        ({"shared_memory": Space(8 * GIB, 2**20)}, "/dev/shm has only 1 MiB free"),
        ({"shared_memory": None}, None),
        ({"memory": Memory(8 * GIB, GIB)}, "Only 1.0 GiB of memory"),
        ({"disk": Space(500 * GIB, GIB)}, "Only 1.0 GiB is free on this disk"),
        ({"ray": Ray("head:6379", problem="gone")}, "RAY_ADDRESS=head:6379 cannot be joined"),
    ],
)
def test_what_will_hurt(changes, warning):
    found = warnings(machine(**changes))
    assert len(found) == (warning is not None), found
    assert warning is None or warning in found[0]


# --- showing ---


def shown(found, width):
    out = io.StringIO()
    console = Console(file=out, width=width)
    for table in readiness_tables(found):
        console.print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_their_width_and_every_word(width):
    bare = machine(versions=dict.fromkeys(machine().versions), cpu=cpu(bf16=False), gpus=(GPU,), browser=None)
    text = shown(bare, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (
        "0: H100, 80 GiB",
        "pip install 'drumroll[ray]'",
        "48 GiB available of 64 GiB",
        "avx2, avx512 (without amx, bf16)",
    ):
        assert words in text
    assert "…" not in text


def test_json_holds_facts_and_judgement():
    data = json.loads(json.dumps(as_json(machine(gpus=(GPU,)))))
    assert data["memory"] == {"total": 64 * GIB, "available": 48 * GIB, "limited": False}
    assert data["gpus"] == [{"name": "H100", "memory": 80 * GIB, "bf16": True}]
    assert {"name": "runtime: local", "runs": True, "note": "one process", "install": ""} in data["parts"]
    assert data["warnings"] == []


def test_sizes():
    assert [size(n) for n in (64 * 2**20, GIB, int(1.5 * GIB), 252 * GIB)] == ["64 MiB", "1.0 GiB", "1.5 GiB", "252 GiB"]


def test_this_machine(tmp_path):
    found = look(tmp_path, env={"PATH": os.environ["PATH"]})
    assert 0 < found.cpu.cores <= found.cpu.present == os.cpu_count()
    assert found.versions["torch"]
    assert part(found, "torch on CPU").runs
