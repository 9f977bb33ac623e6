"""Log-probs of the reference that were computed once: `reference.safetensors` in a run directory.

Traces are known by their tokens and by which of these are trained, so that rows are found again in any order and epoch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumroll.batch import Batch
from drumroll.errors import StoreError
from drumroll.runfiles.durable import new_file

REFERENCE_FILE = "reference.safetensors"


class ReferenceLogprobs:
    """Log-probs of trained tokens by trace."""

    def __init__(self) -> None:
        self._found: dict[bytes, Tensor] = {}

    @classmethod
    def load(cls, path: Path) -> ReferenceLogprobs:
        """What `save` wrote."""
        made, columns = cls(), load_file(path)
        keys = [bytes(key.tolist()) for key in columns["keys"]]
        made._found = dict(zip(keys, columns["logprobs"].split(columns["lengths"].tolist()), strict=True))
        return made

    def save(self, path: Path) -> None:
        """Write all of them, durably."""
        values = list(self._found.values())
        columns = {
            "keys": torch.tensor([list(key) for key in self._found], dtype=torch.uint8),
            "lengths": torch.tensor([len(value) for value in values], dtype=torch.int64),
            "logprobs": torch.cat(values) if values else torch.zeros(0),
        }
        with new_file(path) as file:
            save_file(columns, file)

    def add(self, batch: Batch) -> None:
        """Remember a batch's column `reference`."""
        assert batch.reference is not None
        for key, mask, values in zip(_keys(batch), _split(batch, batch.mask), _split(batch, batch.reference), strict=True):
            self._found[key] = values[mask].clone()

    def missing(self, batch: Batch) -> list[int]:
        """The traces that are not known; whole units, each trace once."""
        wanted = {key: trace for trace, key in reversed(list(enumerate(_keys(batch)))) if key not in self._found}
        units = batch.sample_of if batch.unit_of is None else batch.unit_of[batch.sample_of]
        lacking = {int(units[trace]) for trace in wanted.values()}
        return [trace for trace, unit in enumerate(units.tolist()) if unit in lacking]

    def fill(self, batch: Batch) -> Batch:
        """The batch with its column `reference`."""
        column, mask = torch.zeros(len(batch.tokens)), batch.mask
        try:
            column[mask] = torch.cat([self._found[key] for key in _keys(batch)])
        except KeyError:
            raise StoreError(
                f"{REFERENCE_FILE} has no log-probs of a row: it was computed for the steps and the data of this run's beginning; "
                "set reference: role to continue with other ones."
            ) from None
        return batch.with_(reference=column)


def _split(batch: Batch, column: Tensor) -> list[Tensor]:
    return list(column.split(batch.lengths.tolist()))


def _keys(batch: Batch) -> list[bytes]:
    """A digest of each trace's tokens and mask."""
    return [
        hashlib.blake2b(tokens.numpy().tobytes() + mask.numpy().tobytes(), digest_size=16).digest()
        for tokens, mask in zip(_split(batch, batch.tokens), _split(batch, batch.mask), strict=True)
    ]
