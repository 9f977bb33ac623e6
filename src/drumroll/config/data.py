"""`data`: where prompts come from and how they are mixed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from drumroll.config.section import Section


class DatasetConfig(Section):
    """One source of rows."""

    source: str
    """A file (.jsonl, .json, .csv, .parquet), a directory of them or one saved by `datasets`, a run directory (its answers; for preferences the best against the worst of each group), a dataset of the Hugging Face hub (`hf:owner/name`), a task of reasoning-gym (`reasoning_gym:chain_sum`), or `module:function` that yields rows: `function(split, seed, **args)`. From Python also the rows themselves: a list, a DataFrame, a `datasets.Dataset`."""
    args: dict[str, Any] = {}
    """Arguments of a function or a reasoning-gym task; for the hub `config` and whatever `datasets.load_dataset` takes."""
    split: str = "train"
    """Which rows: passed to a function, which must keep splits apart; of a directory or hub dataset, the split of that name."""
    layout: Literal[
        "auto", "plain", "trl", "verl", "deepmath", "kodcode", "multi_subject", "crossthink", "rlvr_ifeval"
    ] = "auto"  # fmt: skip
    """How the columns are laid out: `auto` knows TRL's and verl's rows by sight; `plain` takes rows as they are; the rest are published datasets."""
    columns: dict[str, str] = {}
    """Columns to add: new name ← column or dotted path, for example {answer: reward_model.ground_truth}."""
    tag: str | None = None
    """Column (or dotted path) that says a row's domain. Default: `domain`."""
    tags: dict[str, str] = {}
    """Value of that column → domain; other values stand for themselves."""
    domain: str | None = None
    """Domain of every row. Default: the row's `domain` column, else the dataset's name in the config."""
    prompt: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages (`messages` is tried too)."""
    completion: str = "completion"
    """Column with the answer to imitate, a text or messages; only training on given answers reads it."""
    system: str | None = None
    """A system message put before every prompt (makes a text prompt a chat)."""
    chat: bool | None = None
    """Render text prompts as a user's chat turn. Default: yes when the tokenizer has a chat template."""
    template: dict[str, Any] = {}
    """Arguments of the chat template for this dataset, over those of `data.template`: for example {enable_thinking: false}."""
    limit: int | None = Field(None, ge=1)
    """Use at most this many rows; needed for endless function sources in evaluation."""
    where: str | None = None
    """Of a run directory: use only samples for which this SQL condition holds, as for `drumroll run samples --where`: for example `reward >= 1 and tokens < 200`."""
    best: int | None = Field(None, ge=1)
    """Of a run directory, for training on its answers: use only so many samples of each group, those with the highest rewards."""
    environment: str | None = None
    """Environment of every row, or `none`. Default: the row's `environment` column, else `environment.use`."""
    environment_args: dict[str, Any] | None = None
    """Its arguments. Default: `environment.args` if it is `environment.use`, else none."""


class DataConfig(Section):
    """Training rows."""

    train: dict[str, DatasetConfig]
    """Datasets by name."""
    mixture: dict[str, float] | None = None
    """Share of each dataset in every batch, by name, to within one prompt, also when groups are filtered. Default: equal shares of the draws; with `epochs` and only finite datasets, in proportion to their sizes."""
    shuffle: bool = True
    """Shuffle finite datasets anew in every epoch, by `seed`."""
    epochs: float | None = Field(None, gt=0)
    """Stop after so many passes over every dataset; with a `mixture`, or beside an endless dataset, over the largest finite one. Default: as many as `steps` takes."""
    template: dict[str, Any] = {}
    """Arguments of the chat template wherever the policy's prompts are rendered, for example {enable_thinking: true}; `--dry-run` names those that it has."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt allowed, in tokens."""
    overlong: Literal["drop", "truncate", "fail"] = "drop"
    """What to do with a longer one: skip it, keep its last tokens, or stop. Counted in `data/overlong`."""
