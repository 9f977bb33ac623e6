"""Rewards written for TRL and verl run as they are; rewards of a group see all its samples, whatever becomes of some."""

import asyncio
import importlib
import random
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_failures import rollouts_of

import drumroll as package
from drumroll.config.reward import RewardConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.layouts import auto
from drumroll.engines import Completion
from drumroll.errors import ConfigError, DataError
from drumroll.processes.pool import KillablePool
from drumroll.rewards import Reward, Rewards, Scorer, group_calls
from drumroll.rewards.extraction import split_thinking
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rewards.signatures import Outcome
from drumroll.rollout import virtual
from drumroll.runfiles.rollouts import read_samples
from drumroll.sample import Failure, Fate, Owner, Prompt, Sample, State, StopReason, Trace

TRL = r"""
import asyncio, re

def tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def letters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def tagged(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.fullmatch("<think>.*?</think>\\s*<answer>.*?</answer>", text, re.DOTALL) else 0.0 for text in texts]

def boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if match and match[1] == truth else 0.0 for match, truth in zip(found, ground_truth, strict=True)]

def only_sums(prompts, completions, task, **kwargs):
    return [float(prompt in completion) if of == "sums" else None for prompt, completion, of in zip(prompts, completions, task)]

async def filled(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def ramp(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def logging(completions, solution, log_extra=None, log_metric=None, **kwargs):
    hits = [float(text in completion) for text, completion in zip(solution, completions)]
    if log_extra:
        log_extra("start", [completion[:2] for completion in completions])
    if log_metric:
        log_metric("hit_rate", sum(hits) / len(hits))
    return hits

def columns(completions, **kwargs):
    assert {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"} <= set(kwargs) and "prompt" not in kwargs
    return [float(len(truth) + len(of)) for truth, of in zip(kwargs["ground_truth"], kwargs["task"])]

class Overlong:
    def __init__(self, most, slack):
        self.most, self.slack = most, slack

    def __call__(self, completion_ids, **kwargs):
        return [-min(1.0, max(0, len(ids) - self.most + self.slack) / self.slack) for ids in completion_ids]

overlong = Overlong(4, 3)
"""
VERL = r"""
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    return len(solution_str) / 100 + extra_info["index"]

def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    found = re.findall(r"#### (-?[0-9.,]+)" if method == "strict" else r"(-?[0-9.,]+)", solution_str)
    return 0 if not found else score if found[-1] == ground_truth else format_score

def detailed(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = ground_truth in solution_str
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str[:3], "length": len(solution_str), "unknown": float("nan")}

async def remote(data_source, solution_str, ground_truth, extra_info):
    return {"score": int(ground_truth in solution_str)}

def batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": float(truth in text), "index": info["index"]} for text, truth, info in zip(solution_strs, ground_truths, extra_infos)]
"""
TEXTS = [r"3+4= so \boxed{7}", "#### 7", "<think>3+4=</think> <answer>7</answer>", "", "no idea at all"]
CHAT = ({"role": "user", "content": "3+4="},)
TRL_ROW = {"prompt": "3+4=", "ground_truth": "7", "solution": "7", "task": "sums"}
VERL_ROW = auto(
    {"data_source": "openai/gsm8k", "prompt": list(CHAT), "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
)


def samples_of(content, row, domain="d"):
    """Samples of one prompt, each of one token per word, written by the weights of step 3."""
    made = []
    for index, text in enumerate(TEXTS):
        trace = Trace()
        trace.extend([1, 2], Owner.PROMPT)
        tokens = [len(word) for word in text.split()]
        trace.extend(tokens, Owner.POLICY, [0.0] * len(tokens), [3] * len(tokens))
        made.append(Sample(Prompt("p", domain, content, (1, 2), row), 0, index, traces=[trace], completion=text))
    return made


def as_trl_calls(function, samples):
    """Call a function with the keyword arguments that TRL's trainer gives it."""
    chat = not isinstance(samples[0].prompt.content, str)
    columns = [c for c in samples[0].prompt.columns if c not in ("prompt", "completion", "completion_ids")]
    extra, metrics = {}, {}
    found = function(
        prompts=[list(s.prompt.content) if chat else s.prompt.content for s in samples],
        completions=[[{"role": "assistant", "content": s.completion}] if chat else s.completion for s in samples],
        completion_ids=[s.traces[0].policy_tokens() for s in samples],
        trainer_state=SimpleNamespace(global_step=3 if samples[0].completion else 0, max_steps=10),
        log_extra=extra.__setitem__,
        log_metric=metrics.__setitem__,
        **{c: [s.prompt.columns[c] for s in samples] for c in columns},
    )
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def as_verl_calls(function, sample):
    row = sample.prompt.columns
    named = {"data_source": row["data_source"], "extra_info": row["extra_info"]} if function.__name__ != "gsm8k" else {}
    found = function(solution_str=sample.completion, ground_truth=row["reward_model"]["ground_truth"], **named)
    found = asyncio.run(found) if asyncio.iscoroutine(found) else found
    return found["score"] if isinstance(found, dict) else float(found)


async def score_all(scorer, samples):
    """Score the samples of a group, each in a task."""
    group = GroupCalls(s.index for s in samples)

    async def one(sample):
        await scorer.score(sample, group)
        group.leave(sample)

    await asyncio.gather(*map(one, samples))
    return [None if s.failure and s.failure.kind == "NotApplicable" else s.failure or s.reward for s in samples]


async def every_example(trl, verl, pool):
    """Score all examples, each sample alone and the group together; return the values by function and form."""
    found = {}
    for name in EXAMPLES:
        module, content, row = (
            (trl, CHAT if name == "tagged" else "3+4=", TRL_ROW) if name in TRL_NAMES else (verl, CHAT, VERL_ROW)
        )
        for group in (False, True) if name in (*TRL_NAMES, "batch") else (False,):
            config = RewardConfig(use=f"{module}:{name}", group=group)
            found[name, group] = await score_all(Scorer({"*": [config]}, 30.0, pool, steps=10), samples_of(content, row))
    return found


TRL_NAMES = ("tokens", "letters", "tagged", "boxed", "only_sums", "filled", "ramp", "logging", "columns", "overlong")
EXAMPLES = (*TRL_NAMES, "compute_score", "gsm8k", "detailed", "remote", "batch")


def expected(trl, verl):
    """What the functions return where their libraries call them."""
    trl, verl = importlib.import_module(trl), importlib.import_module(verl)
    found = {}
    for name in TRL_NAMES:
        own = samples_of(CHAT if name == "tagged" else "3+4=", TRL_ROW)
        found[name, True] = as_trl_calls(getattr(trl, name), own)
        found[name, False] = [as_trl_calls(getattr(trl, name), [sample])[0] for sample in own]
    for name in EXAMPLES[len(TRL_NAMES) : -1]:
        found[name, False] = [as_verl_calls(getattr(verl, name), sample) for sample in samples_of(CHAT, VERL_ROW)]
    found["batch", False] = found["batch", True] = [1.0, 1.0, 1.0, 0.0, 0.0]
    return found


def test_published_examples_run_unchanged_in_worker_processes(mine):
    trl, verl = mine(TRL), mine(VERL)

    async def main():
        pool = KillablePool(2)
        try:
            return await every_example(trl, verl, pool)
        finally:
            await pool.close()

    found, wanted = asyncio.run(main()), expected(trl, verl)
    assert found == wanted
    assert found["tokens", True] == [3, 2, 2, 0, 4]  # the comparison is of something
    assert found["logging", False] == [1, 1, 1, 0, 0]


def test_published_examples_run_unchanged_on_ray(ray_cluster, mine):
    import ray

    from drumroll.placement.devices import Kind, Pool
    from drumroll.workers.group import Role
    from drumroll.workers.ray_group import RayGroup, RayRuntime
    from drumroll.workers.ray_rewards import RewardPool, RewardWorker

    trl, verl = mine(TRL), mine(VERL)

    async def main():
        runtime = RayRuntime(Pool.of([{Kind.CPU: 1}], threads=1), name="other-rewards", address=ray_cluster.address)
        pool = RewardPool(2, lambda: RayGroup(runtime, Role.REWARD, [RewardWorker] * 2), sys.path)
        try:
            return await every_example(trl, verl, pool)
        finally:
            await pool.close()
            await runtime.close()

    try:
        assert asyncio.run(main()) == expected(trl, verl)
    finally:
        ray.shutdown()


def alone(use, text="7", content="3+4=", **columns):
    sample = Sample(Prompt("p", "d", content, (1,), {"answer": "7", **columns}), 0, 0, completion=text)

    async def main():
        scorer = Scorer({"*": [use if isinstance(use, RewardConfig) else RewardConfig(use=use)]})
        try:
            await scorer.score(sample)
        finally:
            await scorer.close()

    asyncio.run(main())
    return sample


def test_what_functions_log_is_kept_and_never_summed(mine):
    logged = alone(f"{mine(TRL)}:logging", "7!!", solution="7")
    assert (logged.reward, logged.rewards) == (1.0, {"logging": 1.0, "logging/hit_rate": 1.0})
    assert logged.extra == {"logging/start": "7!"}
    detailed = alone(f"{mine(VERL)}:detailed", "is 7")
    assert (detailed.reward, detailed.extra) == (1.0, {"detailed/pred": "is ", "detailed/unknown": "nan"})
    assert detailed.rewards == {"detailed": 1.0, "detailed/acc": 1.0, "detailed/length": 4.0}


def test_verls_arguments_come_from_rows_of_any_layout(mine):
    name = mine(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {'score': 1, 'given': [data_source, solution_str, ground_truth, extra_info]}"
    )
    assert alone(f"{name}:compute_score", level=2).extra["compute_score/given"] == ["d", "7", "7", {"level": 2}]
    given = alone(f"{name}:compute_score", **VERL_ROW).extra["compute_score/given"]
    assert given == ["openai/gsm8k", "7", "7", {"index": 3}]
    assert Rewards({"d": [RewardConfig(use=f"{name}:compute_score")]}).required_columns("d") == [
        ("answer", "reward 'compute_score'")
    ]
    fixed = RewardConfig(use=f"{mine(VERL)}:gsm8k", args={"method": "flexible"})
    assert [alone(fixed, text).reward for text in ("so 7", "8")] == [1.0, 0.0]


def test_our_own_functions_take_all_columns_and_the_parts_of_a_completion(mine):
    name = mine(
        "def split(completion, thinking, final): return {'a</think>b': 1, '<think>c</think>d': 2, 'e': 3}[completion] + (thinking + final in 'ab cd e')\n"
        "def any(completion, **kwargs): return sorted(kwargs) == ['answer', 'level']\n"
        "def lists(completions, final, thinking, **kwargs): return [[len(final), len(thinking)] == [1, 1] and final[0] == 'b']\n"
    )
    assert [alone(f"{name}:split", text).reward for text in ("a</think>b", "<think>c</think>d", "e")] == [2, 3, 4]
    assert alone(f"{name}:any", level=1).reward == 1.0
    assert alone(f"{name}:lists", "a</think>b").reward == 1.0


@given(st.text(), st.text().filter(lambda text: "</think>" not in text))
def test_thinking_and_final_are_the_completion(thoughts, rest):
    assert split_thinking(rest) == ("", rest)
    thinking, final = split_thinking(f"<think>{thoughts}</think>{rest}")
    assert (f"<think>{thinking}</think>{final}", final) == (f"<think>{thoughts}</think>{rest}", rest)


@pytest.mark.parametrize(
    ("code", "group", "sentence"),
    [
        (
            "f(completion, completions)",
            False,
            "takes both 'completion' and 'completions', which belong to different signatures",
        ),
        ("f(solution_str, completions, **k)", False, "takes both 'completions' and 'solution_str'"),
        ("f(completions, answer)", False, "neither 'prompts' nor **kwargs as TRL's functions do: write group: true"),
        ("f(completion, answer)", True, "cannot have group: true: let it take 'completions'"),
        ("f(solution_str, ground_truth)", True, "cannot have group: true: let it take 'solution_strs', 'ground_truths', ..."),
        ("f(solution_str, reward_router_address)", False, "write args: {reward_router_address: ...}, or give it a default"),
        ("f(completion, /, answer)", False, "takes 'completion' by position only; rewards are called with names: drop the '/'"),
        ("f(prompts, completions, judge)", False, "asks for 'judge', so it must be a coroutine: async def f(...)"),
    ],
)
def test_wrong_signatures_are_one_sentence_with_the_fix(mine, code, group, sentence):
    with pytest.raises(ConfigError) as caught:
        Reward.bind(RewardConfig(use=f"{mine(f'def {code}: return 1')}:f", group=group))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "f(completions, **k): return 0.5",
            "returned 0.5, a float; it must return a list with a number or None per completion",
        ),
        ("f(completions, **k): return [1, 2]", "returned 2 values for 1 completions; it must return one for each"),
        ("f(completions, **k): return ['1']", "returned '1', a str; it must return a number or None"),
        ("f(completions, **k): return [{'score': 1}]", "returned {'score': 1}, a dict"),
        ("f(solution_str): return {'acc': 1}", "returned a dict without 'score'; it has acc"),
        ("f(solution_str): return {'score': float('nan')}", "returned nan; it must return a finite number or None"),
        (
            "f(completions, log_extra, **k): log_extra('x', [1, 2])",
            "log_extra('x') needs one value per completion, 1; it got 2",
        ),
        ("f(completions, log_metric, **k): log_metric('x', float('inf'))", "log_metric('x') needs a finite number; it got inf"),
    ],
)
def test_wrong_results_are_the_samples_failure(mine, code, sentence):
    failure = alone(f"{mine(f'async def {code}')}:f").failure
    assert sentence in str(failure)
    assert failure.boundary == "reward 'f'"


def test_numbers_of_numpy_and_torch_are_numbers(mine):
    name = mine(
        "import numpy, torch\n"
        "async def a(completions, **kwargs): return numpy.ones(1)\n"
        "async def b(completions, **kwargs): return torch.ones(1)\n"
        "async def c(solution_str): return {'score': numpy.float32(1), 'x': numpy.int64(2), 'y': torch.ones(2)}\n"
    )
    assert [alone(f"{name}:{f}").rewards for f in "abc"] == [{"a": 1.0}, {"b": 1.0}, {"c": 1.0, "c/x": 2.0}]


def test_a_column_that_a_function_names_must_be_there(mine, small, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    data = {"train": {"mine": {"source": str(tmp_path / "rows.jsonl")}}}
    wrong = {"completions, solution, **k": "'solution'", "solution_str, ground_truth": "'answer'", "response": "'response'"}
    for arguments, column in wrong.items():
        code, hint = f"f({arguments})", r" \(which takes no 'completion', the text of the model\)" if "resp" in column else ""
        with pytest.raises(DataError, match=f"lacks the column {column}, which reward 'f'{hint} needs"):
            package.train(small(data=data, reward=f"{mine(f'def {code}: return 1')}:f"))


# --- groups ---

NOVEL = """
def novel(completions, prompt, answer):
    return [float(text not in completions[:i]) + 0.1 * (prompt[i] + answer[i] == "3+4=7") for i, text in enumerate(completions)]
"""


def novelty(mine):
    """How a group is scored by a reward for which the order matters, when samples arrive in any order."""
    texts, name = ["a", "b", "a", "c", "b"], mine(NOVEL.replace("def", "async def"))
    samples = [Sample(Prompt("p", "d", "3+4=", (1,), {"answer": "7"}), 0, i, completion=t) for i, t in enumerate(texts)]
    random.Random(0).shuffle(samples)
    asyncio.run(score_all(Scorer({"*": [RewardConfig(use=f"{name}:novel", group=True)]}), samples))
    return [s.reward for s in sorted(samples, key=lambda s: s.index)]


def test_a_group_is_scored_in_the_order_of_its_samples(mine):
    assert novelty(mine) == [1.1, 1.1, 0.1, 1.1, 0.1]


def test_another_order_would_be_noticed(mine, monkeypatch):
    monkeypatch.setattr(group_calls, "_place", lambda sample: -sample.index)
    assert novelty(mine) != [1.1, 1.1, 0.1, 1.1, 0.1]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_a_call_waits_for_all_that_do_not_fail_and_for_nobody_else(members):
    """Each member arrives or fails after some time; there is one call, when the last of them has."""
    calls = []

    async def call(samples):
        calls.append((asyncio.get_running_loop().time(), [s.index for s in samples]))
        return [Outcome(float(s.index)) for s in samples]

    async def main():
        group = GroupCalls(range(len(members)))

        async def one(index, delay, fails):
            sample = Sample(Prompt("p", "d", "", (1,)), 0, index)
            await asyncio.sleep(delay)
            if fails:
                sample.failure = Failure("ValueError", "generation", "")
            else:
                assert (await group.score(0, sample, call)).value == index
            group.leave(sample)

        await asyncio.gather(*(one(i, *member) for i, member in enumerate(members)))

    virtual.run(main())
    alive = [i for i, (_, fails) in enumerate(members) if not fails]
    assert calls == ([(max(delay for delay, _ in members), alive)] if alive else [])


class Words:
    """An engine that writes one token, its sample's index; some samples lose it."""

    def __init__(self, *lost):
        self.lost = lost

    async def __call__(self, request):
        index = int(request.id.partition("#")[0].split(".")[1])
        if index in self.lost:
            raise ValueError("lost")
        return Completion([index], [-1.0], [0], StopReason.EOS)


GROUPED = """
calls, bad = [], set()
async def f(completions, **kwargs):
    calls.append(list(completions))
    values = [float("nan") if text in bad else float(text) + len(completions) for text in completions]
    bad.clear()
    return values
async def own(completion):
    return 1 / (float(completion) - 1)
async def late(completions, **kwargs):
    import asyncio
    calls.append(list(completions))
    if len(calls) == 2: await asyncio.sleep(1000)
    return [float(text) for text in completions]
"""


def group_of(mine, function, engine, *, bad=(), take=1, then=(), **settings):
    """The last group that `take` returns, the calls of the reward, and the samples that failed."""
    name = mine(GROUPED)
    module = importlib.import_module(name)
    module.bad.update(bad)

    async def main():
        own = [RewardConfig(use=f"{name}:{use}", weight=0) for use in then]
        scorer = Scorer({"*": [RewardConfig(use=f"{name}:{function}", group=True), *own]}, 5.0)
        rollouts = rollouts_of(scorer, RolloutConfig(prompts=1, samples=3, retries=1, **settings))
        rollouts._runner.decode = lambda tokens: str(tokens[0])
        rollouts.router.leave("engine")
        rollouts.router.join("words", engine, 8)
        for _ in range(take):
            [group] = await rollouts.take(1)
            rollouts.trained([group])
        failed = rollouts.stats.failed
        await rollouts.close()
        return group, failed

    group, failed = virtual.run(main())
    return [(s.index, s.reward) for s in group.samples], module.calls, failed


def test_the_whole_group_is_scored_at_once(mine):
    rewards, calls, failed = group_of(mine, "f", Words())
    assert (rewards, calls, failed) == ([(0, 3.0), (1, 4.0), (2, 5.0)], [["0", "1", "2"]], [])


@pytest.mark.parametrize(
    ("on_failure", "rewards", "calls"),
    [("drop", [(0, 2.0), (2, 4.0)], [["0", "2"]]), ("replace", [(0, 3.0), (2, 5.0), (3, 6.0)], [["0", "2", "3"]])],
)
def test_a_sample_that_fails_on_the_way_is_left_out_or_its_replacement_waited_for(mine, on_failure, rewards, calls):
    found = group_of(mine, "f", Words(1), on_failure=on_failure)
    assert found[:2] == (rewards, calls)
    assert [s.id for s in found[2]] == ["0.1"]


@pytest.mark.parametrize(
    ("on_failure", "rewards", "calls"),
    [
        ("drop", [(0, 3.0), (2, 5.0)], [["0", "1", "2"]]),
        ("replace", [(0, 3.0), (2, 5.0), (3, 6.0)], [["0", "1", "2"], ["0", "2", "3"]]),
    ],
)
def test_a_bad_value_fails_its_sample_alone_and_values_once_given_stay(mine, on_failure, rewards, calls):
    found = group_of(mine, "f", Words(), bad=["1"], on_failure=on_failure)
    assert found[:2] == (rewards, calls)
    assert [str(s.failure) for s in found[2]] == [
        "BadReward in reward 'f': reward 'f' returned nan; it must return a finite number or None"
    ]


def test_a_sample_that_fails_after_the_call_is_left_out_of_its_replacements_call(mine):
    rewards, calls, failed = group_of(mine, "f", Words(), then=["own"], on_failure="replace")
    assert (rewards, calls) == ([(0, 3.0), (2, 5.0), (3, 6.0)], [["0", "1", "2"], ["0", "2", "3"]])
    assert [(s.index, s.failure.boundary) for s in failed] == [(1, "reward 'own'")]


def test_a_late_group_is_called_again(mine):
    rewards, calls, failed = group_of(mine, "late", Words(), take=2)
    assert (rewards, len(calls), failed) == ([(0, 0.0), (1, 1.0), (2, 2.0)], 3, [])


def test_samples_wait_in_scoring_and_a_stale_group_is_never_called(mine):
    """A group whose last sample hangs becomes stale with two samples in `scoring`; the next group is scored as ever."""
    name, seen = mine(GROUPED), []
    module = importlib.import_module(name)

    async def slow(request):
        draw, index = map(int, request.id.partition("#")[0].split("."))
        await asyncio.sleep(1000 if (draw, index) == (0, 2) else 1)
        return Completion([index], [-1.0], [0 if draw < 2 else 2], StopReason.EOS)

    async def main():
        scorer = Scorer({"*": [RewardConfig(use=f"{name}:f", group=True)]}, 5.0)
        config = RolloutConfig(prompts=1, samples=3, order="arrival", max_staleness=1, generation_timeout=2000)
        rollouts = rollouts_of(scorer, config)
        rollouts._runner.decode = lambda tokens: str(tokens[0])
        rollouts.router.leave("engine")
        rollouts.router.join("slow", slow, 8)
        for version in (1, 2):
            groups = await rollouts.take(1)
            seen.append([s.state for s in rollouts._flights[0].group.samples])
            waiting = rollouts._flights[0].group.samples
            rollouts.publish(version)
            rollouts.trained(groups)
        assert {s.state for s in waiting} == {Fate.STALE}
        await rollouts.close()

    virtual.run(main())
    assert seen == [[State.SCORING, State.SCORING, State.GENERATING]] * 2
    assert all(call == ["0", "1", "2"] for call in module.calls)


# --- runs ---

MIXED = """
def rank(completions, samples, answer):
    if samples[0].draw == 5:
        raise ValueError("no rank")
    lengths = [len(text) for text in completions]
    ranks = [float(sum(other < own for other in lengths)) for own in lengths]
    return [float("nan") if s.draw == 2 and s.index == 1 else r for s, r in zip(samples, ranks)]

def ramp(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("step", [trainer_state.global_step])
    log_metric("twice", 2 * trainer_state.global_step)
    return [float(trainer_state.global_step)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "seen": data_source}
"""


def test_a_run_with_rewards_of_others_and_of_a_group(mine, small, drumroll, untimed, tmp_path):
    """It is recorded, shown, continued and scored again alike; a failed value or group costs its samples only."""
    name = mine(MIXED)
    reward = [{"use": f"{name}:rank", "group": True}, {"use": f"{name}:compute_score", "weight": 0.5}, f"{name}:ramp"]
    held_out = {"every": 1, "sets": {"sums": {"source": "drumroll.data.problems:sums", "limit": 3, "samples": 2}}}
    changes = {"deterministic": True, "reward": reward, "eval": held_out, "checkpoint": {"every": 1}}
    run = package.train(small(name="whole", steps=2, **changes))
    package.train(small(name="cut", steps=1, **changes))
    resumed = package.train(resume=tmp_path / "runs/cut", overrides=["steps=2"])
    rows = {(r["step"], r["kind"], r["id"]): r for r in run.samples}
    trained = [r for r in rows.values() if r["fate"] == "trained"]
    for row in trained:
        own = row["rewards"]
        assert row["reward"] == pytest.approx(own["rank"] + 0.5 * own["compute_score"] + own["ramp"])
        version = row["step"] - 1
        assert (own["ramp"], own["ramp/twice"], row["extra"]["ramp/step"]) == (version, 2 * version, version)
        assert (own["compute_score/length"], row["extra"]["compute_score/seen"]) == (len(row["completion"]), row["domain"])
    failed = Counter(r["failure"].split(":")[0] for r in rows.values() if r["failure"] and r["kind"] == "train")
    assert failed == {"BadReward in reward 'rank'": 1, "ValueError in reward 'rank'": 4}
    lengths = [m["reward/sums/compute_score/length"] for m in run.metrics if m["step"]]
    assert lengths[0] == pytest.approx(_mean(len(r["completion"]) for r in trained if r["domain"] == "sums" and r["step"] == 1))
    assert "reward/sums/compute_score/length" in (run.path / "report.html").read_text()
    assert untimed(run) == untimed(resumed)
    assert _scores(run.path / "rollouts") == _scores(resumed.path / "rollouts")
    assert drumroll("run", "rescore", str(run.path))[0] == 0
    assert _scores(run.path / "rescored") == _scores(run.path / "rollouts")


def _mean(values):
    values = list(values)
    return sum(values) / len(values)


def _scores(folder):
    files = sorted(folder.glob("*.parquet"))
    return [(r["id"], r["reward"], r["rewards"], r["extra"], r["failure"]) for file in files for r in read_samples(file)]
