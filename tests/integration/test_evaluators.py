"""lm-eval and inspect-ai evaluate a model behind `drumroll serve`, with tasks from local files: `make test-peers`.

Both must find the score that the model's own greedy answers give.
"""

import json
import os
import subprocess
import sys
from itertools import islice

import httpx
import peers
import pytest

from drumroll.data.problems import sums

pytestmark = pytest.mark.peers

TOKEN, LIMIT = "a-token-for-this-test-only", 8
LM_EVAL = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: {limit}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def sums():
    return Task(json_dataset({rows!r}, FieldSpec(input="prompt", target="answer")), solver=generate(), scorer=exact())
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    listed = [{"prompt": row["prompt"], "answer": row["answer"]} for row in islice(sums("held_out", 0), 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    return path


@pytest.fixture(scope="module")
def url():
    """The address of `drumroll serve tiny`."""
    command = [sys.executable, "-u", "-m", "drumroll", "serve", "tiny", "--token", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().partition(" at ")[2].partition("/v1;")[0]
        finally:
            server.kill()


@pytest.fixture(scope="module")
def score(url, rows):
    """The share of the model's greedy answers that are right."""
    listed = [json.loads(line) for line in rows.read_text().splitlines()]
    body = {"prompt": [row["prompt"] for row in listed], "temperature": 0, "max_tokens": LIMIT, "stop": ["\n"]}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answers = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120).json()["choices"]
    found = sum(answer["text"] == row["answer"] for answer, row in zip(answers, listed, strict=True)) / len(listed)
    assert 0 < found < 1
    return found


@pytest.mark.parametrize("kind", ["completions", "chat-completions"])
def test_lm_eval(url, rows, score, kind, tmp_path):
    (tmp_path / "sums.yaml").write_text(LM_EVAL.format(rows=rows, limit=LIMIT))
    address = f"{url}/v1/{kind.replace('-', '/')}"
    model = f"base_url={address},model=tiny,tokenizer_backend=None,tokenized_requests=False,num_concurrent=4"
    options = ["--apply_chat_template"] if kind.startswith("chat") else []
    command = [peers.python("lm-eval"), "-m", "lm_eval", "--model", f"local-{kind}", "--model_args", model, "--tasks", "sums"]
    command += ["--include_path", tmp_path, "--output_path", tmp_path / "out", *options]
    peers.run(command, OPENAI_API_KEY=TOKEN, HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    [file] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["sums"]["exact_match,none"] == pytest.approx(score)


def test_inspect(url, rows, score, tmp_path):
    (tmp_path / "task.py").write_text(INSPECT.format(rows=str(rows)))
    command = [peers.python("inspect"), "-m", "inspect_ai", "eval", "task.py", "--model", "openai-api/drumroll/tiny"]
    command += [
        "--temperature",
        "0",
        "--max-tokens",
        str(LIMIT),
        "--log-format",
        "json",
        "--log-dir",
        "logs",
        "--display",
        "none",
    ]
    env = {**os.environ, "DRUMROLL_API_KEY": TOKEN, "DRUMROLL_BASE_URL": f"{url}/v1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    [file] = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success", log["error"]
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(score)
