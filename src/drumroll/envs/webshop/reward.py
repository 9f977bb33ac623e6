"""What a purchase is worth: `type · (attributes + options + price) / (wanted attributes + wanted options + 1)`.

The formula is WebShop's (Yao et al., 2022). It tells nouns in titles with a parser; here a noun is a word that is neither a
function word, a number, a colour nor shaped like an adjective.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from drumroll.envs.webshop.catalogue import COLORS, Goal, Product

CLOSE = 85
PLAIN = re.compile(r"[^a-z0-9]+")
FUNCTION_WORDS = "a an and as at by for from in into is it its no non of off on or out per the their this to up with without x"
ADJECTIVES = (
    "big cold dry easy extra fast free fresh great heavy high hot large light long low mini natural new old plus pure quick quiet "
    "raw safe short slim small smart soft strong super thick thin warm wide"
)
NOT_NOUNS = frozenset([*FUNCTION_WORDS.split(), *ADJECTIVES.split(), *COLORS])
ADJECTIVE = re.compile(r".{3,}(able|ible|ful|less|ous|ive|ical|proof|ed|ish|est)$")


def score(product: Product, chosen: Mapping[str, str], goal: Goal) -> float:
    """Between 0 and 1; 1 is success."""
    attributes = sum(has(product, wanted) for wanted in goal.attributes)
    options = sum(any(_same_option(wanted, value) for value in chosen.values()) for wanted in goal.options)
    affordable = product.price <= goal.price_upper
    return (
        type_score(product, goal.target) * (attributes + options + affordable) / (len(goal.attributes) + len(goal.options) + 1)
    )


def has(product: Product, attribute: str) -> bool:
    """Whether a product has an attribute, by its list or by its texts."""
    if any(token_set_ratio(attribute, own) > CLOSE for own in product.attributes):
        return True
    texts = (product.title, *product.bullets, product.description)
    return any(attribute.lower() in text.lower() for text in texts)


def _same_option(wanted: str, value: str) -> bool:
    return token_set_ratio(_color(wanted), _color(value)) > CLOSE


def matching(goal_option: str, product: Product) -> tuple[str, str] | None:
    """The option of a product that meets a wanted one, as (name, value)."""
    pairs = [(name, value) for name, values in product.options.items() for value in values]
    exact = [pair for pair in pairs if pair[1] == goal_option.lower()]
    close = [pair for pair in pairs if _same_option(goal_option, pair[1])]
    return next(iter(exact + close), None)


def _color(text: str) -> str:
    """A text that names a known colour is that colour."""
    return next((color for color in COLORS if color in text.lower()), text)


def type_score(bought: Product, wanted: Product) -> float:
    """How far the thing is of the kind that was asked for, by the nouns of the titles, by query and by category."""
    nouns = nouns_in(wanted.title)
    share = len(nouns & nouns_in(bought.title)) / len(nouns) if nouns else 0.2
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    same_category = len(set(bought.category) & set(wanted.category)) >= 2
    return 1.0 if bought.query == wanted.query or same_category or share > 0.2 else 0.5


def nouns_in(title: str) -> set[str]:
    """The nouns of a title, roughly."""
    found = PLAIN.sub(" ", title.lower()).split()
    return {word for word in found if word.isalpha() and word not in NOT_NOUNS and not ADJECTIVE.match(word)}


@functools.lru_cache(maxsize=100_000)
def token_set_ratio(a: str, b: str) -> float:
    """Likeness of two texts as sets of words, 0 to 100: 100 if one set holds the other."""
    ours, theirs = (set(PLAIN.sub(" ", text.lower()).split()) for text in (a, b))
    if not ours or not theirs:
        return 0.0
    both = " ".join(sorted(ours & theirs))
    if both and (ours <= theirs or theirs <= ours):
        return 100.0
    first, second = (" ".join([both, *sorted(only)]).strip() for only in (ours - theirs, theirs - ours))
    return max(_ratio(first, second), _ratio(both, first), _ratio(both, second))


def _ratio(a: str, b: str) -> float:
    """Twice the longest common subsequence over both lengths, in percent."""
    if not a or not b:
        return 0.0
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return 200.0 * row[-1] / (len(a) + len(b))
