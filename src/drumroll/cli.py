"""The command line. Each verb imports what it needs when it runs, so that help and dry runs answer at once."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from drumroll import __version__
from drumroll.completion import Key, Override, script
from drumroll.errors import DrumrollError, Interrupted, did_you_mean

if TYPE_CHECKING:
    from drumroll.config import RunConfig


class Verbs(click.Group):
    """Shows a user's mistakes as one sentence and exit code 2, and suggests the verb that was meant."""

    @override
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(error.message + hint, ctx) from None


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version")
def cli() -> None:
    """Train language models by reinforcement learning, on a laptop or a cluster.

    \b
    drumroll train recipes/quickstart/recipe.yaml
    drumroll train recipe.yaml optim.lr=1e-5 seed=7
    drumroll explain optim.lr
    """


@cli.command()
@click.argument("recipe", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, type=Override())
@click.option("--resume", metavar="RUN", help="Continue the run in this directory from its last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace an existing run of the same name.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the resolved config, the batch arithmetic and a prompt; look up all that the recipe names; train nothing.",
)
@click.option("--no-files", is_flag=True, help="With --dry-run: leave out data files and models that are elsewhere.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Print every metric of every step.")
def train(
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    overwrite: bool,
    dry_run: bool,
    no_files: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train by a RECIPE (YAML), with OVERRIDES like optim.lr=1e-5."""
    if resume is not None and recipe is not None:
        overrides, recipe = (recipe, *overrides), None
        if "=" not in overrides[0]:
            raise DrumrollError(
                f"--resume takes its config from the run directory; '{overrides[0]}' is not an override like steps=200."
            )
    if recipe is None and resume is None:
        raise DrumrollError("nothing to train: name a recipe, for example recipes/quickstart/recipe.yaml, or --resume RUN.")
    from drumroll.config import load

    if resume is not None:
        from drumroll.runfiles.reader import RunReader

        recipe_path = RunReader.open(resume).path / "config.yaml"
    else:
        recipe_path = Path(str(recipe))
    loaded = load(recipe_path, overrides)
    if no_files and not dry_run:
        raise DrumrollError("--no-files is for --dry-run: training needs its files.")
    if dry_run:
        _show_dry_run(loaded.config, files=not no_files)
        return
    from rich.console import Console

    from drumroll.api import train as start
    from drumroll.observe.progress import Quiet, for_console

    progress = Quiet() if quiet else for_console(loaded.config, Console(), verbose=verbose)
    start(recipe, overrides, resume=resume, overwrite=overwrite, progress=progress)


def _show_dry_run(config: RunConfig, *, files: bool) -> None:
    from drumroll.checks.dry_run import resolve
    from drumroll.checks.plan import plan_lines
    from drumroll.config import dump
    from drumroll.registry import search
    from drumroll.workers.runtime import with_lengths

    config = with_lengths(config)
    search(config.import_from)
    click.echo(dump(config))
    for line in chain(config.arithmetic(), plan_lines(config), resolve(config, files=files)):
        click.echo(f"# {line}")


@cli.command()
@click.argument("name")
def init(name: str) -> None:
    """Write a new folder NAME with rows, a reward, a recipe that trains at once, and a test of the reward."""
    from drumroll.starter import write_project

    for line in write_project(Path(name)):
        click.echo(line)


@cli.command("eval")
@click.argument("model")
@click.argument("recipe", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, type=Override())
def evaluate(model: str, recipe: str | None, overrides: tuple[str, ...]) -> None:
    """Measure a MODEL, or the model of a RUN directory, on a recipe's held-out sets (default: the run's own)."""
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        overrides, recipe = (recipe, *overrides), None
    from drumroll.api import evaluate as measure

    for name, value in measure(model, recipe, overrides).items():
        click.echo(f"{name:<40} {value:.4f}")


@cli.command()
@click.argument("key", required=False, type=Key())
@click.argument("recipe", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, type=Override())
@click.option("--pipeline", default="rl", show_default=True, help="Whose keys to explain without a recipe.")
def explain(key: str | None, recipe: str | None, overrides: tuple[str, ...], pipeline: str) -> None:
    """Say what a config KEY means, its default and, with a RECIPE, its value and where it is set.

    `drumroll explain algorithm` lists the named algorithms, `drumroll explain algorithm=dapo` prints one's parts.
    """
    from drumroll.config import load
    from drumroll.config.explain import all_keys
    from drumroll.config.explain import explain as describe
    from drumroll.config.pipelines import config_class

    chosen = config_class(pipeline, [str(Path.cwd())], "--pipeline")
    if key is None:
        for name, field in all_keys(chosen):
            click.echo(f"{name:<40} {(field.description or '').splitlines()[0]}")
        return
    if key.partition("=")[0] == "algorithm":
        from drumroll.algorithms.explain import explain_preset, list_presets

        name = key.partition("=")[2]
        click.echo(explain_preset(name) if name else list_presets())
        return
    loaded = load(recipe, overrides) if recipe else None
    click.echo(describe(key, loaded, pipeline))


@cli.command()
@click.argument("shell")
def completion(shell: str) -> None:
    """Print the script that completes commands and config keys in a SHELL (bash, zsh, fish)."""
    click.echo(script(cli, shell))


@cli.command()
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, type=Override())
@click.option("--simulate", is_flag=True, help="Play the rollout schedule on virtual time and show what limits it.")
@click.option("--engines", default=None, type=click.IntRange(1), help="Engines. Default: the recipe's roles.rollout.workers.")
@click.option("--steps", default=20, type=click.IntRange(1), show_default=True, help="Steps to simulate.")
@click.option("--sigma", default=1.0, type=click.FloatRange(0, 5), show_default=True, help="Spread of the log-normal lengths.")
@click.option(
    "--longest", default=8.0, type=click.FloatRange(0.1), show_default=True, help="Longest sample, in median lengths."
)
@click.option(
    "--reward-time",
    default=0.1,
    type=click.FloatRange(0),
    show_default=True,
    help="Time of a reward, in median generation times.",
)
@click.option(
    "--train-time",
    default=1.0,
    type=click.FloatRange(0),
    show_default=True,
    help="Time of an update, in median generation times.",
)
@click.option(
    "--filtered", default=0.0, type=click.FloatRange(0, 0.95), show_default=True, help="Share of groups that the filter drops."
)
def plan(recipe: str, overrides: tuple[str, ...], simulate: bool, engines: int | None, **work: Any) -> None:
    """The arithmetic of a RECIPE before any device is taken; with --simulate its schedule on virtual time."""
    from drumroll.config import load
    from drumroll.registry import search

    config = load(recipe, overrides).config
    search(config.import_from)
    from drumroll.checks.plan import plan_lines
    from drumroll.workers.runtime import with_lengths

    config = with_lengths(config)
    for line in chain(config.arithmetic(), plan_lines(config)):
        click.echo(line)
    if not simulate:
        return
    if not config.has_rollouts():
        raise DrumrollError(
            f"only reinforcement learning has rollouts to simulate; this recipe is pipeline: {config.pipeline}."
        )
    from rich.console import Console

    from drumroll.checks.plan import simulation_table

    steps = work.pop("steps")
    Console().print(simulation_table(config, engines or config.roles.rollout.workers, steps, work))


class Checks(Verbs):
    """`check recipe.yaml` and `check ENV` need no verb: what is not one is a recipe or an environment."""

    @override
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            from drumroll.envs import ENVIRONMENTS
            from drumroll.envs.runner import exists

            if Path(args[0]).suffix in (".yaml", ".yml") or Path(args[0]).exists():
                args = ["recipe", *args]
            elif ":" in args[0] or exists(args[0]):
                args = ["environment", *args]
            elif not args[0].startswith("-"):
                hint = did_you_mean(args[0], [*self.commands, *ENVIRONMENTS.parts])
                raise DrumrollError(
                    f"'{args[0]}' is neither a recipe, nor an environment, nor one of {', '.join(self.commands)}.{hint}"
                )
        return super().resolve_command(ctx, args)


@cli.group(cls=Checks, no_args_is_help=True)
def check() -> None:
    """Look for problems before it costs time: `check machine`, `check recipe.yaml`, `check ENV`."""


@check.command("recipe")
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, type=Override())
def check_recipe(recipe: str, overrides: tuple[str, ...]) -> None:
    """Whether a RECIPE's rewards tell right from wrong, and whether its start model has something to learn from.

    Without rollouts: whether its data and parts exist, and the first row with the tokens that are trained.
    """
    import asyncio

    from rich.console import Console

    from drumroll.checks.preflight import preflight, preflight_tables
    from drumroll.config import load

    config = load(recipe, overrides).config
    if not config.has_rollouts():
        from drumroll.checks.dry_run import resolve

        for line in resolve(config):
            click.echo(line)
        return
    found = asyncio.run(preflight(config, lambda text: click.echo(text, err=True)))
    for table in preflight_tables(found):
        Console().print(table)
    if found.problems:
        sys.exit(1)


@check.command("environment")
@click.argument("environment", metavar="ENV")
@click.argument("args", nargs=-1)
@click.option("--seconds", default=120.0, type=click.FloatRange(1), show_default=True, help="Give up after so long.")
def check_environment(environment: str, args: tuple[str, ...], seconds: float) -> None:
    """Play an ENV (a name, or module:Class; ARGS like size=4): its answers, determinism, seeds, oracle, speed."""
    import asyncio

    from rich.console import Console

    from drumroll.envs.check import examine, findings_table

    findings = asyncio.run(examine(environment, _environment_args(args), seconds))
    Console().print(findings_table(environment, findings))
    failed = [finding.name for finding in findings if finding.passed is False]
    if failed:
        raise DrumrollError(f"environment '{environment}' fails: {', '.join(failed)}.")


def _environment_args(args: tuple[str, ...]) -> dict[str, Any]:
    import yaml

    from drumroll.registry import search

    pairs = [text.partition("=") for text in args]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise DrumrollError(f"'{wrong[0]}' is not an argument; write name=value, for example size=4.")
    search([str(Path.cwd())])
    return {key: yaml.safe_load(value) for key, _, value in pairs}


@cli.command()
@click.argument("target", metavar="RECIPE|ENV")
@click.argument("overrides", nargs=-1, type=Override())
@click.option("--human", is_flag=True, help="Play the environment yourself.")
@click.option("--seed", default=0, show_default=True, help="With --human: the episode's seed.")
@click.option("--batches", default=1, type=click.IntRange(1), show_default=True, help="How many batches of the recipe.")
@click.option("--overwrite", is_flag=True, help="Replace the rollouts that were saved before.")
def rollout(target: str, overrides: tuple[str, ...], human: bool, seed: int, batches: int, overwrite: bool) -> None:
    """Play a RECIPE's episodes without training, or an ENV by hand with --human (OVERRIDES are its arguments then)."""
    if human:
        import asyncio

        from drumroll.envs.human import play

        asyncio.run(play(target, _environment_args(overrides), seed))
        return
    from drumroll.api import rollout as collect
    from drumroll.observe.failures import by_cause

    run, metrics = collect(target, overrides, batches=batches, overwrite=overwrite)
    for name, value in metrics.items():
        click.echo(f"{name:<40} {value:.4f}")
    for failure in by_cause(run.failures()):
        click.echo(f"{failure.count} samples, the first is {failure.first}: {failure.describe()}")
    click.echo(f"rollouts {run.path / 'rollouts'}\nlook     drumroll run samples {run.path}")


@cli.command()
@click.argument("target", metavar="MODEL|RECIPE|RUN")
@click.argument("overrides", nargs=-1, type=Override())
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port to listen on. Default: a free one.")
@click.option("--token", help="What callers must give as API key. Default: a new one, printed.")
@click.option(
    "--record", type=click.Path(path_type=Path, dir_okay=False), help="Append every call to this file, with its tokens."
)
@click.option(
    "--log",
    "requests",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append a line for every request to this file: path, status, tokens, seconds.",
)
def serve(target: str, overrides: tuple[str, ...], **where: Any) -> None:
    """Open an OpenAI-compatible endpoint for a model, with OVERRIDES of its config, until Ctrl-C."""
    import asyncio

    from drumroll.serving import config_of
    from drumroll.serving import serve as start

    asyncio.run(start(config_of(target, overrides), click.echo, **where))


@check.command("machine")
@click.option("--json", "as_data", is_flag=True, help="Print everything found as JSON, in bytes.")
def check_machine(as_data: bool) -> None:
    """What this machine has, which parts of drumroll can run on it, and the commands that bring what is missing."""
    from drumroll.checks.machine import look
    from drumroll.checks.readiness import as_json, readiness_tables

    machine = look(Path.cwd())
    if as_data:
        import json

        click.echo(json.dumps(as_json(machine), indent=2))
        return
    from rich.console import Console

    for table in readiness_tables(machine):
        Console().print(table)


@cli.command()
@click.argument("folder", default="runs", metavar="[DIR]", type=click.Path(path_type=Path))
@click.option("--json", "as_data", is_flag=True, help="Print one JSON object per run.")
def runs(folder: Path, as_data: bool) -> None:
    """List the runs in a folder: state (running, finished, interrupted, failed), step, result, age."""
    import json

    from rich.console import Console

    from drumroll.observe.runs import list_runs, runs_table

    found = list_runs(folder)
    if as_data:
        for line in found:
            click.echo(json.dumps(line))
        return
    Console().print(runs_table(found, folder))


@cli.group()
def run() -> None:
    """Look at an existing run."""


@run.command()
@click.argument("run_path", metavar="RUN")
def status(run_path: str) -> None:
    """How far a run is, its newest numbers, and which step its model is."""
    from drumroll.observe.headline import headline
    from drumroll.observe.runs import model_text, state_of
    from drumroll.runfiles.reader import RunReader

    opened = RunReader.open(run_path)
    lines, saved = opened.metrics, opened.checkpoints.steps()
    step, state = int(lines[-1]["step"]) if lines else 0, state_of(opened)
    why = f" ({opened.outcome['error']})" if state == "failed" else ""
    click.echo(
        f"{opened.path}: {state}, step {step} of {opened.settings.get('steps', '?')}, checkpoints at {saved or 'none'}{why}"
    )
    click.echo(f"  {'model':<32} {model_text(opened)}")
    for name, value in headline(lines[-1]) if lines else ():
        click.echo(f"  {name:<32} {value}")


@run.command()
@click.argument("run_path", metavar="RUN")
@click.option("--step", default="best", show_default=True, help="Of which step: best, last, or the number of a checkpoint.")
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where to write it.")
@click.option("--merge-lora", is_flag=True, help="Add LoRA adapters to the weights. Default: write the adapters alone.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Type of the weights. Default: the run's.")
@click.option("--overwrite", is_flag=True, help="Replace a model in DIR.")
def export(run_path: str, step: str, to: Path, merge_lora: bool, dtype: str | None, overwrite: bool) -> None:
    """Write the model of a checkpoint as a Hugging Face directory with a model card."""
    from drumroll.exporting import export as write
    from drumroll.runfiles.reader import RunReader

    number = write(RunReader.open(run_path), to, step=step, merge_lora=merge_lora, dtype=dtype, overwrite=overwrite)
    click.echo(f"{to}: the model of step {number}")


@run.command()
@click.argument("run_path", metavar="RUN")
@click.option("--step", type=int, help="Only samples of this step. Default: the newest with some.")
@click.option("--kind", type=click.Choice(["train", "eval"]), default=None, help="Only training or evaluation samples.")
@click.option("--domain", help="Only samples of this domain.")
@click.option("--where", metavar="CONDITION", help="An SQL condition, such as \"reward < 0.5 and rewards ->> 'format' = 1\".")
@click.option("--limit", default=20, type=click.IntRange(1), show_default=True, help="How many to show.")
@click.option("--full", is_flag=True, help="Show whole texts, one sample under another.")
@click.option("--json", "as_data", is_flag=True, help="Print one JSON object per sample.")
def samples(run_path: str, full: bool, as_data: bool, **chosen: Any) -> None:
    """Show samples: dialogue, gold answer, reward and its parts, stop reason, fate."""
    from rich.console import Console

    from drumroll.observe.samples import find_samples, full_samples, json_lines, sample_table
    from drumroll.runfiles.reader import RunReader

    opened = RunReader.open(run_path)
    found = find_samples(opened, **chosen)
    if as_data:
        for line in json_lines(found):
            click.echo(line)
        return
    for shown in full_samples(found) if full else [sample_table(opened, found)]:
        Console().print(shown)


@run.command()
@click.argument("run_path", metavar="RUN")
@click.option("--prompt", help="Everything that happened to the prompt with this id.")
@click.option("--in-flight", is_flag=True, help="Samples without a fate: under way now, or when the run was killed.")
@click.option("--by", multiple=True, type=click.Choice(["step", "domain"]), help="Break the counts down; may be given twice.")
def ledger(run_path: str, prompt: str | None, in_flight: bool, by: tuple[str, ...]) -> None:
    """What became of every prompt drawn and every sample started."""
    from rich.console import Console

    from drumroll.observe.ledger_tables import flight_table, prompt_table, summary_tables
    from drumroll.runfiles.reader import RunReader

    ledger = RunReader.open(run_path).open_ledger()
    if prompt is not None:
        tables = prompt_table(ledger, prompt)
    else:
        tables = flight_table(ledger) if in_flight else summary_tables(ledger, by)
    for table in tables:
        Console().print(table)


@run.command()
@click.argument("run_path", metavar="RUN")
@click.argument("overrides", nargs=-1, type=Override())
def rescore(run_path: str, overrides: tuple[str, ...]) -> None:
    """Score a run's recorded samples again, with changed rewards: rescore RUN reward=number."""
    from rich.console import Console

    from drumroll.api import rescore as again

    Console().print(again(run_path, overrides))


@run.command()
@click.argument("run_path", metavar="RUN")
def report(run_path: str) -> None:
    """Write report.html anew and say where it is."""
    from drumroll.observe.report import write_report
    from drumroll.runfiles.reader import RunReader

    click.echo(write_report(RunReader.open(run_path)))


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    try:
        cli(prog_name="drumroll", standalone_mode=False)
    except Interrupted as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(130)
    except DrumrollError as error:
        click.echo(f"drumroll: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.message and not error.message.startswith("Usage: "):
            command = error.ctx.command_path if error.ctx else "drumroll"
            click.echo(f"drumroll: {error.format_message()} See `{command} --help`.", err=True)
        else:
            error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("drumroll: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
