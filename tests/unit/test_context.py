"""Ranks that divide the tokens of sequences (`parallel.context`) train as one process does, with their part of the activations."""

import pytest
from test_parallel import FAMILIES, LAYOUTS, LIMITS, ReplicasDifferError, Matrix

LAYOUTS.update({"context 2": {"context": 2}, "shard 2 × context 2": {"shard": 2, "context": 2}})


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = Matrix(tmp_path_factory.mktemp("models"))
    yield made
    made.close()

@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("role", ["actor", "critic", "LoRA"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["context 2", "shard 2 × context 2"])
def test_each_strategy_trains_as_one_process(matrix, layout, family, role, dtype):
    found = matrix.compare(layout, family, role, dtype)
    print(found)
    assert found.within(LIMITS[dtype]), found
