"""A student learns from a teacher in every layout and backend as in one process, over the whole vocabulary and over the top k."""

import contextlib

import pytest
import test_parallel
import torch
from test_batch import random_groups
from test_parallel import LIMITS, OPTIM, RANKS, ROLES, TEMPERATURE, Matrix, errors

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import DistillLoss
from drumroll.batch import pack
from drumroll.config.divergence import DivergenceConfig
from drumroll.learners import Learner, Update
from drumroll.learners.heads import LogProbHead
from drumroll.mesh import Mesh
from drumroll.models.distillation import Target, TeacherPass
from drumroll.models.teacher_heads import open_teacher_heads

FAMILY, VOCABULARY, WIDTH, TOP_K = "Llama", 97, 64, 5
LOSSES = {
    "all": DistillLoss(DivergenceConfig(use="jsd", beta=0.3, over="all"), own=True),
    "top_k": DistillLoss(DivergenceConfig(use="reverse", over="top_k", top_k=TOP_K), own=False, sft=0.2),
}
CASES = {
    "shard 2": ({"shard": 2}, {}),
    "tensor 2": ({"tensor": 2}, {}),
    "context 2": ({"context": 2}, {}),
    "megatron, tensor 2": ({"tensor": 2}, {"backend": "megatron"}),
    "megatron, pipeline 2": ({"pipeline": 2}, {"backend": "megatron"}),
    "ZeRO-3": ({"shard": 2}, {"backend": "deepspeed", "zero": 3}),
}
ONCE = [("shard 2", "all"), ("tensor 2", "top_k")]
"""Cases of `make test`."""
EVERY = [
    pytest.param(*case, marks=() if case in ONCE else pytest.mark.slow) for case in ((c, o) for c in CASES for o in LOSSES)
]


def teach(rank, folder, over, batches, options):
    """The rows of a teacher's pass."""
    gives = TeacherPass(over, WIDTH if over == "all" else 2 * TOP_K + 1, VOCABULARY)
    ROLES["teacher"] = LogProbHead(gives=gives), None
    backend = test_parallel.open_learner(RANKS[-1], folder, "teacher", "float32", **options).backend
    learner = Learner(backend, OPTIM, LogProbHead(gives=gives))
    return [learner.infer(batch, TEMPERATURE) for batch in batches]


def learn(rank, folder, teacher, over, works, options, spoilt=False):
    """Two updates of a student, which compares with a copy of the teacher's head."""
    ROLES["student"] = student_of(teacher), None
    with pytest.MonkeyPatch.context() as patch:
        if spoilt:  # a rank forgets the columns of the others
            patch.setattr("drumroll.models.distillation.add_over_ranks", lambda x, group: x)
            patch.setattr(Target, "of", lambda self, tokens: self)
        return test_parallel.train(rank, folder, "student", "float32", works, None, options)


def student_of(teacher):
    return LogProbHead(heads=open_teacher_heads([teacher], VOCABULARY, dtype="float32", device="cpu", seed=0))


class Students(Matrix):
    """A random student and another random model as its teacher."""

    def teacher(self):
        """The student's family with other weights."""
        path = self.folder / "teacher"
        if not path.exists():
            module = test_parallel.hf.LlamaForCausalLM.from_pretrained(self.model(FAMILY))
            noise = torch.Generator().manual_seed(5)
            for parameter in module.parameters():
                parameter.data.add_(torch.randn(parameter.shape, generator=noise), alpha=0.1)
            module.save_pretrained(path)
            test_parallel.tiny.tokenizer().save_pretrained(path)
        return str(path)

    def rows(self, axes, over, options):
        """The teacher's rows for two batches in a layout, in the order of the batches."""
        batches = [pack(random_groups(5, 5, seed=seed)) for seed in (0, 1)]
        parts = self.run(axes, teach, self.teacher(), over, batches, options)
        leaders = [parts[rank] for rank in Mesh(**axes).leaders()]
        return batches, [batch.gather([part[i] for part in leaders]) for i, batch in enumerate(batches)]

    def student_works(self, over):
        if over not in self.known:
            batches, rows = self.rows({}, over, {})
            both = zip(batches, rows, strict=True)
            self.known[over] = [
                Update(batch.with_(teacher=teacher), LOSSES[over], Shares("token_mean"), TEMPERATURE) for batch, teacher in both
            ]
            job = learn, self.model(FAMILY), self.teacher(), over, self.known[over], {}
            self.known[over, "alone"] = self.run({}, *job)
        return self.known[over], self.known[over, "alone"]

    def student_errors(self, case, over, **how):
        axes, options = CASES[case]
        works, alone = self.student_works(over)
        parts = self.run(axes, learn, self.model(FAMILY), self.teacher(), over, works, options, *how.values())
        return errors(parts, alone, works, Mesh(**axes))


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    with contextlib.closing(Students(tmp_path_factory.mktemp("models"))) as made:
        yield made


@pytest.mark.parametrize(("case", "over"), EVERY)
def test_a_student_learns_as_in_one_process(students, case, over):
    found = students.student_errors(case, over)
    assert found.within(LIMITS["float32"]), found


@pytest.mark.parametrize(("case", "over"), EVERY)
def test_a_teacher_teaches_as_in_one_process(students, case, over):
    axes, options = CASES[case]
    _, alone = students.rows({}, over, {})
    _, found = students.rows(axes, over, options)
    for mine, theirs in zip(found, alone, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine, theirs, atol=1e-4)
        assert mine.abs().sum() > 0


def test_a_rank_that_sees_only_its_columns_is_found(students):
    found = students.student_errors("tensor 2", "top_k", spoilt=True)
    assert not found.times(0.1).within(LIMITS["float32"]), found
