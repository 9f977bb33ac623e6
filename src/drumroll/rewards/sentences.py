"""Sentences and words of English text, counted by rules that agree nearly always with trained splitters. Linear in the text."""

from __future__ import annotations

import re
from itertools import pairwise

OPENING, CLOSING = "\"'“‘([{*_", "\"'”’)]}*_"
ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "jr",
        "sr",
        "vs",
        "inc",
        "ltd",
        "co",
        "corp",
        "gen",
        "sen",
        "rep",
        "lt",
        "col",
        "ave",
        "jan",
        "feb",
        "aug",
        "sept",
        "sep",
        "oct",
        "nov",
        "dec",
        "a.m",
        "p.m",
        "u.s",
        "u.k",
        "u.n",
        "d.c",
        "ph.d",
    ]
)
STARTERS = frozenset(
    [
        "the",
        "it",
        "he",
        "they",
        "this",
        "these",
        "but",
        "so",
        "if",
        "i",
        "however",
        "in",
        "when",
        "while",
        "there",
        "yes",
        "some",
        "many",
        "most",
        "although",
        "since",
        "even",
        "still",
        "here",
        "such",
        "both",
        "though",
        "thus",
        "therefore",
        "meanwhile",
        "instead",
        "finally",
    ]
)
"""Words that, capitalised, start a sentence even after an abbreviation or an ellipsis."""
CONTRACTION = re.compile(r"(?<=\w)'(?:S|M|D|LL|RE|VE)$|(?<=\w)N'T$")
SEPARATORS = re.compile(r"[\s,;:@#$%&?!()\[\]{}<>\"“”«»]+|--+|\.\.\.")


def count_sentences(text: str) -> int:
    """How many sentences: one more than the ends of sentences that something follows."""
    words = text.split()
    return sum(_ends(word, following) for word, following in pairwise(words)) + 1 if words else 0


def _ends(word: str, following: str) -> bool:
    """Whether a word with its punctuation ends a sentence, by what follows."""
    word = word.rstrip(CLOSING)
    if not word.endswith("."):
        return word.endswith(("?", "!"))
    stem, following = word[:-1].lstrip(OPENING).lower(), following.strip(OPENING + CLOSING + ",")
    capital = following[:1].isupper()
    if stem.replace(",", "").replace(".", "").isdigit():
        return capital
    if word.endswith("..") or stem in ABBREVIATIONS or (len(stem) == 1 and stem.isalpha()):
        return capital and following.lower() in STARTERS
    return True


def capital_words(text: str) -> int:
    """How many words are in capital letters only; the parts of a contraction count apart."""
    count = 0
    for word in SEPARATORS.split(text):
        if word.isupper():
            count += 1 + (CONTRACTION.search(word) is not None) + (word == "CANNOT")
    return count
