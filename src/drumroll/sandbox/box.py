"""The files copied into a box: our modules, and pytest with its dependencies, as zips that Python imports from."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib import metadata
from pathlib import Path

from drumroll.errors import MissingExtra
from drumroll.processes import clock

INSIDE = Path(__file__).parent / "inside"
STUB = b"import sys\nexec(compile(sys.modules['tests'].text, 'test_program.py', 'exec'), globals())\n"
"""The file that pytest collects. The tests themselves are never in a file that a program could find."""
PYTEST_PARTS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


@functools.cache
def code(entry: str) -> bytes:
    """Return a zip of the modules in `inside`, which starts at a function of `zygote`."""
    files = {f"inside/{path.name}": path.read_bytes() for path in sorted(INSIDE.glob("*.py"))}
    files |= {"drumroll/__init__.py": b"", "drumroll/processes/__init__.py": b""}
    files["drumroll/processes/clock.py"] = Path(clock.__file__).read_bytes()
    return _zip(files | {"__main__.py": f"from inside.zygote import {entry}\n{entry}()\n".encode()})


def has_pytest() -> bool:
    """Return whether pytest is installed here, so that it can be copied into boxes."""
    try:
        return bool(metadata.version("pytest"))
    except metadata.PackageNotFoundError:
        return False


@functools.cache
def pytest() -> bytes:
    """Return a zip of pytest and its dependencies."""
    if not has_pytest():
        raise MissingExtra("a test of the kind `pytest`", "code")
    files: dict[str, bytes] = {}
    for name in PYTEST_PARTS:
        try:
            found = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in found:
            part = str(file)
            lexer = part.startswith(("pygments/lexers/", "pygments/styles/")) and not file.stem.startswith(
                ("_", "python", "diff")
            )
            if part.endswith(".py") and not part.startswith("..") and not lexer:
                files[part] = Path(str(file.locate())).read_bytes()
    return _zip(files)
