"""Defaults that depend on the model and the machine: the longest completion, and the memory of keys and values."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_pages import equal, mixed, run

from drumroll.config import load
from drumroll.config.rollout import FEWEST_TOKENS, MOST_TOKENS, RolloutConfig, default_length
from drumroll.engines.native import NativeEngine
from drumroll.models import loading
from drumroll.models.shape import find_context
from drumroll.processes import memory
from drumroll.processes.host import Memory
from drumroll.workers.runtime import context_length, with_lengths


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_a_completion_fits_behind_the_longest_prompt(context, prompt):
    length = default_length(context, prompt)
    assert FEWEST_TOKENS <= length <= MOST_TOKENS
    assert length in (MOST_TOKENS, FEWEST_TOKENS) or prompt + length == context


@pytest.fixture
def unset(small):
    def make(**changes):
        recipe = small(**changes)
        recipe["rollout"].pop("max_tokens", None)
        return recipe

    return make


def test_the_default_length_is_what_the_models_context_leaves(unset):
    config = with_lengths(load(unset()).config)
    assert find_context("tiny") == find_context("tiny-random") == 1024
    assert config.rollout.max_tokens == 1024 - 16 == config.rollout.longest
    assert context_length(config) == 1024
    assert with_lengths(config) == config
    assert with_lengths(load(unset(), ["rollout.max_tokens=7"]).config).rollout.max_tokens == 7
    assert with_lengths(load(unset(model="org/not-here")).config).rollout.max_tokens == MOST_TOKENS
    assert RolloutConfig().length_limit == RolloutConfig().longest == MOST_TOKENS


def test_supervised_training_evaluates_with_the_same_default(supervised):
    recipe = {**supervised(), "eval_max_tokens": None}
    assert with_lengths(load(recipe).config).eval_max_tokens == 1024 - 16
    assert with_lengths(load(supervised()).config).eval_max_tokens == 64


def test_an_episode_fits_into_the_models_context(unset):
    lake = {"environment": {"use": "frozen_lake"}, "reward": {}}
    whole = with_lengths(load(unset(**lake)).config)
    assert whole.environment.context == context_length(whole) == 1024
    own = with_lengths(load(unset(**lake), ["environment.context=300"]).config)
    assert (own.environment.context, own.rollout.max_tokens) == (300, 300 - 16)
    step = with_lengths(load(unset(**lake), ["environment.mode=step"]).config)
    assert (step.environment.context, step.longest_trace()) == (None, 1024)


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_a_models_context_is_read_from_its_files(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {key: 300}} if key == "n_positions" else {key: 300}))
    assert find_context(str(tmp_path)) == 300


def test_a_dry_run_shows_the_length(drumroll, unset, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(unset()))
    code, out, err = drumroll("train", str(tmp_path / "recipe.yaml"), "--dry-run")
    assert code == 0, err
    assert "max_tokens: 1008\n" in out
    assert "at most 16,128 new tokens" in out


def test_a_third_of_the_free_memory_divided_among_engines(monkeypatch):
    monkeypatch.setattr(memory, "read_memory", lambda root: Memory(48 * 2**30, 12 * 2**30))
    assert [memory.spare_gb("cpu"), memory.spare_gb("cpu", 2)] == [4.0, 2.0]
    assert memory.spare_gb("cpu", fixed=True) == 16.0  # not what is free just now: a repeated run has the same shape
    monkeypatch.setattr(memory, "read_memory", lambda root: None)
    assert memory.spare_gb("cpu") is None


def test_little_memory_lowers_how_many_run_at_once_and_changes_no_sample():
    model, wanted = loading.load("tiny"), mixed(12)
    roomy = NativeEngine(model, slots=16, context=80, page_tokens=4)
    page_gb = roomy._cache.nbytes() / roomy.page_count / 2**30
    tight = NativeEngine(model, slots=16, context=80, page_tokens=4, spare_gb=30.5 * page_gb)
    assert tight.page_count == 30
    equal(run(roomy, wanted), run(tight, wanted))
    least = NativeEngine(model, slots=16, context=80, page_tokens=4, spare_gb=1e-9)  # one sequence always fits
    assert least.page_count == 80 // 4 + 2
    fixed = NativeEngine(model, slots=16, context=80, fixed_shape=True, spare_gb=5 * 20 * page_gb)
    assert (fixed.capacity(), fixed.page_count) == (5, 5)
    assert len(run(fixed, mixed(8))) == 8
    for engine in (roomy, tight, least, fixed):
        engine.close()
