"""Writing files so that a crash or a full disk never leaves a half that looks whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from drumroll.errors import StoreError


@contextmanager
def explained(path: Path) -> Generator[None]:
    """Translate what the file system says into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(f"cannot write {path}: {error.strerror}. Free some space, then continue with --resume.") from error
        raise StoreError(f"cannot write {path}: {error.strerror or error}.") from error
    except Exception as error:
        # Libraries that write through other languages wrap the same failure in types of their own.
        if "os error" in str(error).lower() or "no space" in str(error).lower():
            raise StoreError(f"cannot write {path}: {error}. Free some space, then continue with --resume.") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        try:
            temporary.write_text(text, "utf-8")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """A folder that appears under its name only when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _sync(file)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(temporary, path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
