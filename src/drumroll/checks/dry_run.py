"""`--dry-run`: checks that every part a recipe names exists, and shows one prompt as the model sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from drumroll.components import scan_data, training_columns
from drumroll.config import RunConfig
from drumroll.config.data import DatasetConfig
from drumroll.config.roles import BUILT_IN_MODELS
from drumroll.data.conversation import Conversation, check_template
from drumroll.data.render import Content, Renderer
from drumroll.data.rows import is_function, is_local, read
from drumroll.data.runs import is_run
from drumroll.data.source import RequiredColumns, RowCheck
from drumroll.data.split import Row
from drumroll.envs.adapters import has_tools
from drumroll.envs.episodes import REWRITES
from drumroll.envs.runner import Runner, agent_path, exists
from drumroll.envs.runner import find as find_environment
from drumroll.errors import ConfigError, DataError, DrumrollError, HubError, ModelError, user_frames
from drumroll.models.loading import find as find_model
from drumroll.models.loading import load_tokenizer
from drumroll.pipelines import find_pipeline
from drumroll.registry import import_path
from drumroll.rewards import Rewards
from drumroll.rollout.filters import find_filter
from drumroll.sample import Scene
from drumroll.workers.runtime import check_roles, open_algorithm


def resolve(config: RunConfig, *, files: bool = True) -> Iterator[str]:
    """Look up rewards, environments, algorithm parts, data and models; yield warnings and the first prompt.

    A mistake raises. A model that the hub cannot confirm gives a warning. Without `files`, local data is not read, and
    a missing model directory gives a warning too.
    """
    check_roles(config)
    rewards = Rewards(config.rewards())
    rewards.check_roles(judge=config.roles.judge, reward_model=config.roles.reward_model)
    open_algorithm(config)
    rollout = config.rollout_section()
    for own in (rollout, *map(rollout.of, rollout.domains)):
        if own.filter:
            find_filter(own.filter, own.filter_args)
    for use in sorted(_environments(config)):
        agent = agent_path(use)
        _ = import_path(agent, "environment.use") if agent else find_environment(use)
    for section, sets in _sections(config):
        for name, dataset in sets.items():
            if is_function(dataset):
                import_path(dataset.source, f"{section}.{name}.source")
    if files:
        scan_data(config, rewards.required_columns)
    missing: set[str] = set()
    for name in _models(config):
        try:
            find_model(name)
        except ModelError as error:
            if files and not isinstance(error, HubError):
                raise
            missing.add(name)
            yield f"warning: {error}"
    yield from _prompt(config, files, rewards.required_columns, missing)


def _sections(config: RunConfig) -> list[tuple[str, Mapping[str, DatasetConfig]]]:
    return [("data.train", config.data.train), ("eval.sets", config.eval.sets), ("held_out", config.held_out_sets())]


def _environments(config: RunConfig) -> set[str]:
    if not config.has_episodes():
        return set()
    own = (dataset.environment for dataset in (*config.data.train.values(), *config.eval.sets.values()))
    return {use for use in (config.environment_section().use, *own) if use and use != "none"}


def _models(config: RunConfig) -> list[str]:
    """Return the models that are not built in, without duplicates."""
    roles = (getattr(config.roles, role) for role in type(config.roles).model_fields)
    named = [getattr(role, "model", None) for role in roles if role is not None and getattr(role, "url", None) is None]
    every = dict.fromkeys([config.role_model("actor"), *named, *config.roles.teacher.models()])
    return [name for name in every if name and name not in BUILT_IN_MODELS]


def _prompt(config: RunConfig, files: bool, required: RequiredColumns, missing: set[str]) -> Iterator[str]:
    """Check the first row of every dataset that can be read here, and show the first dataset's as the model sees it."""
    readable = {name: d for name, d in config.data.train.items() if (files if is_local(d) else is_function(d))}
    if not readable:
        yield "no prompt is shown: no training data can be read here."
    model = config.role_model("actor")
    renderer = None if model in missing else Renderer(load_tokenizer(model)).given(config.data.template, "data.template")
    if renderer is not None:
        yield from _template(config, renderer)
    show = find_pipeline(config.pipeline).show
    shows_prompt = config.has_rollouts() or show is None  # given answers are shown below, with their prompts
    for number, (name, dataset) in enumerate(readable.items()):
        columns = training_columns(config, dataset, required)
        check = RowCheck(f"data.train.{name}", dataset, columns, config.environment_section())
        _, content, row, scene = check(_first_row(check.name, dataset, config.seed), 0)
        if not number and shows_prompt:
            yield f"the first prompt of {check.name}" + (":" if renderer else ", without the model's chat template:")
            own = renderer and renderer.given(dataset.template, f"{check.name}.template")
            shown = _episode(own, scene, row) if scene else _text(own, content, dataset)
            yield from (f"  {line}" for line in shown.splitlines())
    here = readable | {name: d for name, d in config.data.train.items() if files and is_run(Path(d.source).expanduser())}
    if show is not None and renderer is not None and here:
        here = config.data.model_copy(update={"train": here, "mixture": None})
        yield from show(config.model_copy(update={"data": here}), renderer)


def _template(config: RunConfig, renderer: Renderer) -> Iterator[str]:
    """Check all arguments of the chat template; name those that are set, or that could be."""
    environment, given = config.environment_section(), {"data": config.data.template}
    for section, sets in _sections(config):
        for name, dataset in sets.items():
            renderer.given(dataset.template, f"{section}.{name}.template")
            given[f"{section}.{name}"] = dataset.template
    for key, values in given.items():
        if values:
            yield f"{key}.template: " + ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    if unset := [name for name in renderer.variables if not any(name in values for values in given.values())]:
        yield f"the chat template of {renderer.name} also has {', '.join(unset)} (data.template sets them)."
    if config.has_episodes() and environment.mode == "trajectory" and environment.earlier_turns == "template":
        chats = {(dataset.chat, dataset.system) for dataset in config.data.train.values()}
        tools = any(has_tools(use) for use in _environments(config))
        if any(check_template(renderer, chat=chat, system=system, tools=tools) for chat, system in chats):
            yield f"note: {REWRITES.format(renderer.name)}"


def _first_row(name: str, dataset: DatasetConfig, seed: int) -> Row:
    try:
        return next(iter(read(name, dataset, seed)))
    except DrumrollError:
        raise
    except Exception as error:
        raise DataError(f"{name}: {dataset.source} gave no row: {type(error).__name__}: {error}.") from error


def _text(renderer: Renderer | None, content: Content, dataset: DatasetConfig) -> str:
    if renderer is None:
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return renderer.tokenizer.decode(list(renderer.prompt(content, chat=dataset.chat, system=dataset.system)))


def _episode(renderer: Renderer | None, scene: Scene, row: Row) -> str:
    """Return the first observation of a registered environment. Others are not started: they may need servers."""
    if not exists(scene.use):
        return f"(what the environment {scene.use} shows first)"
    try:
        with closing(Runner(scene.use, scene.args)) as runner:
            first = asyncio.run(runner.reset(0, row))
    except DrumrollError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment '{scene.use}' cannot start an episode: {type(error).__name__}: {error}.\n{user_frames(error)}".rstrip()
        ) from error
    if renderer is None:
        return first if isinstance(first, str) else json.dumps(first, ensure_ascii=False)
    return renderer.tokenizer.decode(Conversation(renderer, first, chat=scene.chat, system=scene.system).prompt())
