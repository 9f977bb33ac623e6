"""Whole runs on Ray whose actor and critic Megatron-Core trains: they draw, train, publish and resume as a run of one rank does."""

import megatron_on_cpu
import pytest
import ray
from quickstarts import TWO_RANKS, first_tokens, floors, learnt

import drumroll
from drumroll.models.loading import load

TWO = {"runtime": "ray", "devices": 2, "kind": "cpu", "threads": 1}
LAYOUTS = {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}}


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster):
    env = {"env_vars": megatron_on_cpu.environment()}
    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=env)
    yield
    ray.shutdown()


def divided(actor):
    return {
        "model": "tiny-even",
        "steps": 2,
        "threads": 1,
        "algorithm": {"preset": "ppo", "kl": 0.05},
        "optim": {"lr": 1e-4, "minibatch": 8},
        "roles": {"actor": actor, "rollout": {"slots": 16}},
        "checkpoint": {"every": 1},
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_draws_and_trains_as_one_rank(small, untimed, layout):
    """Step 1 samples the same tokens and has the same losses; engines hold the learner's weights after each publish.

    The run goes on under plain PyTorch.
    """
    alone = drumroll.train(small(name="alone", **divided({})))
    run = drumroll.train(small(cluster=TWO, **divided({"backend": "megatron", "parallel": LAYOUTS[layout]})))
    assert first_tokens(run) == first_tokens(alone)
    for key in ("train/loss", "train/grad_norm", "train/tokens", "train/entropy", "critic/loss"):
        assert run.metrics[1][key] == pytest.approx(alone.metrics[1][key], rel=1e-4, abs=1e-6), key
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])
    exported, trained = load(str(run.path / "model")).module, load("tiny-even").module
    assert all(p.shape == q.shape for p, q in zip(exported.parameters(), trained.parameters(), strict=True))
    other = ["backend=torch", "parallel.tensor=1", "parallel.pipeline=1", "parallel.shard=2"]
    resumed = drumroll.train(resume=run.path, overrides=["steps=3", *(f"roles.actor.{change}" for change in other)])
    assert [m["step"] for m in resumed.metrics] == [0, 1, 2, 3]
    assert untimed(resumed).startswith(untimed(run)[:-1])
    assert resumed.metrics[3]["train/mismatch"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_learns_as_one_rank_does(tmp_path, layout):
    axes = (f"roles.actor.parallel.{axis}={size}" for axis, size in LAYOUTS[layout].items())
    found = learnt(tmp_path, *TWO_RANKS, "roles.actor.backend=megatron", *axes)
    assert all(found[name] >= floor > 0.8 for name, floor in floors().items()), (found, floors())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_whose_rank_is_killed_goes_on(small, survives_a_kill, layout):
    recipe = divided({"backend": "megatron", "parallel": LAYOUTS[layout]}) | {"steps": 4, "deterministic": True}
    survives_a_kill(small(cluster=TWO, **recipe))
