"""The same run on the ray runtime: equal to the local one, over several ranks, on shared devices, and when workers die."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
import yaml
from test_reward_model import classifier

import drumroll
from drumroll import stages
from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.batch import pack
from drumroll.config import check
from drumroll.engines import Request, Sampling
from drumroll.errors import ConfigError, PeerFailed
from drumroll.learners import Learner
from drumroll.sample import Group, Owner, Prompt, Sample, Trace
from drumroll.store.run import Run
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.ray import RayWorkers
from drumroll.workers.ray_group import RayGroup
from drumroll.workers.ray_workers import EngineWorker, LearnerWorker
from drumroll.workers.runtime import open_workers
from drumroll.workers.server import WorkerLost


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster):
    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


ONE = {"runtime": "ray", "devices": 1, "kind": "cpu", "threads": 1}


def test_ray_and_local_are_byte_equal(small, untimed):
    same = {
        "deterministic": True,
        "threads": 1,
        "steps": 3,
        "algorithm": {"preset": "grpo", "kl": 0.01},
        "optim": {"minibatch": 8},
    }
    local = drumroll.train(small(name="local", **same))
    remote = drumroll.train(small(name="remote", cluster=ONE, **same))
    assert untimed(remote) == untimed(local)
    assert [s["traces"] for s in remote.samples] == [s["traces"] for s in local.samples]
    assert remote.metrics[1]["memory/train/actor"] >= remote.metrics[1]["memory/train/actor/max"] > 0.1


def fates(run):
    import sqlite3

    with sqlite3.connect(run.path / "ledger.sqlite") as db:
        return sorted(db.execute("SELECT draw, fate FROM draws WHERE fate IN ('trained', 'filtered', 'failed')"))


def test_two_engines_two_reward_processes_and_two_ranks_draw_the_same(small):
    """Step 1 has the same tokens; fates are the same; two ranks sum to one rank's gradient. Reward, estimator and loss are
    functions that every process receives from this one."""
    scale = 2.0

    def correct(completion, answer):
        return float(completion.strip() == str(answer))

    @ESTIMATORS.register("centred on Ray", per_token=True)
    def centred(scores):
        return (scores.token_rewards - scores.token_rewards.mean()) * scale

    def loss(tokens, config):
        return -tokens.advantages * (tokens.logprobs - tokens.logprobs.detach()).exp() * scale

    same = {"reward": correct, "steps": 2, "rollout": {"reward_workers": 2}, "threads": 1, "optim": {"lr": 1e-4}}
    same["algorithm"] = {"advantage": centred, "loss": loss}
    local = drumroll.train(small(name="local", **same))
    cluster = ONE | {"devices": 2, "weight_sync": "broadcast", "checksum": True}
    remote = drumroll.train(small(name="remote", cluster=cluster, roles={"actor": {"devices": "0-1"}}, **same))
    first = [
        {s["id"]: s["traces"][0]["tokens"] for s in run.samples if s["step"] == 1 and s["kind"] == "train"}
        for run in (local, remote)
    ]
    assert first[0] == first[1]
    assert fates(local) == fates(remote)
    for key in ("train/loss", "train/grad_norm", "train/tokens", "train/entropy"):
        assert remote.metrics[1][key] == pytest.approx(local.metrics[1][key], rel=1e-4, abs=1e-6), key
    assert all(m["train/mismatch"] < 1e-4 for m in remote.metrics[1:])


SYNCED = {"steps": 3, "optim": {"lr": 3e-3}, "eval": {"sets": {}}, "threads": 1, "algorithm": {"entropy": 1e-3}}


@pytest.mark.parametrize(
    "changes",
    [
        {"roles": {"actor": {"lora": {}}}},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"model": "untied"}, marks=pytest.mark.slow),
    ],
    ids=["lora", "tied", "untied"],
)
def test_after_every_sync_engine_and_learner_agree(small, tmp_path, changes):
    if changes.get("model"):
        changes = {"model": untied(tmp_path / "untied")}
    run = drumroll.train(small(cluster=ONE, **SYNCED, **changes))
    assert [m["train/mismatch"] < 1e-4 for m in run.metrics[1:]] == [True] * 3


def untied(folder):
    """The tiny model with a head of its own."""
    from drumroll.models.loading import load

    model = load("tiny")
    config = model.module.config
    config.tie_word_embeddings = False
    module = type(model.module)(config)
    module.load_state_dict(model.module.state_dict())
    module.lm_head.weight.data += 0.01
    module.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("roles", [{}, {"actor": {"lora": {}}}], ids=["full", "lora"])
def test_vllm_generates_and_agrees(small, roles):
    run = drumroll.train(small(cluster=ONE, roles={"rollout": {"backend": "vllm"}, **roles}, **SYNCED))
    assert [m["train/mismatch"] < 1e-4 for m in run.metrics[1:]] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["core", "process"])
def test_a_vllm_engine_is_replaced_and_leaves_nothing_behind(small, killer, victim):
    """Its core dies in a living process, or the process that owns the core."""
    seen, cores = {}, []

    async def strike(workers):
        pid = await workers.rollout.call(0, LearnerWorker.pid)
        for child in descendants(pid):
            with suppress(OSError):  # it has ended
                seen[child] = Path(f"/proc/{child}/cmdline").read_text()
        cores.extend(child for child, command in seen.items() if "EngineCore" in command)
        for one in [pid] if victim == "process" else cores:
            os.kill(one, signal.SIGKILL)

    listener = killer(strike)
    recipe = small(cluster=ONE, roles={"rollout": {"backend": "vllm"}}, **(SYNCED | {"steps": 4}))
    run = drumroll.train(recipe, progress=listener)
    assert run.summary["steps"] == 4
    assert len(listener.heard) == 1
    assert listener.heard[0].startswith("rollout rank 0 is gone: " + ("vLLM" if victim == "core" else "its process"))
    assert cores, seen
    assert not [core for core in cores if runs(core)]
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


def runs(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def descendants(pid):
    """By their parents: /proc/PID/task/TID/children may leave some out while others end."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@pytest.mark.slow
def test_without_the_sync_they_would_not(small, monkeypatch):
    """The planted error: engines take each new version's name and keep the old weights."""

    async def name_only(self, version):
        for rank in self._engine_pool.living():
            await self._engines.call(rank, EngineWorker.set_version, version)

    monkeypatch.setattr(RayWorkers, "publish", name_only)
    run = drumroll.train(small(cluster=ONE, **SYNCED))
    assert [m["train/mismatch"] > 1e-2 for m in run.metrics[1:]] == [False, True, True]


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_papers_partial_sharing_in_small(small, tmp_path, staleness):
    """Training on four devices; three of them also generate, the fourth judges and scores."""
    run = drumroll.train(
        small(
            cluster=ONE | {"devices": 4},
            roles={
                "actor": {"devices": "0-3"},
                "rollout": {"devices": "0-2"},
                "judge": {"model": "tiny", "devices": "3", "max_prompt_tokens": 128},
                "reward_model": {"model": classifier(tmp_path / "classifier"), "devices": "3"},
            },
            reward=[
                "exact",
                {"use": "judge", "weight": 0.1, "args": {"template": "score"}},
                {"use": "reward_model", "weight": 0.0},
            ],
            rollout={"max_staleness": staleness},
            steps=2,
            threads=1,
        )
    )
    assert run.summary["steps"] == 2
    assert {"reward/sums/judge", "reward/sums/reward_model", "judge/calls"} <= set(run.metrics[1])
    if not staleness:
        assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


def test_a_killed_engine_is_replaced_and_the_run_completes(small, killer, kill):
    listener = killer(lambda workers: kill(workers.rollout))
    run = drumroll.train(small(cluster=ONE, steps=4, threads=1), progress=listener)
    assert run.summary["steps"] == 4
    assert len(listener.heard) == 1
    assert listener.heard[0].startswith("rollout rank 0 is gone: ")
    assert listener.heard[0].endswith("a new one is started, and its samples go on there or elsewhere.")
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


@pytest.mark.parametrize(
    ("transport", "engines"),
    [
        ("shared", 2),
        pytest.param("broadcast", 2, marks=pytest.mark.slow),
        pytest.param("shared", 1, marks=pytest.mark.slow),
    ],
)
def test_an_engine_killed_in_the_middle_of_a_publication_is_replaced(small, killer, monkeypatch, kill, transport, engines):
    """Its sender is under way and the other engine has begun to receive; the second attempt reaches who is there.

    If nobody is, the engine that comes back gets the weights.
    """
    broadcast, struck = RayGroup.broadcast, []

    async def strike_when_armed(self, method, *args, **kwargs):
        if method is not LearnerWorker.send or not listener.armed or struck:
            return await broadcast(self, method, *args, **kwargs)
        struck.append(True)
        sending = asyncio.ensure_future(broadcast(self, method, *args, **kwargs))
        await kill(listener.armed[0].rollout, engines - 1)
        return await sending

    async def arm(workers):
        listener.armed.append(workers)

    listener = killer(arm)
    listener.armed = []
    monkeypatch.setattr(RayGroup, "broadcast", strike_when_armed)
    cluster = ONE | {"devices": 1 + engines, "weight_sync": transport}
    roles = {"actor": {"devices": "0"}, "rollout": {"devices": f"1-{engines}"}}
    run = drumroll.train(small(cluster=cluster, roles=roles, steps=4, threads=1, eval={"sets": {}}), progress=listener)
    assert struck
    assert run.summary["steps"] == 4
    assert [text.partition(":")[0] for text in listener.heard] == [f"rollout rank {engines - 1} is gone"]
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


@pytest.mark.slow
def test_a_killed_judge_is_replaced_and_asked_again(small, killer, kill):
    async def strike(workers):
        await kill(workers._engine_pools[1].group)

    listener = killer(strike)
    roles = {"judge": {"model": "tiny", "max_prompt_tokens": 128}}
    judged = ["exact", {"use": "judge", "weight": 0.1}]
    run = drumroll.train(small(cluster=ONE, roles=roles, reward=judged, steps=4, threads=1), progress=listener)
    assert run.summary["steps"] == 4
    assert [text.partition(":")[0] for text in listener.heard] == ["judge rank 0 is gone"]
    assert listener.heard[0].endswith("a new one is started, and its questions are asked again.")


def test_a_group_of_learners_that_lost_a_rank_is_made_anew(small, tmp_path, kill):
    """The next generation meets at a new store, holds the saved state, trains, and publishes to the engine that was there."""
    cluster = ONE | {"devices": 2, "collective_timeout": 3.0}
    config = check(small(cluster=cluster, roles={"actor": {"devices": "0-1"}, "rollout": {"devices": "0-0"}}))

    async def story():
        workers = await open_workers(config)
        try:
            memory = await workers.batch_builder.call(0, BatchBuilder.start)
            batch, _ = await stages.advantages(workers, await stages.pack(workers, [group_of_two()]), memory)
            fresh = await workers.actor.scatter(Learner.infer, batch, 1.0)
            await stages.update(workers, batch, 1.0)
            await workers.actor.broadcast(Learner.save, tmp_path)
            before = await workers.actor.scatter(Learner.infer, batch, 1.0)
            await workers.renew_learners()
            assert workers.actor.generation == 0  # nobody was lost
            await kill(workers.actor, 1)
            await workers.renew_learners()
            await break_up(workers.actor)  # as after a failed collective: all processes live
            await workers.renew_learners()
            assert workers.actor.generation == 2
            await workers.actor.broadcast(Learner.load, tmp_path)
            again = await workers.actor.scatter(Learner.infer, batch, 1.0)
            found = [await workers.batch_builder.call(0, BatchBuilder.join, batch, "old", *p) for p in (fresh, before, again)]
            assert torch.equal(found[1].old, found[2].old)
            assert not torch.equal(found[0].old, found[1].old)
            assert (await stages.update(workers, batch, 1.0))["train/tokens"] == 6.0
            await workers.publish(2)
            request = Request("r", (1, 5), Sampling(0.0, 4), 0)
            assert set((await workers.router.generate(request, 0, 0, 60.0, lambda: None)).versions) == {2}
        finally:
            await workers.close()

    asyncio.run(story())


async def break_up(group):
    """A collective that one rank does not come to."""
    with pytest.raises(PeerFailed):
        await group.call(0, LearnerWorker.infer, pack([group_of_two()]), 1.0)


def group_of_two():
    """Two answers of three tokens to one prompt."""
    prompt = Prompt("p", "sums", "", (1, 5))
    samples = []
    for index in range(2):
        trace = Trace()
        trace.extend([1, 5], Owner.PROMPT)
        trace.extend([7 + index, 8, 9], Owner.POLICY, [-1.0] * 3, [0] * 3)
        samples.append(Sample(prompt, 0, index, traces=[trace], reward=float(index)))
    return Group(prompt, 0, samples)


def test_a_killed_learner_ends_the_run_with_one_sentence(small, killer, kill):
    listener = killer(lambda workers: kill(workers.actor))
    with pytest.raises(
        WorkerLost, match=r"^actor rank 0 is gone: .*SIGKILL.*; the run stops; drumroll train --resume .*small goes on"
    ):
        drumroll.train(small(cluster=ONE, steps=50, threads=1, checkpoint={"every": 1}), progress=listener)
    run = drumroll.train(resume=small()["output"] + "/small", overrides=["steps=3", "cluster.runtime=local"])
    assert run.summary["steps"] == 3


OWN = """
import os, signal
from pathlib import Path
from drumroll.algorithms.advantages import ESTIMATORS

@ESTIMATORS.register("mine", needs=("values",), per_token=True)
def surprise(scores):
    return scores.token_rewards - scores.values

def loss(tokens, config):
    order = Path({order!r})
    if order.exists():
        order.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return -(tokens.logprobs - tokens.old).exp() * tokens.advantages
"""


@pytest.mark.slow
def test_own_parts_and_relative_paths_on_every_worker(small, mine, tmp_path, monkeypatch, killer):
    """One's own estimator gets its critic and one's own loss is found, though workers run in another directory; and a
    rank that is killed in the middle of an update is named, not the peer that waited for it."""
    name = mine(OWN.format(order=str(tmp_path / "order")))
    untied(tmp_path / "models" / "untied")
    monkeypatch.chdir(tmp_path)

    async def order(workers):
        (tmp_path / "order").touch()

    recipe = small(
        cluster=ONE | {"devices": 2, "call_timeout": 120},
        roles={"rollout": {"devices": "0"}, "critic": {"devices": "0"}, "teacher": {"devices": "1", "model": "models/untied"}},
        algorithm={"advantage": f"{name}:surprise", "loss": f"{name}:loss", "teacher": 0.1},
        output="runs",
        model="models/untied",
        steps=50,
        threads=1,
        eval={"sets": {}},
        checkpoint={"every": 1},
    )
    with pytest.raises(
        WorkerLost, match=r"^actor rank [01] is gone: .*SIGKILL.*; the run stops; drumroll train --resume runs/"
    ):
        drumroll.train(recipe, progress=killer(order))
    run = Run.open("runs/small")
    assert "critic/loss" in run.metrics[1]
    assert abs(run.metrics[1]["train/kl_teacher"]) < 1e-4  # the policy starts as its teacher
    assert run.checkpoints.steps()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"roles": {"actor": {"devices": "0-3"}}},
            "roles.actor.devices: 0-3 maps a role to devices of a pool, which needs cluster.runtime: ray",
        ),
        ({"roles": {"rollout": {"backend": "vllm"}}}, "roles.rollout.backend: vllm runs in processes of its own"),
        (
            {"cluster": ONE | {"devices": 2}, "roles": {"rollout": {"devices": "0-3"}}},
            "names device 3, but the pool has 2 devices",
        ),
        (
            {"cluster": ONE | {"devices": 4}, "roles": {"actor": {"devices": 3}, "rollout": {"devices": 2}}},
            "ask for 5 devices by count, but only 4 of 4",
        ),
        (
            {"cluster": ONE | {"devices": 3}, "roles": {"rollout": {"backend": "vllm", "parallel": {"tensor": 2}}}},
            "tensor 2 does not divide 3 devices",
        ),
        (
            {"cluster": ONE, "roles": {"actor": {"devices": "cpu"}}},
            "roles.actor.devices: cpu is for the local runtime; with cluster.runtime: ray a role runs on devices of the pool",
        ),
    ],
)
def test_layouts_that_cannot_be(small, changes, sentence):
    with pytest.raises(ConfigError) as caught:
        drumroll.train(small(**changes))
    assert sentence in str(caught.value)


def test_a_dry_run_shows_the_layout(drumroll, small, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small(cluster=ONE | {"devices": 4}, roles={"rollout": {"devices": "0-2"}})))
    code, out, _ = drumroll("train", str(path), "--dry-run")
    assert code == 0
    assert "cpu 0-2" in out


@pytest.mark.slow
def test_environments_play_in_processes_of_the_cluster(small):
    """The same episodes as in processes of this machine; failures keep their names, and a hang costs one episode."""
    seeds, bad = "drumroll.data.seeds:seeds", "toy_environments:Bad"
    data = {
        "train": {
            "good": {"source": seeds, "environment": bad, "environment_args": {"how": "none"}},
            "bad": {"source": seeds, "environment": bad, "environment_args": {"how": "raise", "every": 2}},
            "stuck": {"source": seeds, "environment": bad, "environment_args": {"how": "hang", "every": 2}},
        },
        "max_prompt_tokens": 16,
    }
    recipe = small(
        deterministic=True,
        threads=1,
        steps=1,
        reward={},
        environment={"max_turns": 2, "step_timeout": 2.0},
        rollout={"prompts": 6, "samples": 2, "max_tokens": 2},
        eval={"sets": {}},
    )
    recipe["data"] = data
    local = drumroll.train({**recipe, "name": "local"})
    remote = drumroll.train({**recipe, "name": "remote", "cluster": ONE})
    told = [sorted((s["id"], s["failure"], s["reward"], str(s["turns"])) for s in run.samples) for run in (local, remote)]
    assert told[0] == told[1]
    assert {f.partition(" ")[0] for _, f, *_ in told[0] if f} == {"ValueError", "TimeoutError"}
