"""Control tokens of a tokenizer, and the encoding that keeps content from spelling them.

A chat template writes control tokens such as `<|im_end|>` as text, so a completion, row or observation with the same text would end
a turn. Content is therefore *escaped* before it meets a template: each spelling of a control token becomes a stand-in. In a rendered
text every spelling that is left is the template's own. Texts without stand-ins are encoded as the tokenizer does it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import secrets
from collections.abc import Mapping
from typing import Any

BRACKETED = re.compile(r"<[|｜][^<>]*[|｜]>")
"""Tokens of this form control the conversation, even where the tokenizer does not call them special."""
STAND_IN = f"spelled{secrets.token_hex(8)}x"
"""Begins a stand-in; nobody who writes content knows it, and no result depends on it."""


class Controls:
    """Escapes and encodes texts for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokens: dict[str, tuple[int, Any]] = {
            t.content: (i, t) for i, t in added.items() if t.special or BRACKETED.fullmatch(t.content)
        }
        self._spellings: list[str] = sorted(self._tokens, key=len, reverse=True)
        self._ids = {i for i, _ in self._tokens.values()} - {getattr(tokenizer, "unk_token_id", None)}
        self._spelled = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._overlapping = re.compile(f"(?=({self._spelled.pattern}))")
        self._stand_in = re.compile(rf"{STAND_IN}(\d+)x")

    def escape(self, value: Any) -> Any:
        """The content with a stand-in for each spelling of a control token; mappings and lists are escaped throughout."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: f"{STAND_IN}{self._spellings.index(found[0])}x", value)
        if isinstance(value, Mapping):
            return {key: self.escape(each) for key, each in value.items()}
        return [self.escape(each) for each in value] if isinstance(value, (list, tuple)) else value

    def content(self, text: str) -> list[int]:
        """Tokens of a text that is content throughout."""
        return self.rendered(self.escape(text))

    def rendered(self, text: str) -> list[int]:
        """Tokens of a template's text with escaped contents."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if STAND_IN not in text and sum(t in self._ids for t in tokens) <= len(self._spelled.findall(text)):
            return tokens
        pieces, tokens = re.split(f"({self._spelled.pattern})", text), []
        for i, piece in enumerate(pieces):
            if i % 2:
                tokens.append(self._tokens[piece][0])
                continue
            if i and self._tokens[pieces[i - 1]][1].rstrip:
                piece = piece.lstrip()
            if i + 1 < len(pieces) and self._tokens[pieces[i + 1]][1].lstrip:
                piece = piece.rstrip()
            tokens += self._plain(self._stand_in.sub(lambda found: self._spellings[int(found[1])], piece))
        return tokens

    def pair(self, first: str, second: str) -> list[int]:
        """Tokens of two contents with what an encoder model puts around them."""
        if not self._spelled.search(f"{first} {second}"):
            return list(self.tokenizer(first, second)["input_ids"])
        return list(self._splitting(first, second)["input_ids"])

    def _plain(self, text: str) -> list[int]:
        """Tokens of a text, none of them a control token."""
        tokens = self._splitting.encode(text, add_special_tokens=False)
        if self._ids.isdisjoint(tokens):
            return tokens
        cuts = [0, *(found.start() + 1 for found in self._overlapping.finditer(text)), len(text)]  # within each spelling
        parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
        return [token for part in parts for token in self.tokenizer.encode(part, add_special_tokens=False)]

    @functools.cached_property
    def _splitting(self) -> Any:
        """The tokenizer, made to split special tokens: a copy, because that is a state that other threads would see."""
        splitting = copy.deepcopy(self.tokenizer)
        splitting.split_special_tokens = True
        return splitting
