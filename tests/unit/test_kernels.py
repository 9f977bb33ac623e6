"""The compiled kernels against torch's own operations, and life without a compiler."""

import os
import shutil
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.engines import sampler
from drumroll.models import kernels
from drumroll.models.attention import Decode, KVCache, PageSlots, Reads

needs_compiler = pytest.mark.skipif(kernels.library(torch.float32) is None, reason="no C compiler here")


def world(seed, rows, heads, group, dim, size, dtype):
    """A cache, and rows that read pages of it: some shared, the last of each row its own."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 3 * size + 1, rows)
    reads, at = [], []
    free = 3  # the first three pages are shared
    for row, length in enumerate(lengths):
        whole, rest = divmod(int(length), size)
        pages = [*range(whole), free]  # a shared page stands at one place in all
        counts = [size] * whole + [rest]
        if not rest:
            pages, counts = [*pages[:-2], free], counts[:-1]
        free += 1
        reads += [(p, row, c, i * size) for i, (p, c) in enumerate(zip(pages, counts, strict=True))]
        at.append((pages[-1], counts[-1] - 1))
    cache = KVCache([(heads, dim)], free, size, dtype, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for store in (cache.keys[0], cache.values[0]):
        store.copy_(torch.randn(store.shape, generator=generator))
    q, k, v = (torch.randn(n, rows, dim, generator=generator).to(dtype).transpose(0, 1) for n in (heads * group, heads, heads))
    columns = [np.array(column, np.int64) for column in zip(*reads, strict=True)]
    places = PageSlots([p for p, _ in at], [o for _, o in at], "cpu")
    return Decode(cache, places, torch.from_numpy(lengths - 1), Reads(*columns)), q, k, v


@needs_compiler
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 16, 64, 80, 256]),
    size=st.sampled_from([1, 7, 16, 128, 300]),
    window=st.sampled_from([None, 1, 5, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_over_pages(seed, rows, heads, group, dim, size, window, dtype):
    layout, q, k, v = world(seed, rows, heads, group, dim, size, dtype)
    assert layout.compiled is not None
    assert layout.compiled.fits(q, k)
    found = layout.attend(0, q, k, v, dim**-0.5, window)
    kept = [store[0].clone() for store in (layout.cache.keys, layout.cache.values)]
    layout.compiled = None
    expected = layout.attend(0, q, k, v, dim**-0.5, window)
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(kept[0], layout.cache.keys[0])
    assert torch.equal(kept[1], layout.cache.values[0])


@needs_compiler
def test_a_row_does_not_depend_on_its_neighbours_or_the_threads():
    layout, q, k, v = world(3, 6, 2, 3, 64, 16, torch.float32)
    whole = layout.attend(0, q, k, v, 0.1, None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(whole, layout.attend(0, q, k, v, 0.1, None))
    finally:
        torch.set_num_threads(threads)
    own = layout.reads.rows == 4
    picked = Reads(
        *(x[own] for x in (layout.reads.pages, np.zeros_like(layout.reads.rows), layout.reads.counts, layout.reads.starts))
    )
    place = PageSlots([int(layout.at.pages[4])], [int(layout.at.offsets[4])], "cpu")
    alone = Decode(layout.cache, place, layout.positions[4:5], picked)
    assert torch.equal(alone.attend(0, q[4:5], k[4:5], v[4:5], 0.1, None), whole[4:5])


@needs_compiler
def test_shapes_it_does_not_know_are_torchs():
    for heads, group, dim in ((1, 9, 16), (1, 1, 12)):
        layout, q, k, v = world(1, 3, heads, group, dim, 16, torch.float32)
        assert layout.compiled is not None
        assert not layout.compiled.fits(q, k)
        assert layout.attend(0, q, k, v, 1.0, None).shape == q.shape


@needs_compiler
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from([2, 5, 64, 255, 257, 1003]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_sampler_draws_the_same(seed, vocabulary, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(16, vocabulary, generator=generator)).to(dtype)
    temperature = torch.where(torch.arange(16) % 4 == 0, 0.0, 0.7)
    uniform = torch.rand(16, dtype=torch.float64, generator=generator)
    tokens, logprobs = sampler.choose(logits, temperature, uniform)
    everything = sampler.Restriction(torch.ones(16), torch.zeros(16, dtype=torch.int64), torch.zeros(16))
    expected, theirs = sampler.choose(logits, temperature, uniform, everything)  # a restriction is torch's work
    assert (tokens != expected).sum() <= 1  # a number that falls between two may fall on either
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], theirs[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 64), (64, 576), (5, 12)])
def test_norms_are_torchs(rows, width):
    x, weight = torch.randn(1, rows, width), torch.randn(width)
    expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)  # the same numbers, laid out otherwise
    torch.testing.assert_close(kernels.rms_norm(apart, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(kernels.KernelError, match="no C compiler"):
        kernels.build(torch.float32)
    with pytest.raises(kernels.KernelError, match="not made for"):
        kernels.build(torch.float64)
    monkeypatch.setenv("DRUMROLL_KERNELS", "off")
    with pytest.raises(kernels.KernelError, match="DRUMROLL_KERNELS=off"):
        kernels.build(torch.float32)


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'kernels.c: no such processor' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(kernels.KernelError, match="no such processor"):
        kernels.build(torch.float32)
    assert list((tmp_path / "cache").rglob("*.so")) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_compiled_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = kernels.build(torch.float32)
    made = os.stat(first).st_mtime_ns
    assert kernels.build(torch.float32) == first
    assert os.stat(first).st_mtime_ns == made
    assert [p.name for p in first.parent.iterdir()] == [first.name]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_what_others_could_have_written_is_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kernels.build(torch.float32)
    good = path.read_bytes()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.write_bytes(b"not ours")
    path.chmod(0o666)
    path.parent.chmod(0o777)
    assert kernels.build(torch.float32) == path
    assert path.read_bytes()[:4] == good[:4]
    assert not path.stat().st_mode & 0o022
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"not ours")
    assert not kernels.build(torch.float32).is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"not ours"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_a_folder_that_is_not_ours_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "cache/drumroll").mkdir(parents=True)
    (tmp_path / "cache/drumroll/kernels").symlink_to(tmp_path / "theirs")
    assert kernels.build(torch.float32).parent == tmp_path / f"drumroll-kernels-{os.geteuid()}"
    assert list((tmp_path / "theirs").iterdir()) == []
    shutil.rmtree(tmp_path / f"drumroll-kernels-{os.geteuid()}")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(
        kernels.KernelError, match=r"no folder for compiled kernels.*drumroll.kernels.*is not a folder of this user"
    ):
        kernels.build(torch.float32)
