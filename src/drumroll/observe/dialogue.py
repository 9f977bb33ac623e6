"""Turns the tokens of recorded samples back into dialogues: system and user turns, observations, tool results, the policy's turns.

The texts come from the traces, so a dialogue shows what the model read and wrote. Turns are told apart by special tokens
alone, which only a chat template writes: text in a prompt or an observation cannot pass for a turn of another role.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

from drumroll.config.roles import BUILT_IN_MODELS
from drumroll.models.tiny import SHIPPED
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Owner

TOKENIZER = "tokenizer.json"
OPENING = frozenset({"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>", "<|turn>"})
"""Special tokens that a role's name follows."""
NAMED = frozenset({"<|end_header_id|>", "<|message|>"})
"""Special tokens that end the role's name; with other templates a line end does."""
ROLES = {"model": "assistant", "ipython": "tool", "developer": "system"}
"""Names that some templates have for a role."""
SPEAKERS = {Owner.PROMPT: "user", Owner.POLICY: "assistant", Owner.ENVIRONMENT: "environment"}
"""The role of text that no template divides into turns, by its owner."""


Traces = Sequence[Mapping[str, Sequence[int]]]
"""Recorded traces: `tokens` and their `owners`."""


class Message(TypedDict):
    """A turn of a dialogue."""

    role: str
    content: str


class Decoder:
    """A tokenizer that only decodes; it needs neither torch nor transformers."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self.special = {i: str(t.content) for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    def __call__(self, tokens: Sequence[int]) -> str:
        """Decode tokens, without the special ones."""
        return self._tokenizer.decode([t for t in tokens if t not in self.special], skip_special_tokens=False)


def open_decoder(run: RunReader) -> Decoder | None:
    """Find the tokenizer of a run's policy: in the run, where the config says, or in the hub's cache; None if it is elsewhere."""
    roles = run.settings.get("roles")
    actor = roles.get("actor") if isinstance(roles, Mapping) else None
    name = str((actor.get("model") if isinstance(actor, Mapping) else None) or run.settings.get("model"))
    places = [run.model_path, SHIPPED.get(name, SHIPPED["tiny"]) if name in BUILT_IN_MODELS else Path(name).expanduser()]
    found = next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)
    if found is None and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, TOKENIZER)
        except HFValidationError:
            return None
        found = Path(cached) if isinstance(cached, str) else None
    return None if found is None else Decoder(found)


def sample_dialogue(row: Mapping[str, Any], traces: Traces | None, decoder: Decoder | None) -> list[Message]:
    """Return the dialogue of a recorded sample: that of its tokens where they can be decoded, else prompt and completion."""
    if decoder and traces and row["turns"]:
        return decoded_dialogue(traces, decoder)
    prompt: list[Message] = []
    if decoder and traces:
        tokens = zip(traces[0]["tokens"], traces[0]["owners"], strict=True)
        prompt = list(_turns([token for token, owner in tokens if owner == Owner.PROMPT], Owner.PROMPT, decoder))
    return [*(prompt or prompt_messages(row["prompt"])), {"role": "assistant", "content": row["completion"] or ""}]


def prompt_messages(prompt: str) -> list[Message]:
    """Return the messages of a recorded prompt; a prompt in plain text is a user's."""
    try:
        parts = [(message["role"], message["content"]) for message in json.loads(prompt)]
    except (ValueError, TypeError, KeyError, RecursionError):
        parts = []
    texts = [(str(role), text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)) for role, text in parts]
    return [{"role": role, "content": text} for role, text in texts] or [{"role": "user", "content": prompt}]


def decoded_dialogue(traces: Traces, decoder: Decoder) -> list[Message]:
    """Return the turns of all traces. A further trace begins where it departs from those before it."""
    messages: list[Message] = []
    for number, trace in enumerate(traces):
        tokens, owners = trace["tokens"], trace["owners"]
        shared = max((_shared(tokens, earlier["tokens"], decoder) for earlier in traces[:number]), default=0)
        if number:
            text = f"trace {number + 1} of {len(traces)}, after {shared} tokens that it shares with an earlier one"
            messages.append({"role": "trace", "content": text})
        for owner, part in groupby(zip(owners[shared:], tokens[shared:], strict=True), key=itemgetter(0)):
            messages += _turns([token for _, token in part], Owner(owner), decoder)
    return messages


def _shared(one: Sequence[int], other: Sequence[int], decoder: Decoder) -> int:
    """How many tokens two sequences share from the start; whole turns where a template marks them."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    turns = (i for i in range(min(same, len(one) - 1), -1, -1) if decoder.special.get(one[i]) in OPENING)
    return next(turns, same)


def _turns(tokens: Sequence[int], owner: Owner, decoder: Decoder) -> Iterator[Message]:
    """Yield the turns in tokens of one owner. What the policy wrote is its own turn, whatever is in it."""
    if owner is Owner.POLICY:
        yield {"role": "assistant", "content": decoder(tokens)}
        return
    role, before, named = SPEAKERS[owner], "", False
    for special, group in groupby(tokens, key=lambda token: decoder.special.get(token, "")):
        if special:
            before = special
            continue
        text = decoder(list(group))
        if before in OPENING:
            name, newline, text = text.partition("\n")
            role, named = ROLES.get(name.strip(), name.strip()), not newline
        elif before in NAMED and named:
            text, named = text.lstrip("\n"), False
        if text.strip():
            yield {"role": role, "content": text}
