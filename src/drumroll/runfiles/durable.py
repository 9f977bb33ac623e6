"""Writes files so that a crash, a power cut or a full disk never leaves a partial file under its final name.

After each call the file and its name are on disk: `fsync` of the file, then of its directory.
"""

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
    """Turn errors of the file system into a `StoreError` of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(f"cannot write {path}: {error.strerror}. Free some space, then continue with --resume.") from error
        raise StoreError(f"cannot write {path}: {error.strerror or error}.") from error
    except Exception as error:
        # Libraries that write through other languages raise the same failure as their own types.
        if "os error" in str(error).lower() or "no space" in str(error).lower():
            raise StoreError(f"cannot write {path}: {error}. Free some space, then continue with --resume.") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with new_file(path) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """Yield a path to write; the file appears under its name only when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def append_text(path: Path, text: str) -> None:
    """Append to a text file; the text is on disk when this returns."""
    with explained(path):
        created = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Yield a folder to fill; it appears under its name only when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            make_folder(path.parent)
            temporary.mkdir()
            yield temporary
            sync_tree(temporary)
            remove_folder(path)
            os.rename(temporary, path)
            sync(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_folder(path: Path) -> None:
    """Delete a folder: rename it first, so that its name never refers to a partly deleted folder."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        os.rename(path, gone)
        sync(path.parent)
        shutil.rmtree(gone, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and sync each name to disk."""
    with explained(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """Flush a folder with everything in it to disk."""
    for entry in folder.rglob("*"):
        if not entry.is_symlink():
            sync(entry)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)
