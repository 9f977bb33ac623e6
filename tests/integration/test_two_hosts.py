"""A run over two hosts: network namespaces joined by a cable, each with its own host name, `hosts` file and Ray.

Linux only, and only as root; elsewhere every test is skipped with the reason.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).parents[2]
A, B = "10.77.0.1", "10.77.0.2"  # inside namespaces that nothing else can reach
NAMES = {
    "named": f"127.0.0.1 localhost\n{A} alpha\n{B} beta\n",
    "unknown": "127.0.0.1 localhost\n",
    "debian": "127.0.0.1 localhost\n127.0.1.1 alpha\n127.0.1.1 beta\n",
}
"""Contents of /etc/hosts: names that resolve to the hosts' addresses, to nothing, and to loopback as on Debian and Ubuntu."""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class TwoHosts:
    """Hosts `alpha` and `beta`; Ray's head is on the first."""

    def __init__(self, folder, hosts):
        self.folder, self.spaces, self.processes = folder, (f"dr{os.getpid()}a", f"dr{os.getpid()}b"), []
        self.cable = tuple(f"v{space}" for space in self.spaces)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        try:
            for space in self.spaces:
                ip("netns", "add", space)
                own = Path("/etc/netns") / space
                own.mkdir(parents=True)
                (own / "hosts").write_text(hosts)
                (own / "resolv.conf").write_text("")
                ip("-n", space, "link", "set", "lo", "up")
            ip(
                "link",
                "add",
                self.cable[0],
                "netns",
                self.spaces[0],
                "type",
                "veth",
                "peer",
                "name",
                self.cable[1],
                "netns",
                self.spaces[1],
            )
            for space, end, address in zip(self.spaces, self.cable, (A, B), strict=True):
                ip("-n", space, "address", "add", f"{address}/24", "dev", end)
                ip("-n", space, "link", "set", end, "up")
        except BaseException:
            self.close()
            raise

    def start_ray(self):
        """A head on `alpha`, a node on `beta`, with a core each."""
        common = ["--num-cpus=1", "--disable-usage-stats", "--object-store-memory=200000000", "--block"]
        head = ["--head", f"--node-ip-address={A}", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.folder}/ray"]
        self._await(self.run(0, "ray", "start", *head, *common), "Ray runtime started")
        self._await(
            self.run(1, "ray", "start", f"--address={A}:6379", f"--node-ip-address={B}", *common), "Ray runtime started"
        )

    def run(self, host, *command):
        """Start a command on a host; its output goes to a file."""
        name = ("alpha", "beta")[host]
        log = self.folder / f"{len(self.processes)}.txt"
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *command]
        with log.open("w") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[host], *inside],
                env=self.env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.processes.append((process, log))
        return process, log

    def train(self, *overrides):
        """Start the quickstart recipe on `alpha`, with a rank and an engine on each host unless told otherwise."""
        output = self.folder / "runs"
        run = self.run(
            0,
            sys.executable,
            "-m",
            "drumroll",
            "train",
            str(ROOT / "recipes/quickstart/recipe.yaml"),
            *("cluster.runtime=ray", f"cluster.address={A}:6379", "cluster.devices=2", "cluster.kind=cpu", "threads=1"),
            *("steps=4", "rollout.prompts=8", "eval.sets={}", f"output={output}", "roles.actor.devices=0-1", *overrides),
        )
        return *run, output / "quickstart" / "metrics.jsonl"

    @staticmethod
    def _await(started, words):
        process, log = started
        until = time.monotonic() + 180
        while words not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)

    def link(self, state):
        """Pull the cable out at `beta`, or put it back: `down` or `up`."""
        ip("-n", self.spaces[1], "link", "set", self.cable[1], state)

    def close(self):
        """End every process of both hosts and remove them."""
        for space in self.spaces:
            found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
            for pid in found.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process, _ in self.processes:
            process.wait(60)
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


@pytest.fixture
def hosts(request):
    """Two hosts with Ray on each; the parameter says what their names resolve to."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # its path is short, as those of Ray's sockets must be
        try:
            made = TwoHosts(Path(folder), NAMES[getattr(request, "param", "debian")])
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
        try:
            made.start_ray()
            yield made
        finally:
            made.close()


def metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def completed(train, steps=4):
    """Wait for a run; its log."""
    process, log, path = train
    assert process.wait(900) == 0, log.read_text()
    rows = [row for row in metrics(path) if "train/mismatch" in row]
    assert len(rows) == steps
    assert all(row["train/mismatch"] < 1e-4 for row in rows)
    return log.read_text()


def after(train, steps):
    """Wait until a run has committed so many steps."""
    process, log, path = train
    while len([row for row in metrics(path) if "train/mismatch" in row]) < steps:
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize("hosts", NAMES, indirect=True)
def test_the_quickstart_trains_over_both_whatever_their_names_resolve_to(hosts):
    completed(hosts.train())


def test_the_interface_can_be_named_and_a_wrong_one_is_a_sentence(hosts):
    """The cable's ends have different names, so neither names a network of both hosts."""
    process, log, _ = hosts.train(f"cluster.interface={hosts.cable[0]}")
    assert process.wait(600) == 2, log.read_text()
    text = " ".join(log.read_text().split())
    assert re.search(rf"cluster\.interface: beta has no interface '{hosts.cable[0]}' .*it has .*\({re.escape(B)}\)", text), text
    process, log, _ = hosts.train("cluster.interface=lo")
    assert process.wait(600) == 2, log.read_text()
    text = " ".join(log.read_text().split())
    assert f"'lo' has the address 127.0.0.1 on both {A} and {B}" in text
    for space, end in zip(hosts.spaces, hosts.cable, strict=True):
        for command in (["down"], ["name", "ib0"], ["up"]):
            ip("-n", space, "link", "set", "ib0" if command == ["up"] else end, *command)
    completed(hosts.train("cluster.interface=ib0"))


def test_a_link_that_is_cut_for_five_seconds_costs_time_only(hosts):
    train = hosts.train()
    after(train, 1)
    hosts.link("down")
    time.sleep(5)
    hosts.link("up")
    text = completed(train)
    assert "is gone" not in text


def test_a_host_of_engines_that_is_cut_off_for_good_is_told_and_the_run_goes_on(hosts):
    train = hosts.train("roles.actor.devices=0-0", "roles.rollout.devices=0-1", "steps=8", "rollout.engine_timeout=600")
    after(train, 1)
    hosts.link("down")
    text = completed(train, 8)
    assert re.search(r"rollout rank \d is gone: it", text), text


def test_a_rank_that_is_cut_off_for_good_ends_the_run_with_one_sentence(hosts):
    train = hosts.train("steps=1000")
    after(train, 1)
    hosts.link("down")
    process, log, _ = train
    assert process.wait(600) == 2, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    assert re.search(r"actor rank 1 is gone: .*--resume", " ".join(text.split())), text


def test_a_slow_link_costs_time_only(hosts):
    """A megabyte a second, by a token bucket at each end (`netem` is a module that kernels often lack)."""
    if shutil.which("tc") is None:
        pytest.skip("tc is not installed: it comes with iproute2")
    bucket = ["root", "tbf", "rate", "10mbit", "burst", "32kbit", "latency", "400ms"]
    for space, end in zip(hosts.spaces, hosts.cable, strict=True):
        subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", end, *bucket], check=True)
    completed(hosts.train("steps=2"), 2)
    seen = subprocess.run(
        ["tc", "-n", hosts.spaces[0], "-s", "qdisc", "show", "dev", hosts.cable[0]], check=True, capture_output=True, text=True
    ).stdout
    assert int(re.search(r"overlimits (\d+)", seen)[1]) > 100, seen
