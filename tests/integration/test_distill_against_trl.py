"""Our divergences and gradients are those of TRL's DistillationTrainer and GKDTrainer, to 1e-5 in float32.

TRL answers all cases at once, in an environment of its own: benchmarks/peers/trl_distill.py.
"""

from functools import partial

import peers
import pytest
import torch
from peers import distance
from test_distill import PlainHead

from drumroll.algorithms.aggregations import token_mean
from drumroll.batch import pack
from drumroll.config.divergence import DivergenceConfig
from drumroll.models.distillation import Comparison, Target, TeacherHeads, TeacherPass
from drumroll.sample import Group, Owner, Prompt, Sample, Trace

ROWS, TOKENS, VOCABULARY, WIDTH = 3, 9, 23, 8
SEEDS = ["0", "1"]
SAME = {
    # name: (ours, TRL's)
    "forward": ({"use": "forward"}, {"beta": 0.0, "temperature": 1.0}),
    "reverse": ({"use": "reverse"}, {"beta": 1.0, "temperature": 1.0}),
    "jsd": ({"use": "jsd", "beta": 0.5}, {"beta": 0.5, "temperature": 1.0}),
    "jsd 0.1, warm": ({"use": "jsd", "beta": 0.1}, {"beta": 0.1, "temperature": 1.7}),
    "reverse, cold": ({"use": "reverse"}, {"beta": 1.0, "temperature": 0.6}),
}


def make_case(seed):
    """Hidden states and heads of a student and a wider teacher, rows of which some tokens are trained."""
    noise = torch.Generator().manual_seed(seed)
    mask = torch.rand(ROWS, TOKENS, generator=noise) < 0.7
    mask[:, 0] = True

    def normal(*shape):
        return torch.randn(*shape, generator=noise)

    return {
        "student": normal(ROWS, TOKENS, WIDTH),
        "head": normal(VOCABULARY, WIDTH),
        "teacher": normal(ROWS, TOKENS, WIDTH + 3),
        "teacher_head": normal(VOCABULARY, WIDTH + 3),
        "mask": mask.long(),
    }


SETTINGS = {f"{trainer}/{name}": (trainer, theirs) for trainer in ("distillation", "gkd") for name, (_, theirs) in SAME.items()}
RECORDING = peers.Recording("trl_distill", SETTINGS, {seed: partial(make_case, int(seed)) for seed in SEEDS})
live, trl = RECORDING.fixtures()


@pytest.mark.peers
def test_the_recording_is_what_trl_answers(live):
    assert RECORDING.agrees_with(live)


def shares(mask):
    """The share of each trained token, as an update has it."""
    groups = []
    for number, row in enumerate(mask):
        trace, prompt = Trace(), Prompt(str(number), "d", "", (1,))
        trace.extend([1], Owner.PROMPT)
        for trained in row.tolist():
            policy = {"owner": Owner.POLICY, "logprobs": [0.0], "versions": [0]}
            trace.extend([2], **(policy if trained else {"owner": Owner.ENVIRONMENT}))
        groups.append(Group(prompt, number, [Sample(prompt, number, 0, traces=[trace], reward=0.0)]))
    batch = pack(groups)
    return token_mean(batch)[batch.mask]


def ours(case, options, temperature):
    """Loss and gradients through the teacher's pass and the student's head, in chunks of a few tokens."""
    trained = case["mask"].bool()
    student, head = (case[name].clone().requires_grad_() for name in ("student", "head"))
    other = PlainHead(case["teacher_head"])
    gives = TeacherPass("all", WIDTH + 3, VOCABULARY)
    (rows,) = other(case["teacher"][trained], None, temperature, entropy_gradient=False, asked=gives)
    compared = Comparison(DivergenceConfig(over="all", **options), TeacherHeads([other], [WIDTH + 3], VOCABULARY), alone=True)
    asked = Target(rows, torch.zeros(len(rows), dtype=torch.int64), compared)
    chosen = torch.zeros(len(rows), dtype=torch.int64)
    numbers = PlainHead(head)(student[trained], chosen, temperature, entropy_gradient=False, rows=16, asked=asked)
    loss = (numbers[2] * shares(case["mask"])).sum()
    gradients = torch.autograd.grad(loss, (student, head))
    return {"loss": loss.detach(), "student": gradients[0], "head": gradients[1]}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trainer", ["distillation", "gkd"])
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradients_are_those_of_trl(trl, name, trainer, seed):
    cases, answers = trl
    options, theirs = SAME[name]
    for kind, found in ours(cases[seed], options, theirs["temperature"]).items():
        assert distance(found, answers[f"{trainer}/{name}/{seed}/{kind}"]) < 1e-5, kind
