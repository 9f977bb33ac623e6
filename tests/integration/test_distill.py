"""Distillation as a pipeline and as a term of RL: it learns, goes on after a crash byte for byte, and names mistakes."""

import json
from pathlib import Path

import pytest
import torch
from test_batch import random_groups

import drumroll
from drumroll.algorithms.aggregations import Shares, token_mean
from drumroll.algorithms.losses import DistillLoss, PolicyLoss, SFTLoss
from drumroll.batch import join, pack
from drumroll.config import check, load
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.distill import DistillConfig
from drumroll.config.divergence import DivergenceConfig
from drumroll.errors import ConfigError
from drumroll.learners import Update
from drumroll.workers.roles import open_learner

ROOT = Path(__file__).parents[2]
ROWS = {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.0}}


@pytest.fixture
def distill(small):
    """A small recipe that distils `tiny` into a random model, with changes merged in."""

    def make(**changes):
        base = {
            "pipeline": "distill",
            "model": "tiny-random",
            "data": {"train": {"sums": ROWS, "reversal": {**ROWS, "args": {"task": "reversal", "flawed": 0.0}}}},
            "rollout": {"samples": 1, "prompts": 16},
            "batch": 16,
            "roles": {"teacher": {"model": "tiny"}},
            "deterministic": True,
        }
        return small(**{**base, **changes})

    return make


CHANGES = {
    "distill": {"divergence": {"use": "jsd", "over": "all"}, "on_policy": 0.5, "sft": 0.1},
    "rl": {
        "pipeline": "rl",
        "reward": "length",
        "rollout": {"samples": 4, "prompts": 4},
        "algorithm": {"teacher": 0.2, "divergence": {"use": "skew_reverse", "over": "top_k", "top_k": 4}, "sft": 0.1},
        "demonstrations": {"data": {"train": {"sums": ROWS}}, "batch": 6},
        "optim": {"minibatch": 8},
    },
}


@pytest.fixture(params=CHANGES)
def either(request, distill):
    """A recipe of distillation as a pipeline, or as a term of RL."""
    changes = CHANGES[request.param] | {"eval": {"sets": {}}, "roles": {"teacher": {"model": "tiny"}}}
    made = distill(**changes)
    if request.param == "rl":
        del made["batch"]
    return made


def test_a_crashed_run_goes_on_as_if_nothing_had_happened(either, same_after_a_crash):
    whole, _ = same_after_a_crash({**either, "steps": 4, "checkpoint": {"every": 2}})
    assert all("train/divergence" in m for m in whole.metrics[1:])
    assert "train/nll" in whole.metrics[1]


@pytest.mark.slow
def test_a_killed_run_equals_its_uninterrupted_twin(either, same_after_a_signal):
    same_after_a_signal({**either, "steps": 12})


@pytest.mark.slow
def test_a_divided_run_on_ray_trains_as_one_process(distill, same_on_two_ranks):
    same_on_two_ranks(distill(on_policy=0.0, deterministic=False, held_out={"sums": ROWS | {"limit": 11}}, eval={"sets": {}}))


def test_the_student_approaches_its_teacher(distill):
    forward = {"use": "forward", "over": "all"}
    run = drumroll.train(distill(steps=8, optim={"lr": 3e-3}, divergence=forward, on_policy=0, eval={"sets": {}}))
    gaps = [m["train/divergence"] for m in run.metrics[1:]]
    assert gaps[-1] < 0.6 * gaps[0]


def test_each_domain_has_its_teacher_and_its_weight(distill):
    """The rows of several teachers are those that each gives alone; without a teacher a domain does not move."""
    batch = pack(random_groups(4, 3, seed=1))
    batch = batch.with_(tokens=batch.tokens % 90 + 3)
    names = ["sums", "reversal", "other"]
    batch.domains = tuple(names[int(group) % 3] for group in batch.group_of)
    over = {"use": "forward", "over": "top_k", "top_k": 3}
    teachers = {"model": None, "domains": {"sums": {"model": "tiny"}, "reversal": {"model": "tiny-even", "weight": 0.5}}}

    def rows(**role):
        return open_learner(check(distill(roles={"teacher": role}, divergence=over)), "teacher").infer(batch, 1.0)

    found, first, second = rows(**teachers), rows(model="tiny"), rows(model="tiny-even")
    of_token = [batch.domains[int(sample)] for sample in batch.sample_of_token()]
    for name, want in {"sums": first, "reversal": second, "other": torch.zeros_like(first)}.items():
        own = torch.tensor([domain == name for domain in of_token])
        assert torch.allclose(found[own], want[own], atol=1e-4)
    assert not torch.equal(first, second)
    role = check(distill(roles={"teacher": teachers})).roles.teacher
    assert [(role.number(name), role.weight(name)) for name in names] == [(0, 1.0), (1, 0.5), (-1, 0.0)]
    run = drumroll.train(distill(steps=2, roles={"teacher": teachers}, on_policy=0.5))
    assert all("train/divergence" in m for m in run.metrics[1:])


def gradient(config, batch, loss, aggregate):
    """The gradient of one update."""
    learner, found = open_learner(config, "actor"), []
    clip = learner.backend.clip
    learner.backend.clip = lambda limit: found.append([m.grad.clone() for m in learner.backend.master]) or clip(limit)
    learner.update(Update(batch, loss, aggregate))
    return torch.cat([part.flatten() for part in found[0]])


def test_the_weights_of_teachers_and_of_the_term_are_factors_of_the_gradient(distill):
    """In distillation, and in RL, where samples without advantage leave the teacher's term alone."""
    over = {"use": "forward", "over": "top_k", "top_k": 3}
    batch = pack(random_groups(4, 2, seed=1))
    batch = batch.with_(tokens=batch.tokens % 90 + 3, advantages=torch.zeros(len(batch.tokens)))
    batch.domains = tuple(("sums", "reversal")[int(group) % 2] for group in batch.group_of)
    teacher = open_learner(check(distill(divergence=over)), "teacher")
    batch = batch.with_(teacher=teacher.infer(batch, 1.0))

    def of(sums, reversal, loss=None):
        domains = {"sums": {"model": "tiny", "weight": sums}, "reversal": {"model": "tiny", "weight": reversal}}
        config = check(distill(roles={"teacher": {"model": None, "domains": domains}}, divergence=over))
        return gradient(config, batch, loss or DistillLoss(config.divergence, own=True), token_mean)

    first, second = of(1.0, 0.0), of(0.0, 1.0)
    assert min(first.norm(), second.norm(), (first - second).norm()) > 1e-3
    assert torch.allclose(of(0.8, 0.3), 0.8 * first + 0.3 * second, rtol=1e-3, atol=1e-6)
    algorithm = AlgorithmConfig(loss="pg", aggregation="token_mean", teacher=0.25, divergence=over)
    assert torch.allclose(of(0.8, 0.3, PolicyLoss(algorithm)), 0.2 * first + 0.075 * second, rtol=1e-3, atol=1e-6)


def test_demonstrations_wait_until_the_policy_learns(distill, small):
    """Eight rows once, in batches of four: the critic's first two steps take none."""
    rows = {"train": {"sums": {**ROWS, "limit": 8}}, "epochs": 1}
    recipe = small(
        steps=4,
        algorithm={"preset": "ppo", "critic_first": 2, "sft": 0.1},
        demonstrations={"data": rows, "batch": 4},
        eval={"sets": {}},
    )
    run = drumroll.train(recipe)
    assert ["train/nll" in line for line in run.metrics] == [False, False, False, True, True]


def test_the_whole_vocabulary_is_the_default_whichever_divergence_is_named(distill):
    for named in ("reverse", {"use": "jsd"}, {"use": "jsd", "beta": 0.3}):
        assert check(distill(divergence=named)).divergence.over == "all"
    changed = DistillConfig.model_validate({**distill(), "divergence": DivergenceConfig(use="jsd")})
    assert (changed.divergence.use, changed.divergence.over) == ("jsd", "all")
    assert AlgorithmConfig(divergence={"use": "jsd"}).divergence.over == "sampled"


def test_demonstrations_add_their_likelihood_to_the_gradient_of_rl(distill):
    config = check(distill())
    own, rows = (pack(random_groups(4, 2, seed=seed)) for seed in (1, 2))
    own = own.with_(advantages=torch.randn(len(own.tokens), generator=torch.Generator().manual_seed(0)))
    algorithm = AlgorithmConfig(loss="pg", aggregation="fixed_length", sft=0.3)
    shares = Shares("fixed_length", 9)
    both = gradient(config, join(own, rows), PolicyLoss(algorithm), shares)
    alone = gradient(config, own, PolicyLoss(algorithm.model_copy(update={"sft": 0.0})), shares)
    imitation = gradient(config, rows, SFTLoss(), token_mean)
    assert torch.allclose(both, alone + 0.3 * imitation, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(both, alone, rtol=1e-4, atol=1e-7)


def test_an_earlier_run_teaches_its_student(distill, tmp_path):
    first = drumroll.train(distill(name="first", steps=1, eval={"sets": {}}))
    config = load(distill(roles={"teacher": {"model": str(first.path)}})).config
    assert config.roles.teacher.model == str((first.path / "model").resolve())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"roles": {"teacher": {"model": None}}}, "pipeline: distill needs a model to learn from: name one under roles.teacher.model"),
        ({"reward": {}}, "reward is missing: eval.sets are scored by it"),
        ({"sft": 0.5}, "sft: 0.5 imitates given answers, and on_policy: 1 has none; set on_policy below 1"),
        ({"divergence": "revrse"}, "divergence.use: 'revrse' is not known; choose one of forward"),
        ({"divergence": {"use": "jsd", "beta": 1}}, "divergence: beta: 1 is the limit where jsd becomes another: set use: reverse"),
        ({"divergence": {"top_k": 5}}, "divergence: top_k: 5 belongs to over: top_k, but over is all"),
        ({"divergence": {"over": "sampled"}, "on_policy": 0.5}, "over: sampled estimates reverse on tokens that the student drew"),
        ({"roles": {"teacher": {"model": "WIDER"}}}, "has other tokens than the actor"),
        ({"model": "WIDER", "roles": {"teacher": {"model": "SAME"}}}, "has 99 logits, fewer than the 120 of"),
    ],
)  # fmt: skip
def test_mistakes_are_named(distill, tmp_path, changes, sentence):
    folders = {"WIDER": save(tmp_path / "wider", 120, more="§"), "SAME": save(tmp_path / "same", 99, more="§")}

    def named(value):
        return (
            {k: named(v) for k, v in value.items()}
            if isinstance(value, dict)
            else folders.get(value, value)
            if isinstance(value, str)
            else value
        )

    with pytest.raises(ConfigError) as caught:
        drumroll.train(distill(**named(changes)))
    assert sentence in str(caught.value)


def save(folder, vocabulary, more):
    """A random model with a token more than the built-in ones."""
    import transformers as hf

    from drumroll.models import tiny

    words = tiny.tokenizer()
    words.add_tokens([more])
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=vocabulary, **shape)).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def test_without_rewards_a_run_tells_of_the_divergence_alone(distill, drumroll, tmp_path):
    made = distill(steps=1, eval={"sets": {}}) | {"reward": None}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({key: value for key, value in made.items() if value is not None}))
    code, out, err = drumroll("train", str(path))
    assert code == 0, err
    assert " divergence " in out
    assert [text for text in ("reward sums", "usual for", "same reward") if text in out] == []


def test_the_keys_are_explained_and_a_dry_run_shows_the_first_prompt(drumroll):
    code, out, _ = drumroll("explain", "divergence", "--pipeline", "distill")
    assert code == 0
    assert "divergence.top_k" in out
    code, out, _ = drumroll("train", str(ROOT / "recipes/distill/recipe.yaml"), "roles.teacher.model=tiny", "--dry-run")
    assert code == 0, out
    assert "the first prompt of data.train" in out
