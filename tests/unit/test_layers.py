"""The house rules: layers that hold, module names that exist, short files and functions, the glossary's words."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
LINT = Path(sys.executable).parent / "lint-imports"
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
LAYERS = [[name.strip() for name in re.split(r"[|:]", line)] for line in reversed(CONTRACT["layers"])]
"""From the lowest: packages and modules of `drumroll`; those in one line do not import each other."""
REGISTRIES = ("drumroll.config.engines", "drumroll.config.pipelines")
"""The modules whose strings may name parts of higher layers: they turn names in a config into parts."""
LONGEST_FILE, LONGEST_FUNCTION = 600, 46


@cache
def modules():
    """Every module of the package, parsed, by name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


# --- layers ---


def lint(folder):
    """Check the contract of pyproject.toml on the package in a folder."""
    command = [LINT, "--no-cache", "--no-logo", "--config", ROOT / "pyproject.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_packages_import_only_lower_ones():
    code, said = lint(SRC)
    assert code == 0, said


@pytest.mark.parametrize("line", ["from drumroll.workers import group", "def lazily():\n    import drumroll.workers.group"])
def test_an_import_of_a_higher_layer_breaks_the_contract(tmp_path, line):
    shutil.copytree(
        SRC / "drumroll", tmp_path / "drumroll", ignore=lambda folder, names: [n for n in names if no_code(folder, n)]
    )
    with (tmp_path / "drumroll" / "batch.py").open("a") as batch:
        batch.write(f"\n\n{line}\n")
    code, said = lint(tmp_path)
    assert code == 1
    assert "0 kept, 1 broken" in said
    assert re.findall(r"^- *(drumroll\S*) -> (drumroll\S*)", said, re.MULTILINE) == [
        ("drumroll.batch", "drumroll.workers.group")
    ]


def no_code(folder, name):
    path = Path(folder, name)
    return path.name == "__pycache__" or (path.is_file() and path.suffix != ".py")


# --- names of our modules in strings ---


PATH = re.compile(r"drumroll(?:\.\w+)+(?::\w+)?")


def paths_in_strings():
    """(module, `drumroll.module` or `drumroll.module:name`) of each string that is such a path, and of code in strings."""
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if PATH.fullmatch(node.value):
                    yield module, node.value
                for imported, name in re.findall(r"\bfrom (drumroll[\w.]*) import (\w+)", node.value):
                    yield module, f"{imported}:{name}"


def names_in(tree):
    """The names that a module binds at its top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))


def layer(module):
    """The place of a module's package in the contract, from the lowest."""
    package = module.split(".")[1]
    return next(place for place, line in enumerate(LAYERS) if package in line)


def test_strings_name_modules_that_exist_in_the_same_package_or_below():
    found = list(paths_in_strings())
    assert ("drumroll.envs.executors", "drumroll.envs.runner:play") in found  # the search finds what is there
    for module, path in found:
        named, _, name = path.partition(":")
        assert named in modules(), f"{module} names {path}, and there is no such module"
        assert not name or name in names_in(modules()[named]), f"{module} names {path}, and the module has no such name"
        same = module.split(".")[1] == named.split(".")[1]
        assert same or module in REGISTRIES or layer(named) < layer(module), f"{module} names {path}, of a higher layer"


# --- length ---


def test_files_are_short_enough_to_read():
    folders = ("src", "tests", "benchmarks", "examples", "tools")
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_functions_are_short_enough_to_read():
    functions = [
        (f"{module}:{node.name}", node.end_lineno - node.lineno + 1)
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(name, length) for name, length in functions if length > LONGEST_FUNCTION] == []


# --- words ---


OLD_WORDS = {"desk", "seat", "fleet", "parcel"}
"""They became batch builder, worker, engine pool and weight manifest."""
OLD_NAMES = {"Places"}
"""It became admission, executors or device set."""
ALLOWED = {
    ("drumroll.envs.adapters.textarena", "seat"),  # TextArena's own name for a player's position
}


def identifiers(tree):
    """Every name that a module defines or uses."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")


def words_of(identifier):
    """`LearnerSeats` → learner, seat: the words of an identifier, in the singular."""
    return {word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def test_words_of_identifiers():
    assert words_of("LearnerSeats") == {"learner", "seat"}
    assert words_of("_open_fleet2") == {"open", "fleet"}


def test_the_old_words_do_not_come_back():
    found = {
        (module, name)
        for module, tree in modules().items()
        for name in identifiers(tree)
        if words_of(name) & OLD_WORDS or name in OLD_NAMES
    }
    assert found - ALLOWED == set()
