"""The mesh: every rank has its own coordinates, and a share of the batch that exactly its peers of other axes have too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.mesh import AXES, Mesh

sizes = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(sizes)
def test_ranks_and_coordinates_are_one_to_one(axes):
    whole = Mesh(**axes)
    ranks = [Mesh(**axes, rank=rank) for rank in range(whole.size)]
    assert len({tuple(rank.coordinates.items()) for rank in ranks}) == whole.size
    assert all(0 <= rank.coordinates[axis] < axes[axis] for rank in ranks for axis in AXES)
    neighbours = [rank.coordinates["tensor"] for rank in ranks[: axes["tensor"]]]
    assert neighbours == list(range(axes["tensor"]))  # the axis that exchanges most is the innermost


@given(sizes)
def test_ranks_share_rows_exactly_where_data_and_shard_agree(axes):
    ranks = [Mesh(**axes, rank=rank) for rank in range(Mesh(**axes).size)]
    for one in ranks:
        for other in ranks:
            same = all(one.coordinates[axis] == other.coordinates[axis] for axis in ("data", "shard"))
            assert (one.share == other.share) is same
    leaders = Mesh(**axes).leaders()
    assert [ranks[leader].share for leader in leaders] == list(range(axes["data"] * axes["shard"]))
    assert all(rank.rank >= leaders[rank.share] for rank in ranks)


def test_experts_regroup_ranks_with_different_rows():
    assert Mesh(data=2, shard=2, expert=4).size == 4
    with pytest.raises(AssertionError, match="expert 3 does not divide data × shard × tensor = 4"):
        Mesh(data=2, shard=2, expert=3)
