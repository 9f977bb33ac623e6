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
NAME_BUILDERS = {
    *("drumroll.engines", "drumroll.pipelines", "drumroll.rewards"),  # registries: the modules of their built-ins
    "drumroll.engines.vllm",  # the path of its own class, which vLLM imports in its workers
}
"""The modules that may build the name of a module with an f-string."""
LONGEST_FILE, LONGEST_FUNCTION = 600, 46

pytestmark = pytest.mark.xdist_group("layers")  # one process parses the package for all of them


@cache
def modules():
    """Every module of the package, parsed, by name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


@cache
def nodes():
    """Every node of every module: (module's name, node)."""
    return [(module, node) for module, tree in modules().items() for node in ast.walk(tree)]


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
    for module, node in nodes():
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
    """The rank of a module's package in the contract, from the lowest; None if the contract does not know the package."""
    package = module.split(".")[1]
    return next((rank for rank, line in enumerate(LAYERS) if package in line), None)


def may_name(module, named):
    """Whether a module may name another one: it is of the same package, or of a lower layer."""
    if layer(named) is None:
        return False
    return module.split(".")[1] == named.split(".")[1] or layer(named) < layer(module)


def test_strings_name_modules_that_exist_in_the_same_package_or_below():
    found = list(paths_in_strings())
    assert ("drumroll.envs.executors", "drumroll.envs.runner:play") in found  # the search finds what is there
    for module, path in found:
        named, _, name = path.partition(":")
        assert named in modules(), f"{module} names {path}, and there is no such module"
        assert not name or name in names_in(modules()[named]), f"{module} names {path}, and the module has no such name"
        assert may_name(module, named), f"{module} names {path}, of a higher layer"


def prefix_of(module, node):
    """The text of an f-string before its first unknown value; `{__name__}` is known: the module's own name."""
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value
        elif isinstance(part.value, ast.Name) and part.value.id == "__name__":
            text += module
        else:
            break
    return text


@pytest.mark.parametrize(
    ("code", "prefix", "allowed"),
    [
        ('f"{__name__}.{name}:BACKEND"', "drumroll.engines.", True),
        ('f"drumroll.engines.{name}"', "drumroll.engines.", True),
        ('f"drumroll.models.{name}"', "drumroll.models.", True),
        ('f"drumroll.pipelines.{name}"', "drumroll.pipelines.", False),
        ('f"drumroll.{name}"', "drumroll.", False),
    ],
)
def test_prefix_of_an_f_string(code, prefix, allowed):
    assert prefix_of("drumroll.engines", ast.parse(code, mode="eval").body) == prefix
    assert may_name("drumroll.engines", prefix) is allowed


def test_f_strings_name_modules_of_the_same_package_or_below():
    found = [
        (module, prefix)
        for module, node in nodes()
        if isinstance(node, ast.JoinedStr) and (prefix := prefix_of(module, node)).startswith("drumroll.")
    ]
    for module, prefix in found:
        assert may_name(module, prefix), f"{module} names {prefix}…, of a higher layer or of no package"
    assert {module for module, _ in found} == NAME_BUILDERS


# --- length ---


def test_files_are_short_enough_to_read():
    folders = ("src", "tests", "benchmarks", "examples", "tools")
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_functions_are_short_enough_to_read():
    functions = [
        (f"{module}:{node.name}", node.end_lineno - node.lineno + 1)
        for module, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(name, length) for name, length in functions if length > LONGEST_FUNCTION] == []


# --- words ---


OLD_WORDS = {
    "desk": "batch builder",
    "seat": "worker",
    "fleet": "engine pool",
    "bus": "weight sync",
    "parcel": "weight manifest",
    "carrier": "transport",
    "books": "ledger",
    "trouble": "failures",
}
"""Words of the old glossary, each with its successor. Their plurals are old too."""
OLD_NAMES = {"Places"}
"""It became admission, executors or device set."""
ALLOWED = {
    ("src/drumroll/envs/adapters/textarena.py", "seat"),  # TextArena's own name for a player's position
    ("tests/unit/test_adapters.py", "seat"),
}
"""(file, identifier)"""


def identifiers(tree):
    """Every name that a module defines or uses."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")


def words_of(identifier):
    """`LearnerSeats` → learner, seats, seat: the words of an identifier, as they are and without a final s."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}
    return words | {word.removesuffix("s") for word in words}


def test_words_of_identifiers():
    assert words_of("LearnerSeats") == {"learner", "seats", "seat"}
    assert words_of("_open_fleet2") == {"open", "fleet"}
    assert "bus" in words_of("WeightBus")
    assert "bus" not in words_of("busy_loops")


def test_the_old_words_do_not_come_back():
    some = re.compile("|".join([*OLD_WORDS, *OLD_NAMES]), re.IGNORECASE)  # most files need not be parsed
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("src", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if some.search(text := path.read_text())
        for name in set(identifiers(ast.parse(text)))
        if words_of(name) & OLD_WORDS.keys() or name in OLD_NAMES
    }
    assert found == ALLOWED
