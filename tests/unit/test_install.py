"""What an installation without extras brings: no web server, no tracker, nothing of a cluster."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "web": "aiohttp fastapi starlette uvicorn flask django tornado gradio streamlit gunicorn openai",
    "trackers": "wandb tensorboard tensorboardx trackio mlflow comet-ml swanlab neptune",
    "cluster": "ray vllm deepspeed megatron-core mpi4py dask kubernetes torchx",
}


def closure(names):
    """These packages and all that they require, without extras."""
    found, waiting = set(), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # for another system or Python
            continue
        waiting += [canonicalize_name(one.name) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_core_brings_no_web_server_tracker_or_cluster():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = closure(Requirement(text).name for text in project["dependencies"])
    assert {"torch", "transformers", "pydantic", "jinja2"} <= core
    for kind, names in FORBIDDEN.items():
        assert core & set(names.split()) == set(), kind
    assert "aiohttp" in closure(["aiohttp"])  # the walk finds what is there
    assert "werkzeug" in closure(["tensorboard"])
