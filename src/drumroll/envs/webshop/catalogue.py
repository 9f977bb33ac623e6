"""A shop: products, goals to shop for, and the generator of both. Everything follows from one seed."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drumroll.envs.bm25 import BM25

COLORS = ("black", "white", "red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "grey", "gray", "beige", "gold", "silver", "navy", "teal", "khaki", "ivory", "olive")  # fmt: skip
SIZES = ("xs", "s", "m", "l", "xl", "xxl")
PRICES = [10.0 * i for i in range(1, 100)]
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True)
class Instruction:
    """A wish of a person for a product, in words, with what it names. Without options, one is drawn."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Product:
    """What the shop sells."""

    id: str
    title: str
    price: float
    category: tuple[str, ...]
    query: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    bullets: tuple[str, ...] = ()
    description: str = ""
    instructions: tuple[Instruction, ...] = ()

    def index_text(self) -> str:
        """What search looks at: title, description, first bullet, options."""
        options = " ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options])


@dataclass(frozen=True)
class Goal:
    """What to buy: a product of the target's kind with these attributes and options, at no more than this price."""

    target: Product
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float
    instruction: str | None = None

    def words(self) -> str:
        """The goal as a person would say it."""
        named = f" with {' and '.join(self.options)}" if self.options else ""
        limit = f", and price lower than {self.price_upper:.2f} dollars" if self.price_upper < NO_LIMIT else ""
        wish = self.instruction or f"Find me a {self.target.query} that is {' and '.join(self.attributes)},"
        return f"{wish}{'' if self.instruction and self.options_are_named else named}{limit}."

    @property
    def options_are_named(self) -> bool:
        """Whether the instruction names the options itself."""
        return any(wish.text == self.instruction and wish.options is not None for wish in self.target.instructions)

    def short(self) -> str:
        """The goal in few characters."""
        return f"{self.keywords()} <{self.price_upper:.0f}"

    def keywords(self) -> str:
        """What to search for: options too, as the index knows them."""
        return " ".join([*self.attributes, self.target.query, *self.options])


@dataclass
class Shop:
    """Products and their index."""

    products: Sequence[Product]
    index: BM25 = field(init=False)
    by_id: dict[str, Product] = field(init=False)

    def __post_init__(self) -> None:
        self.index = BM25([product.index_text() for product in self.products])
        self.by_id = {product.id: product for product in self.products}
        told = [product for product in self.products if product.instructions]
        self._targets = told or list(self.products)

    def search(self, keywords: str, most: int) -> list[Product]:
        """The best hits, best first."""
        return [self.products[number] for number in self.index.search(keywords, most)]

    def goal(self, rng: random.Random, attributes: int = 2, options: int = 1) -> Goal:
        """A goal that a random product meets."""
        target = rng.choice(self._targets)
        wish = rng.choice(target.instructions) if target.instructions else None
        wanted = wish.attributes if wish else tuple(rng.sample(target.attributes, min(attributes, len(target.attributes))))
        named = wish.options if wish and wish.options is not None else _some_options(target, options, rng)
        return Goal(target, wanted, named, _price_upper(target.price, rng), wish.text if wish else None)


def _some_options(target: Product, count: int, rng: random.Random) -> tuple[str, ...]:
    names = rng.sample(list(target.options), min(count, len(target.options)))
    return tuple(rng.choice(target.options[name]) for name in names)


def _price_upper(price: float, rng: random.Random) -> float:
    """The larger of two of the next four multiples of ten above the price."""
    above = [p for p in PRICES if p > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


# Department: attributes, options, kinds of things by aisle.
DEPARTMENTS: dict[str, tuple[str, dict[str, tuple[str, ...]], str]] = {
    "clothing": (
        "soft,warm,washable,stretchy,windproof,slim fit,loose fit,long sleeve,quick dry,hand made,lined,light weight",
        {"color": COLORS[:11], "size": SIZES},
        "tops: shirt, sweater; outerwear: jacket, raincoat; shoes: sneaker, sandal",
    ),
    "kitchen": (
        "non stick,oven safe,heat proof,rust free,easy clean,heavy duty,stackable,leakproof,insulated,bpa free,polished,compact",
        {"color": COLORS[:11], "capacity": ("1 cup", "2 cup", "4 cup", "6 cup", "8 cup")},
        "cookware: pan, kettle; tableware: mug, bowl; storage: jar, bottle",
    ),
    "beauty": (
        "scent free,cruelty free,long lasting,oil free,paraben free,natural,hydrating,gentle,waterproof,vegan,non greasy,organic",
        {"scent": ("rose", "lemon", "mint", "vanilla", "lavender", "ginger"), "pack": ("1 pack", "2 pack", "3 pack", "6 pack")},
        "skin: lotion, cleanser; hair: shampoo, conditioner; bath: soap, scrub",
    ),
    "electronics": (
        "wireless,fast charging,low noise,splash proof,hi res,plug in,ultra slim,long range,quiet,foldable,dimmable,rechargeable",
        {"color": COLORS[:8], "length": ("3 ft", "6 ft", "10 ft", "15 ft")},
        "audio: headphone, speaker; power: charger, cable; light: lamp, flashlight",
    ),
    "garden": (
        "weatherproof,rust proof,easy assemble,heavy duty,foldable,light weight,hand carved,space saving,solar,non slip,washable,eco friendly",
        {"color": COLORS[:11], "size": ("small", "medium", "large", "huge")},
        "outdoor: bench, umbrella; plants: planter, trellis; tools: shovel, hose",
    ),
    "grocery": (
        "gluten free,sugar free,low sodium,organic,keto friendly,dairy free,fat free,high protein,ready to eat,non gmo,freeze dried,kosher",
        {"flavor": ("apple", "cherry", "peach", "mango", "cocoa", "honey"), "pack": ("1 pack", "4 pack", "8 pack", "20 pack")},
        "snacks: cracker, granola; drinks: tea, juice; pantry: sauce, noodle",
    ),
}
BRANDS = ("alto", "birk", "corva", "delmo", "ester", "fjord", "golda", "hanso", "ilex", "juno", "kesta", "lumo", "marn", "nova", "orbit", "pico")  # fmt: skip
LETTERS = "abcdefghjkmnpqrstuvwxyz"
DIGITS = LETTERS + "0123456789"
MOST_PRODUCTS = len(LETTERS) * len(DIGITS) ** 2


@functools.lru_cache(maxsize=4)
def generated(seed: int, products: int) -> Shop:
    """A made-up shop with 36 categories. Products of a kind differ in attributes, options and price."""
    rng = random.Random(f"webshop/{seed}")
    kinds = [
        (department, aisle.strip(), thing.strip())
        for department, (_, _, aisles) in DEPARTMENTS.items()
        for part in aisles.split(";")
        for aisle, _, things in [part.partition(":")]
        for thing in things.split(",")
    ]
    numbers = rng.sample(range(MOST_PRODUCTS), products)
    return Shop([_product(_code(number), kinds[i % len(kinds)], rng) for i, number in enumerate(numbers)])


def _code(number: int) -> str:
    """A short id: a letter first, so that it is never mistaken for a price."""
    rest, last = divmod(number, len(DIGITS))
    first, middle = divmod(rest, len(DIGITS))
    return LETTERS[first] + DIGITS[middle] + DIGITS[last]


def _product(code: str, kind: tuple[str, str, str], rng: random.Random) -> Product:
    department, aisle, thing = kind
    pool, options, _ = DEPARTMENTS[department]
    attributes = rng.sample(pool.split(","), 4)
    bullets = [f"{' and '.join(attributes[2:])}.", f"a {thing} for every day."]
    chosen = {name: tuple(sorted(rng.sample(values, 3), key=values.index)) for name, values in options.items()}
    return Product(
        id=code,
        title=f"{rng.choice(BRANDS)} {attributes[0]} {attributes[1]} {thing}",
        price=float(rng.randint(5, 80)),
        category=(department, aisle, thing),
        query=thing,
        attributes=tuple(attributes),
        options=chosen,
        bullets=tuple(bullets),
        description=f"this {thing} is {attributes[0]} and {attributes[2]}.",
    )
