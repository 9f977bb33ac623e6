"""The same run on the ray runtime: equal to the local one, over several ranks, on shared devices, and when workers die."""

import asyncio
import json
import os
import signal

import pytest
import yaml

import drumroll
from drumroll.errors import ConfigError
from drumroll.observe.progress import Quiet

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'drumroll[ray]'")
from drumroll.cluster.host import WorkerLost  # noqa: E402
from drumroll.cluster.remote import RemoteWorkers  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray for the whole file: starting it takes longer than most tests."""
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


ONE = {"runtime": "ray", "devices": 1, "kind": "cpu", "threads": 1}


def untimed(run):
    kept = [
        {k: v for k, v in m.items() if not k.startswith(("time/", "memory/")) and k != "rollout/tokens_per_s"}
        for m in run.metrics
    ]
    return json.dumps(kept)


def test_ray_and_local_are_byte_equal(small):
    same = {
        "deterministic": True,
        "threads": 1,
        "steps": 3,
        "algorithm": {"recipe": "grpo", "kl": 0.01},
        "optim": {"minibatch": 8},
    }
    local = drumroll.train(small(name="local", **same))
    remote = drumroll.train(small(name="remote", cluster=ONE, **same))
    assert untimed(remote) == untimed(local)
    assert [s["traces"] for s in remote.samples] == [s["traces"] for s in local.samples]
    assert remote.metrics[1]["memory/train/actor"] > 0.1


def fates(run):
    import sqlite3

    with sqlite3.connect(run.path / "ledger.sqlite") as db:
        return sorted(db.execute("SELECT draw, fate FROM draws WHERE fate IN ('trained', 'filtered', 'failed')"))


def test_two_engines_two_reward_processes_and_two_ranks_draw_the_same(small, mine):
    """Step 1 has the same tokens; fates are the same; two ranks sum to one rank's gradient."""
    name = mine("def correct(completion, answer): return float(completion.strip() == str(answer))\n")
    same = {"reward": f"{name}:correct", "steps": 2, "rollout": {"reward_workers": 2}, "threads": 1, "optim": {"lr": 1e-4}}
    local = drumroll.train(small(name="local", **same))
    cluster = ONE | {"devices": 2, "bus": "broadcast", "checksum": True}
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
    pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
    run = drumroll.train(small(cluster=ONE, roles={"rollout": {"backend": "vllm"}, **roles}, **SYNCED))
    assert [m["train/mismatch"] < 1e-4 for m in run.metrics[1:]] == [True] * 3


@pytest.mark.slow
def test_without_the_sync_they_would_not(small, monkeypatch):
    async def nothing(self, version): ...

    monkeypatch.setattr(RemoteWorkers, "publish", nothing)
    run = drumroll.train(small(cluster=ONE, **SYNCED))
    assert run.metrics[-1]["train/mismatch"] > 1e-2


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_papers_partial_sharing_in_small(small, staleness):
    """Training on four devices; three of them also generate, the fourth judges."""
    run = drumroll.train(
        small(
            cluster=ONE | {"devices": 4},
            roles={
                "actor": {"devices": "0-3"},
                "rollout": {"devices": "0-2"},
                "judge": {"model": "tiny", "devices": "3", "max_prompt_tokens": 128},
            },
            reward=["exact", {"use": "judge", "weight": 0.1}],
            rollout={"max_staleness": staleness},
            steps=2,
            threads=1,
        )
    )
    assert run.summary["steps"] == 2
    assert "reward/sums/judge" in run.metrics[1]
    if not staleness:
        assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


def kill_after_the_first_step(monkeypatch, role):
    """A process of the role is killed when step 1 is committed."""
    opened = []
    start = RemoteWorkers.start

    async def remember(self):
        await start(self)
        opened.append(self)

    monkeypatch.setattr(RemoteWorkers, "start", remember)

    class Killer(Quiet):
        heard = []

        def committed(self, step, metrics):
            if step == 1:
                self.task = asyncio.ensure_future(die(getattr(opened[0], role)))

        def notice(self, text):
            self.heard.append(text)

    async def die(group):
        pid = await group.call(0, Pid.pid)
        os.kill(pid, signal.SIGKILL)

    return Killer()


class Pid:
    def pid(self): ...


def test_a_killed_engine_is_replaced_and_the_run_completes(small, monkeypatch):
    killer = kill_after_the_first_step(monkeypatch, "rollout")
    run = drumroll.train(small(cluster=ONE, steps=4, threads=1), progress=killer)
    assert run.summary["steps"] == 4
    assert len(killer.heard) == 1
    assert killer.heard[0].startswith("rollout rank 0 is gone: ")
    assert killer.heard[0].endswith("its samples go to other engines and a new one is started.")
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


def test_a_killed_learner_ends_the_run_with_one_sentence(small, monkeypatch):
    killer = kill_after_the_first_step(monkeypatch, "actor")
    with pytest.raises(
        WorkerLost, match=r"^actor rank 0 is gone: .*SIGKILL.*; the run stops; drumroll train --resume .*small goes on"
    ):
        drumroll.train(small(cluster=ONE, steps=50, threads=1, checkpoint={"every": 1}), progress=killer)
    monkeypatch.undo()
    run = drumroll.train(resume=small()["output"] + "/small", overrides=["steps=3", "cluster.runtime=local"])
    assert run.summary["steps"] == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"roles": {"actor": {"devices": "0-3"}}},
            "roles.actor.devices maps a role to devices of a pool, which needs cluster.runtime: ray",
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
