"""The original WebShop's files, where the user has them: products, attributes, and the instructions people wrote.

What differs from the original on purpose: a price range becomes one price by the product's own id, so that it never depends on
the order of loading; products without a title are left out.
"""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

from drumroll.envs.webshop.catalogue import Instruction, Product, Shop
from drumroll.errors import DataError

PRICE = re.compile(r"\d[\d,]*(?:\.\d+)?")
UNKNOWN_PRICE = 100.0


@functools.lru_cache(maxsize=2)
def load(products: str, attributes: str, instructions: str | None = None) -> Shop:
    """A shop of the files `items_*.json`, `items_ins*.json` and, for people's own words, `items_human_ins.json`."""
    told = _read(attributes, dict)
    people = _read(instructions, dict) if instructions else {}
    made: dict[str, Product] = {}
    for item in _read(products, list):
        id = str(item.get("asin", "")).lower()
        if id and item.get("name") and id not in made:
            made[id] = _product(id, item, told.get(item["asin"], {}), people.get(item["asin"]))
    if not made:
        raise DataError(f"webshop: {products} holds no product with asin and name.")
    if not any(product.instructions for product in made.values()):
        raise DataError(f"webshop: none of the products in {products} has an instruction in {instructions or attributes}.")
    return Shop(list(made.values()))


def _read(path: str, kind: type) -> Any:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"webshop: cannot read {path}: {error}.") from None
    if not isinstance(found, kind):
        raise DataError(f"webshop: {path} must hold a {kind.__name__}, it holds a {type(found).__name__}.")
    return found


def _product(id: str, item: dict[str, Any], told: dict[str, Any], people: list[dict[str, Any]] | None) -> Product:
    wishes = people if people is not None else [told]
    return Product(
        id=id,
        title=str(item["name"]),
        price=_price(id, item.get("pricing")),
        category=tuple(part.strip() for part in str(item.get("product_category") or "").split("›") if part.strip()),
        query=str(item.get("query") or "").lower().strip(),
        attributes=tuple(told.get("attributes") or ()),
        options=_options(item.get("customization_options") or {}),
        bullets=tuple(str(line) for line in item.get("small_description") or ()),
        description=str(item.get("full_description") or ""),
        instructions=tuple(
            Instruction(
                str(wish["instruction"]).strip().rstrip("."),
                tuple(wish["instruction_attributes"]),
                _named(wish.get("instruction_options")) if people is not None else None,
            )
            for wish in wishes
            if wish.get("instruction") and wish.get("instruction_attributes")
        ),
    )


def _named(options: Any) -> tuple[str, ...]:
    """Options of an instruction: a list of values, or values by name."""
    return tuple(str(value).lower() for value in (options.values() if isinstance(options, dict) else options or ()))


def _options(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    values = {
        name.lower(): [" ".join(str(each.get("value") or "").lower().split()) for each in listed or ()]
        for name, listed in given.items()
    }
    return {name: tuple(dict.fromkeys(filter(None, each))) for name, each in values.items() if any(each)}


def _price(id: str, pricing: Any) -> float:
    """`$a`, or one price out of `$a $b`, the same in every process."""
    text = " ".join(map(str, pricing)) if isinstance(pricing, list) else str(pricing or "")
    found = [float(number.replace(",", "")) for number in PRICE.findall(text)][:2]
    if not found:
        return UNKNOWN_PRICE
    return round(random.Random(f"price/{id}").uniform(min(found), max(found)), 2) if len(found) > 1 else found[0]
