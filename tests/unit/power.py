"""A power cut: what a process had synced, and nothing else, is on the disk afterwards (see power_cut.c)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Disk:
    """Keeps the synced files of processes that run with its `environment`, and shows what a cut leaves of a folder."""

    def __init__(self, folder: Path) -> None:
        self.kept = folder / "kept"
        self.kept.mkdir()
        library, source = folder / "power_cut.so", Path(__file__).with_name("power_cut.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.environment = os.environ | {"LD_PRELOAD": str(library), "DISK_KEPT": str(self.kept)}

    def cut(self, folder: Path, to: Path) -> Path:
        """Make `to` what is left of a folder."""
        found = sorted(self.kept.glob(f"{folder.stat().st_ino}-*"), key=lambda names: names.stat().st_mtime_ns)
        self._restore(found[-1], to)
        return to

    def _restore(self, names: Path, to: Path) -> None:
        to.mkdir()
        for line in names.read_text().splitlines() if names.exists() else ():
            key, is_folder, name = line.split(" ", 2)
            kept = self.kept / key
            if is_folder == "1":
                self._restore(kept, to / name)
            else:
                (to / name).write_bytes(kept.read_bytes() if kept.exists() else b"")
