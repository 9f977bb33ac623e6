"""Weight sync: receivers get exactly the tensors that were sent, by every transport, between real processes."""

from __future__ import annotations

import gc
import json
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import FORKED, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drumroll.errors import ConfigError
from drumroll.weights import (
    AS_IS,
    Corrupted,
    Entry,
    Meeting,
    Packing,
    WeightSyncError,
    WrongVersion,
    WrongWeights,
    fill,
    stream,
)
from drumroll.weights.broadcast import BroadcastSender
from drumroll.weights.shared_memory import SharedSender
from drumroll.weights.stream import Header, StreamSender
from drumroll.weights.transport import End, Transport, choose, open_receiver

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
Weights = dict[str, Tensor]
KINDS = pytest.mark.parametrize("kind", ["shared", "broadcast"])
BUCKET = 1500


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


# --- other processes, asked through a pipe; the manifest travels pickled, as by any RPC ---


def serve(calls: Connection) -> None:
    torch.set_num_threads(1)
    receiver: Any = None
    while (call := calls.recv()) is not None:
        name, argument = call
        try:
            if name == "meet":
                receiver = open_receiver(*argument, "127.0.0.1")
                calls.send(None)
            elif name == "receive":
                calls.send(shown(receiver.receive(argument)))
            elif name == "peak":
                calls.send(receiver.peak)
            elif name == "first":
                next(receiver.receive(argument))
                calls.send(None)
            elif name == "die":
                next(tensors := receiver.receive(argument))
                os._exit(9)
                del tensors
            elif name == "slowly":  # each tensor is read when the test says so
                for tensor_name, tensor in receiver.receive(argument):
                    calls.send(tensor_name)
                    calls.recv()
                    calls.send(raw(tensor))
                calls.send(None)
            elif name == "reset":
                receiver = None
                calls.send(None)
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


def shown(tensors: Any) -> dict[str, Any]:
    return {name: (t.dtype, t.shape, raw(t)) for name, t in tensors}


@pytest.fixture(scope="module")
def started() -> Iterator[list[Engine]]:
    """Processes take a while to start, so tests use the same ones."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.process.kill()
        engine.process.join()


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


def slots(run: str) -> list[int]:
    """The sizes of the shared memory of a run that this process still has mapped."""
    found = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"drumroll-{run} " in line)
    return [int(end, 16) - int(begin, 16) for begin, end in (line[0].split("-") for line in found)]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run's name; at the end nothing of it may be left in this process."""
    name = f"{request.node.name[:60]}-{os.getpid()}"
    yield name
    gc.collect()
    assert slots(name) == []
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and f"drumroll-{name} " in os.readlink(fd)]


Meet = Callable[..., tuple[StreamSender, list[Engine]]]


@pytest.fixture
def meet(run: str, engines: Callable[[], Engine]) -> Iterator[Meet]:
    """Open a sender and as many receivers in processes of their own."""
    opened: list[StreamSender] = []

    def start(kind: str, receivers: int = 1, *, seconds: float = 60, bucket: int = BUCKET, packing: Packing = AS_IS) -> Any:
        meeting = Meeting("127.0.0.1", 0, receivers + 1, seconds=seconds, kind=kind)
        sender = SharedSender(meeting, run, packing, bucket) if kind == "shared" else BroadcastSender(meeting, packing, bucket)
        opened.append(sender)
        readers = [engines() for _ in range(receivers)]
        for rank, reader in enumerate(readers, start=1):
            reader("meet", (sender.meeting, rank))
        return sender, readers

    yield start
    for sender in opened:
        sender.close()


def publish(sender: StreamSender, readers: list[Engine], version: int, weights: Any, call: str = "receive") -> list[Any]:
    manifest = pickle.loads(pickle.dumps(sender.announce(version)))
    for reader in readers:
        reader.ask(call, manifest)
    sender.send(manifest, iter(weights.items()) if isinstance(weights, dict) else weights)
    return [reader.answer() for reader in readers]


def numbers(value: float, names: str = "ab") -> Weights:
    return {name: torch.full((300,), value + i) for i, name in enumerate(names)}


# --- what is sent arrives ---


@KINDS
def test_two_receivers_get_all_kinds_of_tensors_in_several_buckets(kind: str, meet: Meet):
    sender, readers = meet(kind, 2, packing=Packing(checksum=True))
    adapters = {"lora_A": torch.randn(2, 64), "lora_B": torch.randn(64, 2)}
    for version, update in enumerate([mixed(), adapters, {"empty": torch.empty(0)}, {}, mixed()]):
        assert publish(sender, readers, version, update) == [shown(update.items())] * 2
    assert sender._link.store.num_keys() < 20  # the headers of old versions are not kept


def sending(sender: StreamSender, manifest: Any, weights: Any) -> Future[None]:
    """Send on a thread."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            done.set_result(sender.send(manifest, weights))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done


@KINDS
def test_any_updates_arrive_through_buckets_of_any_size(kind: str, meet: Meet):
    """A tensor's memory is used again as soon as the next one is taken, on both sides."""
    sender, readers = meet(kind)
    update = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6)

    @given(updates=st.lists(update, min_size=1, max_size=3), bucket=st.integers(1, 700), checksum=st.booleans())
    @settings(max_examples=25, deadline=None)
    def check(updates: list[list[tuple[torch.dtype, list[int], bool]]], bucket: int, checksum: bool) -> None:
        sender.bucket, sender.packing = bucket, Packing(checksum=checksum)
        for version, update in enumerate(updates):
            sent: Weights = {}
            for i, (dtype, shape, turned) in enumerate(update):
                values = 2 if dtype == torch.bool else 256
                tensor = torch.randint(0, values, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
                sent[f"{i}"] = tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor
            assert publish(sender, readers, version, fleeting(sent)) == [shown(sent.items())]

    check()


def fleeting(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The tensors as a sharded learner gathers them: each is gone when the next one is taken."""
    for name, tensor in weights.items():
        gathered = tensor.clone()
        yield name, gathered
        if gathered.numel():
            gathered.copy_(torch.zeros_like(gathered))


@KINDS
def test_floating_tensors_are_converted_on_the_way(kind: str, meet: Meet):
    sender, readers = meet(kind, packing=Packing(dtype=torch.bfloat16))
    sent = {"weight": torch.randn(9, 4), "steps": torch.arange(3)}
    expected = {"weight": sent["weight"].bfloat16(), "steps": sent["steps"]}
    assert publish(sender, readers, 0, sent) == [shown(expected.items())]


@KINDS
def test_a_changed_byte_is_found_its_tensor_named_and_the_next_version_arrives(kind: str, meet: Meet, monkeypatch: Any):
    sender, readers = meet(kind, 2, packing=Packing(checksum=True))
    with monkeypatch.context() as patched:
        write = Packing.write

        def tampered(self: Packing, data: Tensor, entry: Entry, tensor: Tensor) -> Entry:
            sealed = write(self, data, entry, tensor)
            if entry.name == "b":
                data[entry.begin + 17] ^= 1
            return sealed

        patched.setattr(Packing, "write", tampered)
        with pytest.raises(Corrupted, match="'b'"):
            publish(sender, readers, 0, numbers(0, "abcdef"))
    with pytest.raises(Corrupted, match="'b'"):
        readers[1].answer()
    assert publish(sender, readers, 1, numbers(1)) == [shown(numbers(1).items())] * 2


# --- how much is held ---


@KINDS
def test_no_side_holds_more_than_two_buckets(kind: str, meet: Meet, run: str):
    """Whatever the weights' size; a tensor larger than a bucket counts as a bucket, and its memory is freed afterwards."""
    sender, readers = meet(kind, 2)
    many = {f"{i}": torch.full((100,), float(i)) for i in range(50)}
    assert publish(sender, readers, 0, many) == [shown(many.items())] * 2
    page = 4096 if kind == "shared" else BUCKET
    assert BUCKET <= sender.peak <= 2 * BUCKET
    assert all(100 * 4 <= reader("peak") <= 2 * BUCKET for reader in readers)
    assert len(slots(run)) <= 2
    assert sum(slots(run)) <= 2 * page
    large = many | {f"large {i}": torch.full((5000,), float(i)) for i in range(4)}
    assert publish(sender, readers, 1, large) == [shown(large.items())] * 2
    assert 20_000 < sender.peak <= 2 * 20_000
    assert all(20_000 <= reader("peak") <= 2 * 20_000 for reader in readers)
    assert slots(run) == []


@KINDS
def test_three_buckets_would_be_found(kind: str, meet: Meet, monkeypatch: Any):
    from drumroll.weights import broadcast, shared_memory

    for module in (broadcast, shared_memory):
        monkeypatch.setattr(module, "SLOTS", stream.SLOTS + 1)
    sender, readers = meet(kind)
    publish(sender, readers, 0, {f"{i}": torch.full((100,), float(i)) for i in range(50)})
    assert sender.peak > 2 * BUCKET


@KINDS
def test_a_slow_receiver_holds_the_sender_back_and_reads_what_was_sent(kind: str, meet: Meet):
    sender, (slow, quick) = meet(kind, 2)
    weights, taken = {f"{i}": torch.full((300,), float(i)) for i in range(12)}, list[str]()

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in fleeting(weights):
            taken.append(name)
            yield name, tensor

    manifest = sender.announce(0)
    slow.ask("slowly", manifest)
    quick.ask("receive", manifest)
    done = sending(sender, manifest, counted())
    for index, (name, tensor) in enumerate(weights.items()):  # each is a bucket of its own
        assert slow.answer() == name
        if kind == "shared":  # gloo's receivers have two buckets of their own besides
            assert len(taken) <= index + 3
        slow.calls.send(None)
        assert slow.answer() == raw(tensor)
    assert slow.answer() is None
    done.result(60)
    assert quick.answer() == shown(weights.items())


# --- what goes wrong ---


@KINDS
def test_another_version_is_refused_and_the_next_arrives(kind: str, meet: Meet):
    sender, (reader,) = meet(kind)
    for weights in (numbers(1, "abcdef"), {}):
        manifest = sender.announce(1)
        reader.ask("receive", replace(manifest, version=7))
        sender.send(manifest, weights.items())
        with pytest.raises(WrongVersion, match="announces version 7, the sender sends 1"):
            reader.answer()
    assert publish(sender, [reader], 2, numbers(2)) == [shown(numbers(2).items())]


@KINDS
def test_a_receiver_that_stops_early_does_not_block_the_others(kind: str, meet: Meet):
    sender, readers = meet(kind, 2)
    manifest = sender.announce(1)
    readers[0].ask("first", manifest)
    readers[1].ask("receive", manifest)
    sender.send(manifest, numbers(1, "abcdef").items())
    readers[0].answer()
    assert readers[1].answer() == shown(numbers(1, "abcdef").items())
    assert publish(sender, readers, 2, numbers(2)) == [shown(numbers(2).items())] * 2


@KINDS
@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError])
def test_receivers_learn_that_the_learner_failed_and_the_caller_gets_its_error(kind: str, meet: Meet, error: type[Exception]):
    sender, readers = meet(kind, 2)

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield from numbers(0, "abcd").items()
        raise error("no more")

    with pytest.raises(error, match=r"^no more$"):
        publish(sender, readers, 0, breaking())
    for reader in readers:
        with pytest.raises(WeightSyncError, match=f"{error.__name__}: no more"):
            reader.answer()
    assert publish(sender, readers, 1, numbers(1)) == [shown(numbers(1).items())] * 2


@KINDS
def test_a_receiver_that_dies_ends_the_attempt_everywhere_and_all_tensors_are_taken(kind: str, meet: Meet):
    """Within seconds, not after the time that a slow receiver has."""
    sender, readers = meet(kind, 2, seconds=3600)
    publish(sender, readers, 0, numbers(0))
    taken = list[str]()

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in numbers(1, "abcdefgh").items():
            taken.append(name)
            yield name, tensor

    manifest = sender.announce(1)
    readers[0].ask("die", manifest)
    readers[1].ask("receive", manifest)
    with pytest.raises(WeightSyncError, match="Version 1 did not reach all engines"):
        sender.send(manifest, gathered())
    assert "".join(taken) == "abcdefgh"  # other ranks of a sharded learner gather them with this one
    with pytest.raises(WeightSyncError):
        readers[1].answer()
    readers[0].process.join()


@KINDS
def test_a_receiver_that_died_before_is_noticed_too(kind: str, meet: Meet):
    sender, readers = meet(kind, 2, seconds=3600)
    publish(sender, readers, 0, numbers(0))
    readers[0].process.kill()
    readers[0].process.join()
    readers[1].ask("receive", manifest := sender.announce(1))
    with pytest.raises(WeightSyncError, match="did not reach all engines"):
        sender.send(manifest, numbers(1).items())
    with suppress(WeightSyncError):  # it may have had its part before
        readers[1].answer()


def gather_and_send(rank: int, folder: str, kind: str, dies: bool) -> Any:
    """Ranks 0 and 1 are a sharded learner's: they gather each tensor together, and rank 0 sends. Rank 2 receives."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{kind}{dies}", rank=rank, world_size=3)
    learners, box = dist.new_group([0, 1]), [None]
    sender: Any = None
    if rank == 0:
        meeting = Meeting("127.0.0.1", 0, 2, seconds=3600, kind=kind)
        sender = (
            SharedSender(meeting, "gathered", bucket=BUCKET) if kind == "shared" else BroadcastSender(meeting, bucket=BUCKET)
        )
        box = [(sender.meeting, sender.announce(3))]
    dist.broadcast_object_list(box, 0)
    meeting, manifest = box[0]

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for index in range(9):
            shards = [torch.zeros(150) for _ in range(2)]
            dist.all_gather(shards, torch.full((150,), 2.0 * index + rank), group=learners)
            yield f"{index}", torch.cat(shards)

    if rank == 2:
        tensors = open_receiver(meeting, 1, "127.0.0.1").receive(manifest)
        if not dies:
            return {name: tensor[::150].tolist() for name, tensor in tensors}
        next(tensors)
        os._exit(9)
    failure = ""
    try:
        if rank == 0:
            sender.send(manifest, gathered())
        else:
            deque(gathered(), maxlen=0)
    except WeightSyncError as error:
        failure = str(error)
    total = torch.ones(1)
    dist.all_reduce(total, group=learners)  # the next thing that the ranks do together
    return failure, total.item()


@KINDS
def test_ranks_that_gather_together_send_what_they_gathered(kind: str, tmp_path: Path):
    first, second, received = run_ranks(gather_and_send, 3, str(tmp_path), kind, False)
    assert first == second == ("", 2.0)
    assert received == {f"{index}": [2.0 * index, 2.0 * index + 1] for index in range(9)}


@KINDS
def test_ranks_that_gather_together_stay_together_when_the_receiver_dies(kind: str, tmp_path: Path):
    first, second = run_ranks(gather_and_send, 3, str(tmp_path), kind, True, lost=(2,))
    assert "did not reach all engines" in first[0]
    assert (first[1], second) == (2.0, ("", 2.0))


def serve_sender(calls: Connection, run: str, kind: str) -> None:
    meeting = Meeting("127.0.0.1", 0, 2, kind=kind)
    sender = SharedSender(meeting, run, bucket=BUCKET) if kind == "shared" else BroadcastSender(meeting, bucket=BUCKET)
    calls.send((sender.meeting, manifest := sender.announce(0)))

    def endless() -> Iterator[tuple[str, Tensor]]:
        while True:
            yield "x", torch.ones(300)

    sender.send(manifest, endless())


@KINDS
def test_a_killed_sender_breaks_the_stream_and_leaves_nothing_behind(kind: str, run: str):
    calls, theirs = FORKED.Pipe()
    process = FORKED.Process(target=serve_sender, args=(theirs, run, kind), daemon=True)
    process.start()
    meeting, manifest = calls.recv()
    receiver = open_receiver(meeting, 1, "127.0.0.1")
    tensors = receiver.receive(manifest)
    next(tensors)
    process.kill()
    process.join()
    with pytest.raises(WeightSyncError, match=r"Version 0 did not arrive|Version 0 is gone"):
        for _ in tensors:
            pass
    receiver.close()
    assert not list(Path("/dev/shm").glob("*drumroll*"))


def test_only_the_models_own_parameters_fill_it():
    model = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    fill(model, [("b", torch.ones(2, 2)), ("a", torch.ones(3, dtype=torch.bfloat16))])
    assert all(bool((value == 1).all()) for value in model.values())
    good = [("a", torch.ones(3)), ("b", torch.ones(2, 2))]
    for wrong, message in (
        ([*good, ("c", torch.ones(1))], "hold 'c' but the model has no such parameter"),
        ([*good, good[0]], "hold 'a' twice"),
        ([("a", torch.ones(1))], r"'a' has the shape \(1,\) in the weights and \(3,\) in the model"),
        (good[:1], "lack 1 of the model's 2 parameters: 'b'"),
        ([], "lack 2 of the model's 2 parameters: 'a', 'b'"),
    ):
        with pytest.raises(WrongWeights, match=message):
            fill(model, wrong)


# --- the store, the group and the choice of the transport ---


def listening(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which something of this machine listens on a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


def test_the_store_listens_on_its_own_address_only_and_holds_no_code():
    sender = BroadcastSender(Meeting("127.0.0.1", 0, 1))
    assert listening(sender.meeting.port) == {"0100007F"}
    entries = (Entry("a.b", torch.bfloat16, (2, 3), 0, 12, 7), Entry("ü", torch.bool, (), 64, 65))
    for header in (Header(3, entries, 65, "/proc/1/fd/2:ab"), Header(3, error="ZeroDivisionError: no")):
        assert Header.decode(header.encode().encode()) == header
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


def test_broadcast_leaves_the_default_group_alone(meet: Meet, tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        sender, readers = meet("broadcast")
        assert publish(sender, readers, 0, numbers(0)) == [shown(numbers(0).items())]
        one = torch.ones(1)
        dist.all_reduce(one)
        assert (one.item(), dist.get_world_size()) == (1.0, 1)
    finally:
        dist.destroy_process_group()
