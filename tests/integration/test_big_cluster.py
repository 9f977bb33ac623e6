"""Layouts with many devices and several machines, in small: fake machines, CPU slots, the tiny model."""

import asyncio

import pytest
import ray

import drumroll

pytestmark = pytest.mark.slow


@pytest.fixture
def machines():
    """Three machines of which each can be killed."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def test_sixteen_devices_shared_as_in_the_paper(small):
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        run = drumroll.train(
            small(
                cluster={"runtime": "ray", "devices": 16, "kind": "cpu", "threads": 1, "start_timeout": 300},
                roles={
                    "actor": {"devices": "0-15"},
                    "rollout": {"devices": "0-11", "slots": 4},
                    "judge": {"model": "tiny", "devices": "12-15", "max_prompt_tokens": 128},
                },
                reward=["exact", {"use": "judge", "weight": 0.1}],
                rollout={"prompts": 12, "engine_timeout": 300},
                eval={"sets": {}},
                threads=1,
            )
        )
    finally:
        ray.shutdown()
    assert run.summary["steps"] == 2
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


def test_a_machine_without_the_learner_is_lost_and_the_run_completes(small, machines, killer):
    cluster, nodes = machines

    async def strike(workers):
        learner = workers.runtime._node_of(workers._actors.device_sets[0][0])
        victim = next(n for n in nodes if n.node_id != learner)
        await asyncio.get_running_loop().run_in_executor(None, cluster.remove_node, victim, False)

    listener = killer(strike)
    run = drumroll.train(
        small(
            cluster={"runtime": "ray", "devices": 3, "kind": "cpu", "threads": 1, "weight_sync": "broadcast"},
            roles={"actor": {"devices": "0"}, "rollout": {"devices": "0-2"}},
            steps=6,
            threads=1,
        ),
        progress=listener,
    )
    assert run.summary["steps"] == 6
    assert any("rollout rank" in text and "is gone" in text for text in listener.heard), listener.heard
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])
