"""Whole runs whose actor is divided over ranks on Ray: they draw, train, publish and resume as a run of one rank does."""

import pytest
import ray
from quickstarts import TWO_RANKS, first_tokens, floors, learnt

import drumroll
from drumroll.config import check
from drumroll.errors import ConfigError, DrumrollError
from drumroll.models.loading import load


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster):
    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


ONE = {"runtime": "ray", "devices": 1, "kind": "cpu", "threads": 1}
TWO = ONE | {"devices": 2}
LAYOUTS = {"shard 2": {"shard": 2}, "tensor 2": {"tensor": 2}, "context 2": {"context": 2}}
PPO = {"preset": "ppo", "kl": 0.05}


def divided(parallel):
    return {
        "model": "tiny-even",
        "steps": 2,
        "threads": 1,
        "algorithm": PPO,
        "optim": {"lr": 1e-4, "minibatch": 8},
        "roles": {"actor": {"parallel": parallel}, "rollout": {"slots": 16}},
        "checkpoint": {"every": 1},
    }


@pytest.fixture(scope="module")
def alone(small_in, tmp_path_factory):
    """The run of one rank."""
    return drumroll.train(small_in(tmp_path_factory.mktemp("alone"), **divided({})))


@pytest.mark.parametrize("layout", ["shard 2", "tensor 2", pytest.param("context 2", marks=pytest.mark.slow)])
def test_a_divided_actor_draws_and_trains_as_one_rank(small, alone, untimed, layout):
    """Step 1 samples the same tokens and has the same losses; engines hold the learner's weights after each publish.

    The run goes on under the other layout.
    """
    run = drumroll.train(small(cluster=TWO, **divided(LAYOUTS[layout])))
    assert first_tokens(run) == first_tokens(alone)
    for key in ("train/loss", "train/grad_norm", "train/tokens", "train/entropy", "critic/loss"):
        assert run.metrics[1][key] == pytest.approx(alone.metrics[1][key], rel=1e-4, abs=1e-6), key
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])
    exported, trained = load(str(run.path / "model")).module, load("tiny-even").module
    assert all(p.shape == q.shape for p, q in zip(exported.parameters(), trained.parameters(), strict=True))
    other = {"shard": 1, "tensor": 1, "context": 1} | next(sizes for name, sizes in LAYOUTS.items() if name != layout)
    resumed = drumroll.train(
        resume=run.path, overrides=["steps=3", *(f"roles.actor.parallel.{k}={v}" for k, v in other.items())]
    )
    assert [m["step"] for m in resumed.metrics] == [0, 1, 2, 3]
    assert untimed(resumed).startswith(untimed(run)[:-1])
    assert resumed.metrics[3]["train/mismatch"] < 1e-4


@pytest.mark.slow
def test_a_divided_mixture_of_experts_draws_and_trains_as_one_rank(small):
    """Engines receive experts one by one; loads of experts are those of one rank; the run goes on there."""
    mixture = divided({"shard": 2}) | {"model": "tiny-moe-random", "algorithm": {**PPO, "entropy": 0.01}, "optim": {"lr": 1e-4}}
    alone = drumroll.train(small(name="alone", **{**mixture, "roles": {}}))
    run = drumroll.train(small(cluster=TWO, **mixture))
    assert first_tokens(run) == first_tokens(alone)
    loads = [key for key in run.metrics[1] if "/expert" in key or "router" in key]
    assert len(loads) == 2 * 7  # of actor and critic: four layers, the largest, idle ones, entropy
    for key in ("train/loss", "train/grad_norm", *loads):
        assert run.metrics[1][key] == pytest.approx(alone.metrics[1][key], rel=1e-4, abs=1e-6), key
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])
    resumed = drumroll.train(resume=run.path, overrides=["steps=3", "roles.actor.parallel.shard=1"])
    assert resumed.metrics[3]["train/mismatch"] < 1e-4


def test_what_cannot_be_divided_is_refused_with_the_arithmetic(small):
    with pytest.raises(ConfigError, match=r"tensor 2 does not divide the 5 heads"):
        drumroll.train(small(cluster=TWO, roles={"actor": {"parallel": {"tensor": 2}}}))
    with pytest.raises(ConfigError, match=r"shard 3 does not divide 2 devices; nearest: shard 2"):
        drumroll.train(small(cluster=TWO, roles={"actor": {"parallel": {"shard": 3}}}))
    with pytest.raises(ConfigError, match=r"shard 2 needs 2 devices, but the local runtime has one; set cluster.runtime: ray"):
        check(small(roles={"actor": {"parallel": {"shard": 2}}}))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_holds_a_divided_actors_weights(small, layout):
    roles = {"actor": {"parallel": LAYOUTS[layout]}, "rollout": {"backend": "vllm"}}
    run = drumroll.train(
        small(cluster=TWO, model="tiny-even", roles=roles, steps=3, optim={"lr": 3e-3}, algorithm={"entropy": 1e-3})
    )
    assert [m["train/mismatch"] < 1e-4 for m in run.metrics[1:]] == [True] * 3


@pytest.mark.slow
def test_vllm_on_cpus_is_refused_new_weights_of_experts(small):
    roles = {"actor": {"parallel": LAYOUTS["shard 2"]}, "rollout": {"backend": "vllm"}}
    with pytest.raises(ConfigError, match=r"vLLM's CPU build does not take new weights of a mixture of experts \(tiny-moe\)"):
        drumroll.train(small(cluster=TWO, model="tiny-moe", roles=roles, steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model"), [*((layout, "tiny-even") for layout in LAYOUTS), ("shard 2", "tiny-moe")])
def test_a_divided_run_whose_rank_is_killed_goes_on(small, survives_a_kill, layout, model):
    recipe = divided(LAYOUTS[layout]) | {"model": model, "steps": 4, "deterministic": True}
    survives_a_kill(small(cluster=TWO, **recipe))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model"), [*((layout, "tiny-even") for layout in LAYOUTS), ("shard 2", "tiny-moe")])
def test_a_divided_run_learns_as_one_rank_does(tmp_path, layout, model):
    axes = (f"roles.actor.parallel.{axis}={size}" for axis, size in LAYOUTS[layout].items())
    found = learnt(tmp_path, *TWO_RANKS, *axes, model=model)
    assert all(found[name] >= floor > 0.8 for name, floor in floors(model).items()), (found, floors(model))


MORTAL = """
import itertools, os, signal
import torch
from drumroll.learners.backends.torch import open_backend
from drumroll.learners.checkpoint import Snapshot

def mortal(spec):
    backend = open_backend(spec)
    if spec.ranks.mesh.rank == 1 and spec.optim is not None:
        place, name, calls = WHERE
        owner = {"backend": backend, "optimizer": backend.optimizer, "tensor": torch.Tensor, "snapshot": Snapshot}[place]
        plain, count = getattr(owner, name), itertools.count(1)
        def dying(*given, **named):
            if next(count) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*given, **named)
        setattr(owner, name, dying)
    return backend
"""
PLACES = {
    "forward": ("backend", "_forward", 3),
    "backward": ("tensor", "backward", 3),
    "clip": ("backend", "clip", 2),
    "step": ("optimizer", "step", 2),
    "save": ("snapshot", "write", 1),
    "load": ("backend", "load", 1),
    "publish": ("backend", "weights", 2),
}
"""What rank 1 is in the middle of when it is killed: the so manieth call."""


@pytest.mark.slow
@pytest.mark.parametrize(("place", "layout"), [*((place, "shard 2") for place in PLACES), ("forward", "tensor 2")])
def test_a_rank_killed_in_the_middle_of_anything_ends_the_run_in_one_sentence(small, tmp_path, place, layout):
    """Where ranks compute together the peer leaves too; the sentence names the rank that died. The run goes on afterwards."""
    owner, name, calls = PLACES[place]
    module = f"mortal_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(MORTAL.replace("WHERE", repr((owner, name, calls))))
    recipe = divided(LAYOUTS[layout]) | {"steps": 4, "import_from": [str(tmp_path)]}
    own = {"overrides": [f"roles.actor.backend={module}:mortal"]}
    dying = small(cluster=TWO, **recipe)
    if place == "load":
        run = drumroll.train(small(cluster=TWO, **(recipe | {"steps": 2})))
        with pytest.raises(DrumrollError, match="actor rank 1 is gone"):
            drumroll.train(resume=run.path, overrides=["steps=4", *own["overrides"]])
    else:
        with pytest.raises(DrumrollError, match="actor rank 1 is gone"):
            drumroll.train(dying, **own)
    [path] = (tmp_path / "runs").iterdir()
    done = drumroll.train(resume=path, overrides=["roles.actor.backend=torch", "steps=4"])
    assert [m["step"] for m in done.metrics] == [0, 1, 2, 3, 4]
