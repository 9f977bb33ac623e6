"""Compiled inner loops of generation (`kernels.c`), for CPUs of machines that have a C compiler.

They are compiled for the processor at hand when first wanted, in a second, and kept in the user's cache. A library
or folder that another user could have written is never loaded. Without a compiler, on other devices and for shapes they do
not know, torch does the same more slowly. `DRUMROLL_KERNELS=off` forbids them;
`DRUMROLL_KERNELS=x86-64-v3`, or another `-march` of the compiler, compiles them for that processor instead of this one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from drumroll.models.attention import KVCache, PageSlots, Reads

COMPILERS = ("cc", "gcc", "clang")
SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
DTYPES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
MOST_GROUP, MOST_DIM, WIDTH = 8, 256, 8  # as in the source


class KernelError(Exception):
    """Why there are no compiled kernels here."""


def folder() -> Path:
    """The folder of compiled kernels: in the user's cache, or among temporary files if that one is not the user's own."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = (cache / "drumroll" / "kernels", Path(tempfile.gettempdir()) / f"drumroll-kernels-{os.geteuid()}")
    refused = []
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _own(place, stat.S_IFDIR):
                if _open_to_others(place):
                    place.chmod(0o700)
                return place
            refused.append(f"{place} is not a folder of this user")
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
    raise KernelError(f"no folder for compiled kernels: {'; '.join(refused)}")


def _own(path: Path, kind: int) -> bool:
    """Whether a path is a file or folder of this user, and no link."""
    found = path.lstat()
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid()


def _open_to_others(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _trusted(path: Path) -> bool:
    """Whether only this user can have written a library; loading one runs its code."""
    return path.exists() and _own(path, stat.S_IFREG) and not _open_to_others(path)


def build(dtype: torch.dtype) -> Path:
    """The compiled library; a new one is made when the source, the compiler or the processor is another."""
    target = os.environ.get("DRUMROLL_KERNELS") or "native"
    if target == "off":
        raise KernelError("DRUMROLL_KERNELS=off")
    if sys.platform != "linux" or dtype not in DTYPES:
        raise KernelError(f"not made for {dtype} on {sys.platform}")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelError(f"no C compiler ({', '.join(COMPILERS)}) on PATH")
    flags = [*FLAGS, f"-march={target}", *DTYPES[dtype]]
    made_of = (SOURCE.read_bytes(), " ".join(flags).encode(), Path(compiler).resolve().as_posix().encode(), _processor())
    path = folder() / f"{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:24]}.so"
    if _trusted(path):
        return path
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            made = Path(place) / path.name
            subprocess.run([compiler, *flags, SOURCE, "-o", made], check=True, capture_output=True, text=True, timeout=120)
            made.chmod(0o700)
            made.replace(path)  # at once: another process may do the same
    except subprocess.CalledProcessError as error:
        raise KernelError(f"{compiler} failed: {error.stderr.strip().splitlines()[-1:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{type(error).__name__}: {error}") from error
    return path


def _processor() -> bytes:
    """What the processor is able to do: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine().encode()
    return "".join(next(iter([line for line in lines if line.startswith(("flags", "Features"))]), "")).encode()


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for numbers of this type, if they can be had."""
    try:
        found = ctypes.CDLL(str(build(dtype)))
    except (KernelError, OSError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.decode.argtypes, found.decode.restype = [pointer] * 6 + [number] * 3, None
    found.masses.argtypes, found.masses.restype = [pointer, number, pointer, pointer, pointer] + [number] * 4, None
    found.rms_norm.argtypes = [pointer, pointer, ctypes.c_float, pointer] + [number] * 3
    found.rms_norm.restype = None
    return found


class _Paged(ctypes.Structure):
    """`Paged` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("heads", "size", "dim")),
        *((name, ctypes.c_void_p) for name in ("first", "pages", "counts", "starts", "positions", "at_pages", "at_offsets")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class PagedDecode:
    """Attention of one new token for each row, over pages; `reads` are ordered by row."""

    def __init__(self, kernels: ctypes.CDLL, cache: KVCache, at: PageSlots, positions: Tensor, reads: Reads) -> None:
        self.kernels = kernels
        self.cache = cache
        self.rows = len(positions)
        first = np.zeros(self.rows + 1, np.int64)
        np.cumsum(np.bincount(reads.rows, minlength=self.rows), out=first[1:])
        self.kept = (first, reads.pages, reads.counts, reads.starts, positions, at.pages, at.offsets)
        self.addresses = [x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr() for x in self.kept]

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Whether the kernel knows such shapes."""
        dim = q.shape[-1]
        known = dim % WIDTH == 0 and dim <= MOST_DIM and q.shape[1] <= MOST_GROUP * k.shape[1]
        return known and q.dtype == k.dtype == self.cache.keys[0].dtype

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """As `Layout.attend`."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        _, heads, size, dim = keys.shape
        paged = _Paged(keys.data_ptr(), values.data_ptr(), heads, size, dim, *self.addresses, window or 0, scale)
        out = torch.empty(q.shape, dtype=q.dtype)
        steps = (ctypes.c_int64 * 6)(*(x.stride(i) for x in (q, k, v) for i in (0, 1)))
        pointers = [x.data_ptr() for x in (q, k, v, out)]
        self.kernels.decode(ctypes.byref(paged), *pointers, steps, self.rows, q.shape[1] // heads, torch.get_num_threads())
        return out


def paged_decode(cache: KVCache, at: PageSlots, positions: Tensor, reads: Reads) -> PagedDecode | None:
    """Compiled attention, where it can be had."""
    store = cache.keys[0]
    kernels = library(store.dtype) if store.device.type == "cpu" else None
    return None if kernels is None else PagedDecode(kernels, cache, at, positions, reads)


def masses(logits: Tensor, scale: Tensor, block: int) -> tuple[Tensor, Tensor] | None:
    """The highest of each row's scaled logits, [rows, 1], and the sums of e^(scaled - highest) by block, [rows, blocks]."""
    rows, vocabulary = logits.shape
    kernels = (
        library(logits.dtype) if logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(1) == 1 else None
    )
    if kernels is None:
        return None
    peak, sums = torch.empty(rows, 1), torch.empty(rows, -(-vocabulary // block))
    pointers = (logits.data_ptr(), logits.stride(0), scale.data_ptr(), peak.data_ptr(), sums.data_ptr())
    kernels.masses(*pointers, rows, vocabulary, block, torch.get_num_threads())
    return peak, sums


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x` over the root of its mean square, times `weight`: float32 on a CPU."""
    width = x.shape[-1]
    kernels = library(x.dtype) if x.dtype is weight.dtype is torch.float32 and width % WIDTH == 0 else None
    if kernels is None or not x.is_contiguous():
        return F.rms_norm(x, weight.shape, weight, epsilon)
    out = torch.empty_like(x)
    rows = x.numel() // width
    kernels.rms_norm(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), rows, width, torch.get_num_threads())
    return out
