"""The package as users get it: a wheel in a fresh environment, far from the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_a_wheel_trains_the_quickstart_recipe_outside_the_repository(tmp_path):
    def run(*command):
        done = subprocess.run([str(c) for c in command], cwd=tmp_path, capture_output=True, text=True, env=clean)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    run(sys.executable, "-m", "venv", tmp_path / "fresh")
    (wheel,) = tmp_path.glob("drumroll-*.whl")
    run(tmp_path / "fresh/bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((ROOT / "recipes/quickstart/recipe.yaml").read_text())
    run(tmp_path / "fresh/bin/drumroll", "train", recipe, "steps=30")
    summary = json.loads(next(tmp_path.glob("runs/*/summary.json")).read_text())
    assert summary["steps"] == 30
    assert all(summary["after"][name] > before for name, before in summary["before"].items())
