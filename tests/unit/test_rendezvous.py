"""One address for stores and groups of a process, and failures to meet as one sentence."""

import socket

import pytest
import torch
from forked import FORKED

from drumroll.errors import ConfigError
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.processes.network import address_of
from drumroll.processes.rendezvous import (
    LOOPBACK,
    MeetingError,
    Rendezvous,
    find_store,
    open_store,
    steer_collectives,
)
from drumroll.weights import Meeting
from drumroll.weights.broadcast import BroadcastReceiver

ONE, TWO = "127.0.0.2", "127.0.0.3"  # two addresses of this machine, neither of which its name resolves to


def listening(port_of):
    """Addresses at which sockets of this process listen, but for the one on a port."""
    import os
    from pathlib import Path

    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        where, state, inode = line.split()[1], line.split()[3], line.split()[9]
        address, port = where.split(":")
        if state == "0A" and f"socket:[{inode}]" in own and int(port, 16) != port_of:
            found.add(socket.inet_ntoa(int(address, 16).to_bytes(4, "little")))
    return found


def rank(number, port, addresses, answers):
    """One of two ranks: the sum of the ranks' ones, and where this process listens."""
    torch.set_num_threads(1)
    ranks = Ranks.meet(
        Mesh(data=2, rank=number), Rendezvous(ONE, port, tuple(addresses)), device="cpu", seconds=77, patience=60
    )
    assert ranks.group.gloo.options._timeout.total_seconds() == 77  # of a collective
    sums = torch.ones(3)
    ranks.add([sums])
    answers.put((number, sums.tolist(), bool(ranks.most(int(number == 1))), listening(port)))


def test_ranks_listen_at_the_address_they_are_given_whatever_the_host_name_means():
    store, answers = open_store(ONE), FORKED.Queue()
    processes = [FORKED.Process(target=rank, args=(n, store.port, (ONE, TWO), answers)) for n in range(2)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    assert found == [(0, [2.0] * 3, True, {ONE}), (1, [2.0] * 3, True, {TWO})]


def test_a_rank_whose_peer_does_not_answer_names_both_addresses():
    store = open_store(ONE)
    store.set("address/1", TWO)
    with pytest.raises(MeetingError) as error:
        Ranks.meet(Mesh(data=2, rank=0), Rendezvous(ONE, store.port, (ONE, ONE)), device="cpu", seconds=600, patience=2)
    text = str(error.value)
    assert text.startswith(f"Rank 0 at {ONE} forms no group with rank 1 at {TWO} in 2 s: ")
    assert "cluster.interface" in text
    assert "\n" not in text
    assert len(text) < 600
    assert error.value.__cause__ is None


def test_a_rank_whose_peer_never_came_and_one_with_an_address_of_another_machine():
    store = open_store(ONE)
    with pytest.raises(MeetingError, match=rf"Rank 0 at {ONE} forms no group with rank 1 that never came in 2 s"):
        Ranks.meet(Mesh(data=2, rank=0), Rendezvous(ONE, store.port, (ONE, ONE)), device="cpu", seconds=2)
    with pytest.raises(MeetingError, match=r"Rank 1 at 192\.0\.2\.1 forms no group with rank 0 at 127\.0\.0\.2 in 2 s"):
        Ranks.meet(Mesh(data=2, rank=1), Rendezvous(ONE, store.port, (ONE, "192.0.2.1")), device="cpu", seconds=2)


def test_a_store_that_does_not_answer_is_a_sentence_with_both_addresses():
    with socket.create_server((ONE, 0)) as taken:
        port = taken.getsockname()[1]
    sentence = rf"The process at {TWO} does not reach the store at {ONE}:{port} in 1 s: .* cluster\.interface"
    with pytest.raises(MeetingError, match=sentence) as error:
        find_store(ONE, port, 1, TWO)
    assert "\n" not in str(error.value)
    with pytest.raises(MeetingError, match=sentence):
        BroadcastReceiver(Meeting(ONE, port, 2, seconds=1), 1, TWO)


def test_an_interface_is_an_address():
    assert address_of("lo") == LOOPBACK
    with pytest.raises(
        ConfigError, match=r"cluster\.interface: .* has no interface 'ib7' with an address; it has lo \(127\.0\.0\.1\)"
    ):
        address_of("ib7")


def test_nccl_is_bound_to_the_interface_of_the_address_unless_the_user_says_so(monkeypatch):
    monkeypatch.setattr(
        "drumroll.processes.rendezvous.interfaces", lambda: {"lo": LOOPBACK, "ib0": "192.0.2.1", "eth0": "192.0.2.2"}
    )
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    import os

    for address in (LOOPBACK, "192.0.2.9"):
        steer_collectives("cuda", address)
        assert "NCCL_SOCKET_IFNAME" not in os.environ
    steer_collectives("cuda", "192.0.2.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    steer_collectives("cuda", "192.0.2.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
