"""A small search engine: BM25 over words with their endings cut, in memory. Equal scores keep the order of the texts."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

WORD = re.compile(r"[a-z0-9]+")
STOP_WORDS = (
    "a an and are as at be by for from if in into is it no not of on or that the their then there these they this to was with"
)
STOP = frozenset(STOP_WORDS.split())
ENDINGS = (("sses", "ss"), ("ies", "y"), ("ing", ""), ("ed", ""), ("s", ""))
KEPT = ("ss", "us", "is")


def words(text: str) -> list[str]:
    """The words that count, in lower case and without their endings."""
    return [_stem(word) for word in WORD.findall(text.lower()) if word not in STOP]


def _stem(word: str) -> str:
    if word.endswith(KEPT):
        return word
    for ending, instead in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: len(word) - len(ending)] + instead
    return word


class BM25:
    """An index over texts. `k1` and `b` are the usual two: how fast repeats stop counting, how much length counts."""

    def __init__(self, texts: Sequence[str], k1: float = 0.9, b: float = 0.4) -> None:
        counts = [Counter(words(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                self._postings[word].append((number, times / (times + k1 * (1 - b + b * length / mean))))
        self._rarity = {
            word: math.log(1 + (len(texts) - len(found) + 0.5) / (len(found) + 0.5)) for word, found in self._postings.items()
        }

    def search(self, query: str, most: int) -> list[int]:
        """Numbers of the best texts, best first; texts without any word of the query are not found."""
        scores: dict[int, float] = defaultdict(float)
        for word in words(query):
            for number, weight in self._postings.get(word, ()):
                scores[number] += self._rarity[word] * weight
        return heapq.nsmallest(most, scores, key=lambda number: (-scores[number], number))
