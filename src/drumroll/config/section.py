"""What all config sections share: frozen, unknown keys forbidden, every field's docstring is its help."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config. Fields are documented by the string below them; `drumroll explain` prints it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
