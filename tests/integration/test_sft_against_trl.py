"""Our supervised loss and its gradients are those of TRL's SFTTrainer on the same rows, to 1e-5.

Both sides render the rows themselves: masks, template and loss are compared at once. TRL answers in an environment of its
own: benchmarks/peers/trl_sft.py.
"""

import json

import peers
import pytest
import torch
from peers import distance
from transformers import LlamaConfig, LlamaForCausalLM

from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import SFTLoss
from drumroll.config import load as load_config
from drumroll.config.optim import OptimConfig
from drumroll.data.demonstrations import Demonstrations
from drumroll.data.render import Renderer
from drumroll.learners import Update
from drumroll.learners.backends.torch import torch_learner
from drumroll.models import tiny
from drumroll.models.loading import load

MODEL = {**tiny.config(hidden=16, layers=2, heads=2).to_dict(), "head_dim": 8}
MODEL = {key: MODEL[key] for key in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "tie_word_embeddings", "pad_token_id", "eos_token_id",
)}  # fmt: skip
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}<eos>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def says(role, content, **more):
    return {"role": role, "content": content, **more}


TALK = [
    [says("user", "hi"), says("assistant", "hello, what is it?"), says("user", "1+1?"), says("assistant", "it is 2.")],
    [says("system", "be short"), says("user", "name a colour"), says("assistant", "red")],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
CALLS = [[says("user", "1+1?"), says("assistant", "", tool_calls=CALL), says("tool", "2"), says("assistant", "two")]]
ROWS = {
    "texts": ([{"prompt": f"{n}+{n}=", "completion": str(2 * n) * n} for n in range(1, 6)], {}),
    "completions": ([{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALK], {}),
    "assistant": ([{"messages": talk} for talk in TALK], {"assistant_only_loss": True}),
    "tools": ([{"messages": talk, "tools": TOOLS} for talk in CALLS], {"assistant_only_loss": True}),
}


def tokenizer(chat):
    made = tiny.tokenizer()
    made.bos_token = None  # TRL gives plain prompts none
    made.chat_template = TEMPLATE if chat else None
    return made


SETTINGS = {
    name: {
        "model": MODEL,
        "tokenizer": tokenizer(False).backend_tokenizer.to_str(),
        "template": None if name == "texts" else TEMPLATE,
        "rows": rows,
        "options": options,
    }
    for name, (rows, options) in ROWS.items()
}


def weights():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    return {name: parameter.detach() * 5 for name, parameter in model.named_parameters()}


RECORDING = peers.Recording("trl_sft", SETTINGS, {"model": weights})
live, trl = RECORDING.fixtures()


@pytest.mark.peers
def test_the_recording_is_what_trl_answers(live):
    assert RECORDING.agrees_with(live)


def ours(name, case, folder, **changes):
    """Loss, trained tokens and gradients of one update on all rows."""
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    model.load_state_dict(case, strict=False)
    model.save_pretrained(folder)
    made = tokenizer(name != "texts")
    made.save_pretrained(folder)
    rows = ROWS[name][0]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "pipeline": "sft",
        "batch": len(rows),
        "data": {"train": {"x": {"source": str(folder / "rows.jsonl")}}, "epochs": 1},
    }
    batch = Demonstrations(load_config({**recipe, **changes}).config, Renderer(made)).batch()
    learner = torch_learner(load(str(folder), dtype="float32"), OptimConfig(lr=0.0, grad_clip=0), total_steps=1)
    backend, gradients = learner.backend, {}
    backend.optimizer.step = lambda: gradients.update(
        {own: weight.grad.clone() for own, weight in zip(backend.names, backend.master, strict=True)}
    )
    metrics = learner.update(Update(batch, SFTLoss(), token_mean)).metrics()
    return {"loss": torch.tensor(metrics["train/loss"]), "tokens": batch.mask.sum(), **gradients}


@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradients_are_those_of_trl(trl, name, tmp_path):
    found = ours(name, trl.cases["model"], tmp_path)
    answers = {key.rpartition("/")[2]: value for key, value in trl.answers.items() if key.startswith(f"{name}/model/")}
    assert found["tokens"] == answers["tokens"]
    assert found.keys() == answers.keys()
    assert max(distance(found[key].double(), value) for key, value in answers.items()) < 1e-5


def test_a_turn_more_would_be_found(trl, tmp_path):
    found = ours("completions", trl.cases["model"], tmp_path, train_on="all")
    assert distance(found["loss"].double(), trl.answers["completions/model/loss"]) > 1e-3
