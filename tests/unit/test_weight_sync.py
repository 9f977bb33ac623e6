"""Weight sync: receivers get exactly the tensors that were sent, by every transport, between real processes."""

from __future__ import annotations

import gc
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import FORKED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drumroll.errors import ConfigError
from drumroll.weights import Corrupted, Entry, Packing, Receiver, Sender, WeightSyncError, WrongVersion, settle, unpack
from drumroll.weights.broadcast import IN_FLIGHT, BroadcastReceiver, BroadcastSender, Meeting, _Header
from drumroll.weights.shared_memory import SharedReceiver, SharedSender
from drumroll.weights.transport import End, Transport, choose

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
Weights = dict[str, Tensor]


def mixed() -> Weights:
    """All dtypes, an empty tensor, a single number, and strides that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{dtype}": (torch.randn(7, 3, generator=generator) * 4).to(dtype) for dtype in DTYPES}
    wide = torch.randn(6, 10, generator=generator)
    return tensors | {
        "empty": torch.empty(0, 5),
        "number": torch.tensor(3.5),
        "transposed": wide.T,
        "strided": wide[::2, ::3],
        "expanded": torch.randn(4, 1, generator=generator).expand(4, 3),
        "trained": torch.nn.Parameter(torch.randn(5, generator=generator)),
        "large": torch.randn(1000, generator=generator),
    }


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape, raw(found[name])) == (tensor.dtype, tensor.shape, raw(tensor)), name


# --- another process, asked through a pipe; the manifest travels pickled, as by any RPC ---


def serve(calls: Connection) -> None:
    torch.set_num_threads(1)
    receiver: Receiver = SharedReceiver()
    held: Weights = {}
    while (call := calls.recv()) is not None:
        name, argument = call
        try:
            if name == "meet":
                receiver = BroadcastReceiver(*argument)
            elif name == "hold":
                held = dict(receiver.receive(argument))
            elif name == "first":
                next(receiver.receive(argument))
            elif name == "reset":
                receiver, held = SharedReceiver(), {}
            elif name == "drop":
                held = {}
            calls.send({name: (t.dtype, t.shape, raw(t)) for name, t in held.items()})
        except WeightSyncError as error:
            calls.send(error)


class Engine:
    """An engine's process as the test sees it."""

    def __init__(self) -> None:
        self.calls, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, call: str, argument: Any = None) -> None:
        self.calls.send((call, argument))

    def answer(self) -> Any:
        assert self.calls.poll(120), "no answer"
        answer = self.calls.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __call__(self, call: str, argument: Any = None) -> Any:
        self.ask(call, argument)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def shown(tensors: Weights) -> dict[str, Any]:
    return {name: (t.dtype, t.shape, raw(t)) for name, t in tensors.items()}


@pytest.fixture(scope="module")
def started() -> Iterator[list[Engine]]:
    """Processes take seconds to start, so tests use the same ones."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.kill()


@pytest.fixture
def engines(started: list[Engine]) -> Iterator[Callable[[], Engine]]:
    used: list[Engine] = []

    def start() -> Engine:
        used.append(started.pop() if started else Engine())
        return used[-1]

    yield start
    for engine in used:
        if engine.process.is_alive():
            engine("reset")
            started.append(engine)


def segments(run: str, pid: int | str = "self") -> int:
    """How many segments of a run a process still has open or mapped."""
    opened = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            opened += f"drumroll-{run} " in os.readlink(fd)
        except FileNotFoundError:  # the directory itself was among them
            continue
    return opened + Path(f"/proc/{pid}/maps").read_text().count(f"drumroll-{run} ")


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run's name; at the end nothing of it may be left in this process."""
    name = f"{request.node.name[:60]}-{os.getpid()}"
    yield name
    gc.collect()
    assert segments(name) == 0


@pytest.fixture
def shared(run: str) -> Iterator[tuple[SharedSender, SharedReceiver]]:
    sender, receiver = SharedSender(run), SharedReceiver()
    yield sender, receiver
    sender.close()
    receiver.close()


def numbers(value: float, names: str = "ab") -> Weights:
    return {name: torch.full((300,), value + i) for i, name in enumerate(names)}


# --- shared memory ---


def test_shared_round_trip_of_all_kinds_of_tensors(shared: tuple[SharedSender, SharedReceiver]):
    sender, receiver = shared
    assert_same(dict(receiver.receive(pickle.loads(pickle.dumps(sender.send(1, mixed().items()))))), mixed())


@given(
    updates=st.lists(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6),
        min_size=1,
        max_size=4,
    ),
    checksum=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_shared_round_trip_of_any_updates(updates: list[list[tuple[torch.dtype, list[int], bool]]], checksum: bool):
    """Any sequence of updates of any sizes through the same segments; what is held of the older ones does not change."""
    sender, receiver = SharedSender("property", Packing(checksum=checksum)), SharedReceiver()
    held: list[tuple[Weights, Weights]] = []
    for version, update in enumerate(updates):
        sent: Weights = {}
        for i, (dtype, shape, turned) in enumerate(update):
            values = 2 if dtype == torch.bool else 256
            tensor = torch.randint(0, values, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
            sent[f"{i}"] = tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor
        held.append((dict(receiver.receive(sender.send(version, sent.items()))), sent))
        for found, expected in held:
            assert_same(found, expected)
    sender.close()
    receiver.close()


def test_shared_memory_is_read_by_two_processes_and_used_again(
    shared: tuple[SharedSender, SharedReceiver], engines: Callable[[], Engine]
):
    sender, _ = shared
    readers = [engines(), engines()]
    tokens = set()
    for version in range(5):
        manifest = sender.send(version, numbers(version).items())
        tokens.add(manifest.token)
        for reader in readers:
            assert reader("hold", manifest) == shown(numbers(version))
            reader("drop")
    assert len(tokens) == 2


def test_what_a_reader_holds_is_not_overwritten(shared: tuple[SharedSender, SharedReceiver], engines: Callable[[], Engine]):
    sender, receiver = shared
    reader = engines()
    reader("hold", sender.send(0, numbers(0).items()))
    kept = dict(receiver.receive(sender.send(1, numbers(1).items())))["a"][3:]
    for version in range(2, 6):
        sender.send(version, numbers(version).items())
    assert reader("show") == shown(numbers(0))
    assert kept.tolist() == [1.0] * 297


def test_the_version_before_the_newest_can_be_fetched_an_older_one_is_refused(shared: tuple[SharedSender, SharedReceiver]):
    sender, receiver = shared
    manifests = [sender.send(version, numbers(version).items()) for version in range(3)]
    for version in (1, 2):
        assert_same(dict(receiver.receive(manifests[version])), numbers(version))
    with pytest.raises(WrongVersion, match="announces version 0, its memory holds 2"):
        receiver.receive(manifests[0])


def test_a_half_written_version_is_never_given_out(shared: tuple[SharedSender, SharedReceiver]):
    sender, receiver = shared
    manifest = sender.send(0, numbers(0).items())
    sender.send(1, numbers(1).items())

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(300)
        with pytest.raises(WrongVersion, match="being overwritten"):
            receiver.receive(manifest)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sender.send(2, breaking())
    with pytest.raises(WrongVersion, match="holds -1"):
        receiver.receive(manifest)
    assert_same(dict(receiver.receive(sender.send(3, numbers(3).items()))), numbers(3))


def test_a_changed_byte_is_found_and_its_tensor_named(run: str):
    sender, receiver = SharedSender(run, Packing(checksum=True)), SharedReceiver()
    manifest = sender.send(0, numbers(0, "abc").items())
    sender._segments[0].data[manifest.entries[1].begin + 17] ^= 1
    with pytest.raises(Corrupted, match="'b'"):
        dict(receiver.receive(manifest))
    sender.close()
    receiver.close()


def test_floating_tensors_are_converted_on_the_way(run: str):
    sender, receiver = SharedSender(run, Packing(dtype=torch.bfloat16)), SharedReceiver()
    sent = {"weight": torch.randn(9, 4), "steps": torch.arange(3)}
    expected = {"weight": sent["weight"].bfloat16(), "steps": sent["steps"]}
    assert_same(dict(receiver.receive(sender.send(0, sent.items()))), expected)
    sender.close()
    receiver.close()


def test_adapters_alone_are_a_smaller_update(shared: tuple[SharedSender, SharedReceiver]):
    sender, receiver = shared
    adapters = {"lora_A": torch.randn(2, 64), "lora_B": torch.randn(64, 2)}
    for version, update in enumerate([mixed(), adapters, adapters, mixed(), {}]):
        assert_same(dict(receiver.receive(sender.send(version, update.items()))), update)


def test_full_tensors_are_taken_one_at_a_time(shared: tuple[SharedSender, SharedReceiver]):
    """So that a sharded learner need not gather all of them at once."""
    sender, receiver = shared
    alive: list[int] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for i in range(20):
            alive.append(sum(type(o) is Tensor and o.numel() == 12_345 for o in gc.get_objects()))
            yield f"{i}", torch.full((12_345,), float(i))

    found = dict(receiver.receive(sender.send(0, gathered())))
    assert [t[0].item() for t in found.values()] == list(range(20))
    assert max(alive) <= 1


def test_a_closed_sender_is_told_apart_and_leaves_what_is_held(run: str):
    sender, receiver = SharedSender(run), SharedReceiver()
    first, second = (sender.send(version, numbers(version).items()) for version in range(2))
    held = dict(receiver.receive(first))
    sender.close()
    with pytest.raises(WeightSyncError, match="Version 1 is gone"):
        receiver.receive(second)
    receiver.close()
    assert_same(held, numbers(0))


def test_a_killed_reader_leaves_nothing_behind(run: str, engines: Callable[[], Engine]):
    sender, reader = SharedSender(run), engines()
    manifests = [sender.send(version, numbers(version).items()) for version in range(2)]
    reader("hold", manifests[0])
    reader.kill()
    assert sender.send(2, numbers(2).items()).token == manifests[0].token  # its lock went with it
    sender.close()


def serve_sender(calls: Connection, run: str) -> None:
    sender = SharedSender(run)
    calls.send(sender.send(0, numbers(0).items()))
    calls.recv()


def test_a_killed_sender_leaves_nothing_behind(run: str):
    calls, theirs = FORKED.Pipe()
    process = FORKED.Process(target=serve_sender, args=(theirs, run), daemon=True)
    process.start()
    receiver, manifest = SharedReceiver(), calls.recv()
    held = dict(receiver.receive(manifest))
    process.kill()
    process.join()
    assert_same(held, numbers(0))
    with pytest.raises(WeightSyncError, match="is gone"):
        receiver.receive(manifest)
    receiver.close()
    assert not list(Path("/dev/shm").glob("*drumroll*"))


# --- broadcast ---


def meet(
    engines: Callable[[], Engine], receivers: int, seconds: float = 60, **options: Any
) -> tuple[BroadcastSender, list[Engine]]:
    sender = BroadcastSender(Meeting("127.0.0.1", 0, receivers + 1, seconds=seconds), **options)
    readers = [engines() for _ in range(receivers)]
    for rank, reader in enumerate(readers, start=1):
        reader("meet", (sender.meeting, rank))
    return sender, readers


def publish(sender: Sender, readers: list[Engine], version: int, weights: Weights, call: str = "hold") -> list[Any]:
    manifest = pickle.loads(pickle.dumps(sender.send(version, weights.items())))
    for reader in readers:
        reader.ask(call, manifest)
    answers = [reader.answer() for reader in readers]
    sender.wait()
    return answers


def test_broadcast_to_two_receivers_in_several_buckets(engines: Callable[[], Engine]):
    sender, readers = meet(engines, 2, bucket=512, packing=Packing(checksum=True))
    adapters = {"lora_A": torch.randn(2, 64), "lora_B": torch.randn(64, 2)}
    assert len(list(sender._buckets(mixed().items()))) > 3
    for version, update in enumerate([mixed(), adapters, {"empty": torch.empty(0)}, {}, mixed()]):
        assert publish(sender, readers, version, update) == [shown(update)] * 2
    assert sender._link.store.num_keys() < 20  # the headers of old manifests are not kept
    sender.close()


def listening(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which something of this machine listens on a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


def test_the_store_listens_on_its_own_address_only_and_holds_no_code():
    sender = BroadcastSender(Meeting("127.0.0.1", 0, 1))
    assert listening(sender.meeting.port) == {"0100007F"}
    entries = (Entry("a.b", torch.bfloat16, (2, 3), 0, 12, 7), Entry("ü", torch.bool, (), 64, 65))
    for header in (_Header(3, entries, 65), _Header(3, error="ZeroDivisionError: no")):
        assert _Header.decode(header.encode().encode()) == header
        json.loads(header.encode())
    sender.close()


@pytest.mark.parametrize(
    ("wanted", "ends", "transport"),
    [
        ("auto", [End("a"), End("a")], Transport("shared", "cpu", "127.0.0.1")),
        ("auto", [End("a"), End("b")], Transport("broadcast", "cpu", "a")),
        ("broadcast", [End("a"), End("a")], Transport("broadcast", "cpu", "127.0.0.1")),
        ("auto", [End("a", 0), End("b", 8)], Transport("broadcast", "cuda:0", "a")),
        ("auto", [End("a", 0), End("a", 1), End("a", 2)], Transport("broadcast", "cuda:0", "127.0.0.1")),
        ("auto", [End("a", 0), End("a", 0)], Transport("shared", "cpu", "127.0.0.1")),  # NCCL refuses two on one GPU
        ("auto", [End("a", 0), End("a", 0), End("b", 8)], Transport("broadcast", "cpu", "a")),
        ("auto", [End("a", 0), End("b")], Transport("broadcast", "cpu", "a")),  # a CPU among them
        ("shared", [End("a", 0), End("a", 1)], Transport("shared", "cuda:0", "127.0.0.1")),
    ],
)
def test_the_transport_follows_from_where_the_ends_are(wanted: str, ends: list[End], transport: Transport):
    assert choose(wanted, ends) == transport


def test_shared_memory_between_machines_is_refused():
    with pytest.raises(
        ConfigError, match=r"cluster.weight_sync: shared reaches one machine only, but actor and engines are on 2"
    ):
        choose("shared", [End("a"), End("b")])


def test_buckets_hold_every_tensor_once_and_keep_their_size():
    sender = BroadcastSender(Meeting("127.0.0.1", 0, 1))

    @given(sizes=st.lists(st.integers(0, 40), max_size=12), bucket=st.integers(1, 200), settled=st.booleans())
    @settings(max_examples=150, deadline=None)
    def check(sizes: list[int], bucket: int, settled: bool) -> None:
        sender.bucket = bucket
        sent = {f"{i}": torch.randn(size) for i, size in enumerate(sizes)}
        before = {name: tensor.clone() for name, tensor in sent.items()}
        if settled:
            settle(sent.values())
        assert_same(sent, before)
        buckets = [(entries, data.clone()) for entries, data in sender._buckets(sent.items())]
        assert [entry.name for entries, _ in buckets for entry in entries] == list(sent)
        assert all(len(data) <= bucket or len(entries) == 1 for entries, data in buckets)
        for entries, data in buckets:
            assert_same(dict(unpack(data, entries)), {entry.name: sent[entry.name] for entry in entries})

    check()
    sender.close()


def test_settled_tensors_are_sent_from_where_they_lie():
    sender = BroadcastSender(Meeting("127.0.0.1", 0, 1), bucket=16 << 20)
    sent = {f"{i}": torch.randn(1000, 300) for i in range(20)}
    settle(sent.values())
    home = sent["0"].untyped_storage()
    buckets = list(sender._buckets(sent.items()))
    assert len(buckets) == 2
    assert all(data.untyped_storage().data_ptr() == home.data_ptr() for _, data in buckets)
    sender.close()


def test_broadcast_leaves_the_default_group_alone(engines: Callable[[], Engine], tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        sender, readers = meet(engines, 1)
        assert publish(sender, readers, 0, numbers(0)) == [shown(numbers(0))]
        one = torch.ones(1)
        dist.all_reduce(one)
        assert (one.item(), dist.get_world_size()) == (1.0, 1)
        sender.close()
    finally:
        dist.destroy_process_group()


def test_broadcast_of_another_version_is_refused_and_the_next_arrives(engines: Callable[[], Engine]):
    sender, (reader,) = meet(engines, 1, bucket=1500)
    wrong = replace(sender.send(1, numbers(1, "abcdef").items()), version=7)
    with pytest.raises(WrongVersion, match="announces version 7, the sender sends 1"):
        reader("hold", wrong)
    assert publish(sender, [reader], 2, numbers(2)) == [shown(numbers(2))]
    sender.close()


def test_a_receiver_that_stops_early_does_not_block_the_others(engines: Callable[[], Engine]):
    sender, readers = meet(engines, 2, bucket=1500)
    manifest = sender.send(1, numbers(1, "abcdef").items())
    readers[0].ask("first", manifest)
    assert readers[1]("hold", manifest) == shown(numbers(1, "abcdef"))
    readers[0].answer()
    assert publish(sender, readers, 2, numbers(2)) == [shown(numbers(2))] * 2
    sender.close()


def test_receivers_learn_that_the_sender_failed(engines: Callable[[], Engine]):
    sender, (reader,) = meet(engines, 1, bucket=1500)

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield from numbers(0, "abcd").items()
        raise ZeroDivisionError("no more")

    manifest = sender.send(0, breaking())
    with pytest.raises(WeightSyncError, match="ZeroDivisionError: no more"):
        reader("hold", manifest)
    with pytest.raises(ZeroDivisionError):
        sender.wait()
    assert publish(sender, [reader], 1, numbers(1)) == [shown(numbers(1))]
    sender.close()


def test_the_sender_learns_that_a_receiver_died(engines: Callable[[], Engine]):
    sender, readers = meet(engines, 2)
    publish(sender, readers, 0, numbers(0))
    readers[0].kill()
    readers[1].ask("hold", sender.send(1, numbers(1).items()))
    with pytest.raises(WeightSyncError, match="did not reach all engines"):
        sender.wait()
    with suppress(WeightSyncError):  # it may have had its part before; it does not wait for the timeout
        readers[1].answer()
    sender.close()


def test_broadcast_corruption_is_found(engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch):
    sender, (reader,) = meet(engines, 1, packing=Packing(checksum=True))
    whole = sender._buckets

    def tampered(tensors: Any) -> Iterator[Any]:
        for entries, data in whole(tensors):
            data[entries[-1].begin] ^= 1
            yield entries, data

    monkeypatch.setattr(sender, "_buckets", tampered)
    with pytest.raises(Corrupted, match="'b'"):
        publish(sender, [reader], 0, numbers(0))
    sender.wait()
    sender.close()


def test_received_buckets_stay_while_held(engines: Callable[[], Engine]):
    """The sender's own process may hold buckets too: memory is used again only when nothing refers to it."""
    sender = BroadcastSender(Meeting("127.0.0.1", 0, 1), bucket=1500)
    link = sender._link
    held = [link.buffer(1000).fill_(i)[5:] for i in range(6)]
    assert [t[0].item() for t in held] == list(range(6))
    addresses = {t.untyped_storage().data_ptr() for t in held}
    del held
    assert link.buffer(1000).data_ptr() in addresses
    assert len(link._idle) <= IN_FLIGHT + 1
    sender.close()
