"""Instructions whose keeping can be checked by rule.

`orders` are for the tiny model and have one right answer. `instructions` are in words: `instruction_id_list` and `kwargs`
name the rules in the schema of IFEval (2311.07911), `answer` keeps all of them, and the flawed teacher keeps none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drumroll.data.split import Row, stream


def orders(split: str, seed: int, letters: str = "abcdefgh", most: int = 4) -> Iterator[Row]:
    """`say b 3 times=` → `bbb` and `caps cab=` → `CAB`. The flawed teacher says it once less, or copies the word."""

    def make(rng: random.Random) -> Row:
        word = "".join(rng.choice(letters) for _ in range(rng.randint(1, 2)))
        if rng.random() < 0.5:
            times = rng.randint(2, most)
            return {"prompt": f"say {word} {times} times=", "answer": word * times, "flawed": word * (times - 1)}
        word += rng.choice(letters)
        return {"prompt": f"caps {word}=", "answer": word.upper(), "flawed": word}

    return stream(make, split, seed)


@dataclass(frozen=True)
class _Rule:
    """One instruction: how it is said, how it is checked (id and arguments), and how a text is made to keep it."""

    id: str
    said: str
    kwargs: dict[str, Any]
    keep: Callable[[str], str]


TOPICS = (
    "the sea",
    "a red bicycle",
    "winter",
    "a small town",
    "bread",
    "the moon",
    "an old clock",
    "rain",
    "a garden",
    "a dog",
)
KEYWORDS = ("river", "bridge", "music", "window", "table", "silver")
ENDINGS = ("That is all.", "Good night.", "The end.", "Thank you for reading.")
PLAIN = "Well, here is something short that one could perhaps say about {topic}, if one were asked to."
"""Breaks every rule below: it has capitals and small letters, a comma, 'something', no keyword, mark, title or bullet."""


def _content(rng: random.Random) -> _Rule:
    word = rng.choice(KEYWORDS)
    few = rng.randint(13, 16)
    return rng.choice(
        (
            _Rule("keywords:existence", f"Use the word {word}.", {"keywords": [word]}, lambda text: f"{text} It has a {word}."),
            _Rule(
                "keywords:forbidden_words", "Do not use the word something.", {"forbidden_words": ["something"]},
                lambda text: text.replace("something", "what"),
            ),
            _Rule(
                "length_constraints:number_words", f"Use less than {few} words.", {"relation": "less than", "num_words": few},
                lambda text: f"Well, one could talk about {text.partition(' about ')[2].partition(',')[0]}.",
            ),
            _Rule("punctuation:no_comma", "Do not use any commas.", {}, lambda text: text.replace(",", "")),
        )
    )  # fmt: skip


def _form(rng: random.Random) -> _Rule:
    count, ending = rng.randint(2, 4), rng.choice(ENDINGS)
    return rng.choice(
        (
            _Rule("change_case:english_lowercase", "Use small letters only.", {}, str.lower),
            _Rule("change_case:english_capital", "Use capital letters only.", {}, str.upper),
            _Rule("startend:quotation", "Wrap the whole response in double quotation marks.", {}, lambda text: f'"{text}"'),
            _Rule("detectable_format:title", "Give it a title in double angular brackets, such as <<a title>>.", {},
                lambda text: f"<<Title>>\n{text}",
            ),
            _Rule(
                "detectable_format:number_bullet_lists", f"Write exactly {count} bullet points, each on a line that begins with *.",
                {"num_bullets": count}, lambda text: "\n".join([f"* {text}"] + ["* Yes."] * (count - 1)),
            ),
            _Rule("startend:end_checker", f"End with the exact phrase: {ending}", {"end_phrase": ending},
                lambda text: f"{text} {ending}",
            ),
        )
    )  # fmt: skip


def instructions(split: str, seed: int, most: int = 2) -> Iterator[Row]:
    """`Write about the sea. Do not use any commas.` with one rule, or with two (one of content and one of form)."""

    def make(rng: random.Random) -> Row:
        topic, both = rng.choice(TOPICS), [_content(rng), _form(rng)]
        rules = both if most > 1 and rng.random() < 0.5 else [rng.choice(both)]
        plain = PLAIN.format(topic=topic)
        answer = plain
        for rule in rules:
            answer = rule.keep(answer)
        return {
            "prompt": f"Write about {topic}. " + " ".join(rule.said for rule in rules),
            "instruction_id_list": [rule.id for rule in rules],
            "kwargs": [rule.kwargs for rule in rules],
            "answer": answer,
            "flawed": plain,
        }

    return stream(make, split, seed)
