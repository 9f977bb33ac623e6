"""Search and answer: a question over a small made-up corpus, whose answer takes one or more look-ups to find.

Every fact is invented from a seed, so nothing can be known by heart: people work for firms, firms sit in towns, towns lie
in lands. `hops` is how many facts an answer takes.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.bm25 import BM25
from drumroll.envs.episode import THOUGHT, Episode, action_in, draw, require

SEARCH = re.compile(r"<search>(.*?)(?:</search>|\Z)", re.DOTALL | re.IGNORECASE)
ACTION = re.compile(r"(search|answer)\s*\[(.*)\]", re.DOTALL | re.IGNORECASE)
HOW = "Write <search>words</search> to look something up, or <answer>name</answer> to answer with a name."

LINKS = ("works for", "has its seat in", "lies in")
QUESTIONS = ("Whom does {} work for?", "In which town is the firm of {}?", "In which land is the firm of {}?")


@dataclass(frozen=True)
class Corpus:
    """Documents, and the chain of facts of every person: person, firm, town, land."""

    documents: tuple[str, ...]
    chains: tuple[tuple[str, str, str, str], ...]
    index: BM25


@functools.lru_cache(maxsize=4)
def corpus(seed: int, people: int) -> Corpus:
    """A small world."""
    rng = random.Random(f"lookup/{seed}")
    used: set[str] = set()
    names = [[_name(rng, used) for _ in range(count)] for count in (people, people // 2 + 1, people // 6 + 1, 8)]
    above = [{name: rng.choice(higher) for name in lower} for lower, higher in itertools.pairwise(names)]
    documents = [
        f"{name} {link} {facts[name]}. {name} is {rng.randint(20, 90)} years old."
        for facts, link in zip(above, LINKS, strict=True)
        for name in facts
    ]
    rng.shuffle(documents)
    chains = []
    for person in names[0]:
        firm = above[0][person]
        town = above[1][firm]
        chains.append((person, firm, town, above[2][town]))
    return Corpus(tuple(documents), tuple(chains), BM25(documents))


def _name(rng: random.Random, used: set[str]) -> str:
    """A new name of three syllables."""
    while True:
        name = "".join(rng.choice("bdfgklmnprtv") + rng.choice("aeiou") for _ in range(3)).capitalize()
        if name not in used:
            used.add(name)
            return name


@ENVIRONMENTS.register("lookup", runs="inline")
class Lookup(Episode):
    """`people` in the corpus, its seed `world`, `hops` (1 to 3) of a question, `hits` shown for a search."""

    name = "lookup"

    def __init__(
        self,
        people: int = 120,
        world: int = 0,
        hops: int = 2,
        hits: int = 3,
        style: str = "words",
        max_turns: int = 8,
        split: str = "train",
    ) -> None:
        super().__init__(style, split, max_turns)
        require(self.name, 1 <= hops <= 3, f"hops must be 1, 2 or 3, got {hops}")
        require(self.name, people >= 10 and hits >= 1, f"people must be at least 10 and hits 1, got {people} and {hits}")
        self.hops, self.hits = hops, hits
        self._corpus = corpus(world, people)
        self._chain: tuple[str, ...] = ()
        self._seen = self._read = ""

    def reset(self, seed: int, instance: int | None = None, split: str | None = None, **row: Any) -> str:
        """Begin with a question."""
        self.begin(seed)
        number = seed if instance is None else instance
        self._chain = draw(self.name, number, split or self.split, lambda rng: rng.choice(self._corpus.chains), lambda c: c[0])
        self._seen = self._read = ""
        question = QUESTIONS[self.hops - 1].format(self._chain[0])
        return f"{question}\n" if self.style == "compact" else f"{question}\n{HOW}"

    def step(self, text: str) -> Step:
        """Look up, or answer."""
        text = THOUGHT.sub("", text)
        tagged = SEARCH.search(text)
        if tagged and "<answer>" not in text.lower():
            return self._look_up(tagged[1].strip())
        given = action_in(text)
        form = ACTION.fullmatch(given)
        if form and form[1].lower() == "search":
            return self._look_up(form[2].strip())
        given = form[2].strip() if form else given
        if not given.isalpha():
            said = "\n?\n" if self.style == "compact" else f"That is neither a search nor a name. {HOW}"
            return self.unread(said, self._seen)
        right = given.lower() == self._answer().lower()
        said = "Right." if right else f"Wrong: it is {self._answer()}."
        return self.answered(said, effective=True, state=f"answered {given}", reward=float(right), over=True, success=right)

    def _look_up(self, words: str) -> Step:
        found = [self._corpus.documents[number] for number in self._corpus.index.search(words, self.hits)]
        before, self._seen = self._seen, "\n".join(found) or "Nothing was found."
        self._read += self._seen
        said = f"\n{self._seen}\n" if self.style == "compact" else self._seen
        return self.answered(said, effective=self._seen != before, state=self._seen)

    def _answer(self) -> str:
        return self._chain[self.hops]

    def oracle(self) -> str:
        """Follow the chain: look up the next name that was not read about yet, then answer."""
        for name, link in zip(self._chain[: self.hops], LINKS, strict=False):
            if f"{name} {link}" not in self._read:
                return f"<search>{name}</search>"
        return f"<answer>{self._answer()}</answer>"

    def random_action(self) -> str:
        """Look up or answer any name of the corpus."""
        verb, name = self.rng.choice(("search", "answer")), self.rng.choice(self.rng.choice(self._corpus.chains))
        return f"<{verb}>{name}</{verb}>"
