"""`drumroll run export`: the model of any kept checkpoint, as transformers and peft load it."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import drumroll as library


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


MIXTURE = pytest.param("tiny-moe-random", "float32", marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "dtype"), [("tiny", "float32"), ("tiny", "bfloat16"), MIXTURE])
def test_checkpoints_become_models(small, drumroll, tmp_path, model, dtype):
    """The last step's export is `model/`, bit for bit; an earlier one is not, and is loaded as trained."""
    actor = {"dtype": dtype}
    run = library.train(
        small(model=model, steps=2, checkpoint={"every": 1, "keep": 3}, roles={"actor": actor}, optim={"lr": 1e-2})
    )
    last, first, low = (tmp_path / name for name in ("last", "first", "low"))
    assert drumroll("run", "export", str(run.path), "--step", "last", "--to", str(last))[:2] == (
        0,
        f"{last}: the model of step 2\n",
    )
    assert sorted(p.name for p in last.iterdir()) == sorted(p.name for p in run.model_path.iterdir())
    assert same(tensors(last), tensors(run.model_path))
    assert (last / "README.md").read_text() == (run.model_path / "README.md").read_text()
    assert drumroll("run", "export", str(run.path), "--step", "1", "--to", str(first))[0] == 0
    if model == "tiny":  # a random one earns nothing to learn from
        assert not same(tensors(first), tensors(last))
    assert drumroll("run", "export", str(run.path), "--step", "1", "--to", str(low), "--dtype", "bfloat16")[0] == 0
    assert same(tensors(low), {name: tensor.bfloat16() for name, tensor in tensors(first).items()})
    assert json.loads((low / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = hf.AutoModelForCausalLM.from_pretrained(first)
    assert loaded.dtype == getattr(torch, dtype)
    assert hf.AutoTokenizer.from_pretrained(first).decode([13]) == "k"
    card = (first / "README.md").read_text()
    for text in ("# small, step 1", f"trained from `{model}`", "learning rate", "None were measured at this step"):
        assert text in card
    assert "| sums | " in (last / "README.md").read_text()


def test_adapters_are_exported_alone_or_merged(small, drumroll, tmp_path):
    run = library.train(small(roles={"actor": {"lora": {"rank": 4}}}, optim={"lr": 1e-2}))
    alone, merged, low = (tmp_path / name for name in ("alone", "merged", "low"))
    assert drumroll("run", "export", str(run.path), "--to", str(alone))[0] == 0
    assert same(tensors(alone), tensors(run.model_path / "adapter"))
    assert drumroll("run", "export", str(run.path), "--to", str(merged), "--merge-lora")[0] == 0
    assert same(tensors(merged), tensors(run.model_path))
    whole = hf.AutoModelForCausalLM.from_pretrained(merged)
    with_adapters = hf.AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32)
    assert torch.allclose(logits(whole), logits(with_adapters), atol=1e-4)
    assert "library_name: peft" in (alone / "README.md").read_text()
    assert drumroll("run", "export", str(run.path), "--to", str(low), "--merge-lora", "--dtype", "bfloat16")[0] == 0
    assert same(tensors(low), {name: tensor.bfloat16() for name, tensor in tensors(merged).items()})


def test_mistakes_are_one_sentence_and_destroy_nothing(small, drumroll, tmp_path):
    run = library.train(small(steps=1, eval={"sets": {}}))

    def refused(*words):
        code, out, err = drumroll("run", "export", str(run.path), *map(str, words))
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        return err

    full, model = tmp_path / "full", tmp_path / "model"
    full.mkdir()
    (full / "thesis.txt").write_text("words")
    assert "no held-out set was measured; use --step last (there are checkpoints of steps 1)" in refused("--to", tmp_path / "x")
    assert "keeps no such checkpoint; use best, last or a number" in refused("--step", "7", "--to", tmp_path / "x")
    assert "has no adapters to merge" in refused("--step", "1", "--to", tmp_path / "x", "--merge-lora")
    for words in ((), ("--overwrite",)):
        assert "holds no model that could be replaced" in refused("--step", "1", "--to", full, *words)
    assert "holds the run itself" in refused("--step", "1", "--to", run.path.parent, "--overwrite")
    assert (full / "thesis.txt").read_text() == "words"
    assert drumroll("run", "export", str(run.path), "--step", "1", "--to", str(model))[0] == 0
    assert "replace the model in it with --overwrite" in refused("--step", "1", "--to", model)
    assert drumroll("run", "export", str(run.path), "--step", "1", "--to", str(model), "--overwrite")[0] == 0
