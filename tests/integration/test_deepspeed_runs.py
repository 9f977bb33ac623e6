"""Whole runs whose actor trains by DeepSpeed on Ray: they draw, train, publish and resume as a run of one rank does."""

import pytest
import ray
from quickstarts import TWO_RANKS, first_tokens, floors, learnt

import drumroll
from drumroll.models.loading import load

TWO = {"runtime": "ray", "devices": 2, "kind": "cpu", "threads": 1}
KEYS = ("train/loss", "train/grad_norm", "train/tokens", "train/entropy", "critic/loss")


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster):
    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def recipe(actor, steps=2):
    return {
        "model": "tiny-even",
        "steps": steps,
        "threads": 1,
        "deterministic": True,
        "algorithm": {"preset": "ppo", "kl": 0.05},
        "optim": {"lr": 1e-4, "minibatch": 8},
        "roles": {"actor": actor, "rollout": {"slots": 16}},
        "checkpoint": {"every": 1},
    }


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_an_actor_of_deepspeed_draws_and_trains_as_one_rank(small, zero):
    """The critic and the reference, a frozen role, compute by DeepSpeed too; the run goes on by plain PyTorch."""
    alone = drumroll.train(small(name="alone", **recipe({})))
    actor = {"backend": "deepspeed", "parallel": {"shard": 2, "zero": zero}}
    run = drumroll.train(small(name=f"zero{zero}", cluster=TWO, **recipe(actor)))
    assert first_tokens(run) == first_tokens(alone)
    for key in KEYS:
        assert run.metrics[1][key] == pytest.approx(alone.metrics[1][key], rel=1e-4, abs=1e-6), key
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])
    exported, trained = load(str(run.path / "model")).module, load("tiny-even").module
    assert all(p.shape == q.shape for p, q in zip(exported.parameters(), trained.parameters(), strict=True))
    back = ["steps=3", "roles.actor.backend=torch", "roles.actor.parallel.zero=3"]
    resumed = drumroll.train(resume=run.path, overrides=back)
    assert [m["step"] for m in resumed.metrics] == [0, 1, 2, 3]
    assert resumed.metrics[3]["train/mismatch"] < 1e-4


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_on(small, survives_a_kill):
    survives_a_kill(small(cluster=TWO, **recipe({"backend": "deepspeed", "parallel": {"shard": 2}}, steps=4)))


@pytest.mark.slow
def test_deepspeed_learns_as_one_rank_does(tmp_path):
    found = learnt(tmp_path, *TWO_RANKS, "roles.actor.backend=deepspeed", "roles.actor.parallel.shard=2")
    assert all(found[name] >= floor > 0.8 for name, floor in floors().items()), (found, floors())
