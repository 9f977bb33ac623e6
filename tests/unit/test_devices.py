"""Roles get the devices they ask for, and a request that cannot be met is refused with its arithmetic."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config import load
from drumroll.errors import ConfigError
from drumroll.placement.devices import Device, DeviceRequest, Kind, Pool, Sharing, lay_out, parse, ranges
from drumroll.placement.layout import pool_of


def gpus(count, nodes=1):
    return Pool.of([{Kind.CUDA: count // nodes}] * nodes)


def numbers(layout, role):
    return [d.index for d in layout.devices[role]]


def refusal(pool, *requests):
    with pytest.raises(ConfigError) as error:
        lay_out(pool, requests)
    return str(error.value)


# --- the pool ---


@pytest.mark.parametrize(("threads", "own", "expected"), [(0, 3, 3), (2, 3, 2), (0, 0, None)])
def test_the_threads_of_a_device_are_the_clusters_or_the_runs(small, threads, own, expected):
    config = load(small(threads=own, cluster={"runtime": "ray", "kind": "cpu", "devices": 2, "threads": threads})).config
    cores = max(1, (os.cpu_count() or 1) // 2)
    assert [d.threads for d in pool_of(config, 0).devices] == [expected or cores] * 2


def test_a_pool_counts_node_by_node_and_gpus_first():
    pool = Pool.of([{Kind.CUDA: 2, Kind.CPU: 1}, {Kind.CUDA: 1}], threads=4)
    assert pool.devices == (
        Device(0, Kind.CUDA, 0, 0, 4),
        Device(1, Kind.CUDA, 0, 1, 4),
        Device(2, Kind.CPU, 0, 0, 4),
        Device(3, Kind.CUDA, 1, 0, 4),
    )


# --- layouts ---


def test_the_papers_layout():
    layout = lay_out(
        gpus(16, nodes=2),
        [
            DeviceRequest("actor", "0-15", {"data": 2, "tensor": 4, "pipeline": 2}, spreads=True),
            DeviceRequest("rollout", "0-11", {"tensor": 2}),
            DeviceRequest("judge", "12-15"),
        ],
    )
    assert [len(layout.devices[r]) for r in ("actor", "rollout", "judge")] == [16, 12, 4]
    assert layout.sharing("actor", "rollout") is Sharing.PART
    assert layout.sharing("rollout", "judge") is Sharing.NONE
    assert layout.sharing("actor", "judge") is Sharing.PART
    assert [[d.index for d in r] for r in layout.replicas("rollout")] == [[i, i + 1] for i in range(0, 12, 2)]
    assert layout.describe() == (
        "role     devices     ranks                                shares with\n"
        "actor    cuda 0-15   16 = data 2 × pipeline 2 × tensor 4  rollout (part), judge (part)\n"
        "rollout  cuda 0-11   12 = 6 × 2                           actor (part)\n"
        "judge    cuda 12-15  4                                    actor (part)"
    )


def test_a_role_that_names_nothing_shares_with_the_actor_and_the_actor_takes_all():
    layout = lay_out(gpus(4), [DeviceRequest("rollout"), DeviceRequest("actor"), DeviceRequest("judge", "rollout")])
    assert numbers(layout, "actor") == numbers(layout, "rollout") == numbers(layout, "judge") == [0, 1, 2, 3]
    assert layout.sharing("judge", "actor") is layout.sharing("rollout", "actor") is Sharing.WHOLE


def test_auto_is_the_default_and_never_a_role():
    given = lay_out(
        gpus(4), [DeviceRequest("actor", "auto"), DeviceRequest("rollout", " auto "), DeviceRequest("critic", "1-1")]
    )
    assert numbers(given, "actor") == numbers(given, "rollout") == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"'atuo' is no role with devices to share \(actor\). Did you mean 'auto'\?"):
        lay_out(gpus(4), [DeviceRequest("actor"), DeviceRequest("rollout", "atuo")])


def test_without_an_actor_the_first_role_is_shared():
    layout = lay_out(gpus(4), [DeviceRequest("teacher", 2), DeviceRequest("student")])
    assert numbers(layout, "student") == [0, 1]


def test_counts_take_the_lowest_devices_that_no_range_claims():
    layout = lay_out(gpus(8), [DeviceRequest("actor", 3), DeviceRequest("rollout", 2), DeviceRequest("judge", "1-2,6")])
    assert (numbers(layout, "actor"), numbers(layout, "rollout")) == ([0, 3, 4], [5, 7])
    pairs = (("actor", "rollout"), ("actor", "judge"), ("rollout", "judge"))
    assert all(layout.sharing(one, other) is Sharing.NONE for one, other in pairs)


def test_ranks_follow_the_order_that_is_written():
    assert numbers(lay_out(gpus(8), [DeviceRequest("actor", " 6-7, 0 ,3")]), "actor") == [6, 7, 0, 3]


def test_kinds_may_be_mixed_between_roles_and_replicas_but_not_inside_one():
    pool = Pool.of([{Kind.CUDA: 2, Kind.CPU: 2}])
    layout = lay_out(pool, [DeviceRequest("actor"), DeviceRequest("reference", "2-3"), DeviceRequest("rollout", "0-3")])
    assert numbers(layout, "actor") == [0, 1]  # the default is GPUs where there are any
    assert "cuda+cpu 0-3" in layout.describe()
    assert "roles.rollout.parallel: tensor 4 puts one replica on devices 0-3, which mix cuda and cpu." in refusal(
        pool, DeviceRequest("rollout", "0-3", {"tensor": 4})
    )


# --- refusals ---


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ("12-15", "roles.judge.devices: 12-15 names device 15, but the pool has 8 devices (0-7)."),
        ("0,99999999999999", "names device 99999999999999, but the pool has 8 devices"),
        ("7-3", "roles.judge.devices: the range 7-3 runs backwards; write 3-7."),
        ("0-3,2", "roles.judge.devices: '0-3,2' names device 2 twice."),
        ("0,,3", "'0,,3' has a part '' that is neither a device nor a range"),
        ("0-", "a part '0-' that is neither a device nor a range"),
        ("-1", "a part '-1' that is neither"),
        ("", "a part '' that is neither"),
        ("2**2", "a part '2**2' that is neither"),
        ("[0, 1]", "a part '[0' that is neither"),
        ("range(4)", "'range(4)' is no role with devices to share (actor)."),
        ("acter", "'acter' is no role with devices to share (actor). Did you mean 'actor'?"),
        (0, "roles.judge.devices: a count of devices is at least 1; device number 0 alone is written 0-0, got 0."),
        ("judge", "roles.judge.devices: judge → judge share in a circle; give one of them devices of its own."),
    ],
)
def test_what_cannot_be_read_is_refused(devices, says):
    assert says in refusal(gpus(8), DeviceRequest("actor", "0-3"), DeviceRequest("judge", devices))


def test_too_many_by_count_is_refused_with_the_sum():
    said = refusal(gpus(8), DeviceRequest("actor", 4), DeviceRequest("judge", 2), DeviceRequest("rollout", "0-3"))
    assert "roles ask for 6 devices by count, but only 4 of 8 are free: actor 4, judge 2; rollout holds 0-3." in said


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (
            {"tensor": 3, "pipeline": 2},
            "roles.actor.parallel: tensor 3 × pipeline 2 = 6 does not divide 16 devices; nearest: tensor 4 × pipeline 2.",
        ),
        ({"tensor": 32}, "roles.actor.parallel: tensor 32 does not divide 16 devices; nearest: tensor 16."),
        ({"tensor": 0}, "roles.actor.parallel.tensor: 0 must be at least 1."),
    ],
)
def test_parallel_sizes_must_fill_the_devices(parallel, says):
    assert says in refusal(gpus(16), DeviceRequest("actor", "0-15", parallel))


def test_a_circle_of_sharing_is_refused():
    requests = [DeviceRequest("actor", "rollout"), DeviceRequest("rollout", "judge"), DeviceRequest("judge")]
    assert "actor → rollout → judge → actor share in a circle" in refusal(gpus(2), *requests)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"data": 2, "shard": 4}, "data 2 × 4 devices of a replica = 8, but the role has 16 devices; data 4 would fit"),
        (
            {"shard": 2, "expert": 3},
            "roles.actor.parallel: expert 3 does not divide data × shard × tensor = 16, the ranks over which experts are spread; expert 1 or 2 or 4 or 8 or 16 does.",
        ),
        ({"shard": 5, "expert": 2}, "roles.actor.parallel: shard 5 × expert 2 does not divide 16 devices; nearest: shard 4."),
    ],
)
def test_a_learners_mesh_must_fill_its_devices(parallel, says):
    assert says in refusal(gpus(16), DeviceRequest("actor", "0-15", parallel, spreads=True))
    assert (
        lay_out(gpus(16), [DeviceRequest("actor", "0-15", {"shard": 2, "expert": 4}, spreads=True)]).meshes["actor"].data == 8
    )


# --- for all pools and requests ---


@given(st.sets(st.integers(0, 40)).map(sorted) | st.permutations(range(8)))
def test_ranges_and_parse_are_inverse(indices):
    if indices:
        assert parse(ranges(indices), "key", 41) == list(indices)


names = st.sampled_from(["actor", "rollout", "judge", "reference", "critic"])
texts = st.text("0123456789-, ", max_size=8) | st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(ranges)
requests = st.lists(
    st.builds(
        DeviceRequest,
        names,
        st.none() | st.integers(0, 4) | names | texts,
        st.dictionaries(st.sampled_from(["data", "tensor", "pipeline", "expert"]), st.integers(1, 3), max_size=2),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda r: r.role,
)
pools = st.lists(st.fixed_dictionaries({Kind.CUDA: st.integers(0, 4), Kind.CPU: st.integers(0, 2)}), min_size=1, max_size=3)


@given(pools.map(Pool.of).filter(lambda pool: pool.devices), requests)
def test_a_layout_keeps_every_promise_or_is_refused_in_a_sentence(pool, asked):
    refused, layout = "", None
    try:
        layout = lay_out(pool, asked)
    except ConfigError as error:
        refused = str(error)
    if layout is None:
        assert refused.startswith("roles")
        assert refused[-1] in ".?"
        return
    counted = [d for r in asked if isinstance(r.devices, int) for d in layout.devices[r.role]]
    ranged = [d for r in asked if isinstance(r.devices, str) and r.devices.strip()[0].isdigit() for d in layout.devices[r.role]]
    assert len(counted) == len(set(counted))
    assert not set(counted) & set(ranged)
    for request in asked:
        mine = layout.devices[request.role]
        assert mine
        assert len(set(mine)) == len(mine)
        assert set(mine) <= set(pool.devices)
        assert sum(layout.replicas(request.role), ()) == mine
        if isinstance(request.devices, int):
            assert len(mine) == request.devices
        elif request.devices in layout.devices:
            assert layout.sharing(request.role, request.devices) is Sharing.WHOLE
        assert request.role in layout.describe()
    for one in layout.devices:
        for other in layout.devices:
            if one != other:
                common = set(layout.devices[one]) & set(layout.devices[other])
                assert bool(common) == (layout.sharing(one, other) is not Sharing.NONE)
                assert layout.sharing(one, other) is layout.sharing(other, one)


def test_a_learners_replica_is_several_processes_and_an_engines_is_one():
    pool = Pool.of([{Kind.CUDA: 4}], memory=80 * 2**30)
    layout = lay_out(
        pool,
        [
            DeviceRequest("actor", "0-3", {"shard": 2}, spreads=True),
            DeviceRequest("rollout", "0-3", {"tensor": 2}),
        ],
    )
    assert [[d.index for d in devices] for devices in layout.workers("actor")] == [[0], [1], [2], [3]]
    assert (layout.meshes["actor"].data, layout.meshes["actor"].shard) == (2, 2)
    assert [[d.index for d in devices] for devices in layout.workers("rollout")] == [[0, 1], [2, 3]]
    assert {d.memory for d in pool.devices} == {80 * 2**30}
