"""Validation by jsonschema. Imported by pool workers: a schema's patterns can take exponential time."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema
from referencing import Registry

from drumroll.rewards.extraction import after_thinking
from drumroll.rewards.structured import find_json


@lru_cache(maxsize=256)
def validator(schema: str) -> Any:
    """For a schema as JSON; one that is no schema raises. Nothing it refers to is fetched from a network."""
    loaded = json.loads(schema)
    kind = jsonschema.validators.validator_for(loaded, default=jsonschema.Draft202012Validator)
    kind.check_schema(loaded)
    return kind(loaded, registry=Registry())


def accepts(text: str, schema: str) -> bool:
    """Whether the JSON in a text is as the schema says."""
    checks = validator(schema)
    try:
        return checks.is_valid(find_json(after_thinking(text)))
    except (ValueError, RecursionError):
        return False
