"""Rows with preferences as groups of samples: a pair's two answers, or one rated answer; the good ones have reward 1.

A row that cannot be used is dropped, counted, and named once for each dataset and reason. Answers are cut to the same
length, and both are dropped or neither.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drumroll.batch import Batch, pack
from drumroll.config.preferences import PreferenceRows
from drumroll.data.conversation import Conversation
from drumroll.data.preference_layouts import HUMAN, dialogue
from drumroll.data.render import Content, Renderer
from drumroll.data.rows import is_local, place, read
from drumroll.data.runs import RECORDED
from drumroll.data.source import PromptSource, Reader, no_columns
from drumroll.errors import BadRow, DataError
from drumroll.sample import Group, Message, Owner, Prompt, Sample, Trace

Pieces = list[tuple[Owner, list[int]]]
Answer = tuple[str | Sequence[Message], float]
REASONS = {
    "equal": "both answers are the same",
    "empty": "an answer is empty",
    "long": "an answer does not fit into max_tokens",
}
"""Why a row is dropped though nothing is wrong with it."""

LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
"""Labels as they stand in files; those of CSV are texts."""


class Dropped(Exception):
    """A row of which nothing can be learned; the argument is a key of `REASONS`."""


class PreferenceReader:
    """Makes groups of the rows of a dataset."""

    def __init__(self, config: PreferenceRows) -> None:
        self.config = config
        self.pairs = config.takes_pairs()

    def group(self, reader: Reader, prompt: Prompt, draw: int) -> Group:
        """The answers of a row: chosen before rejected."""
        answers = self._answers(reader, prompt)
        found = [
            (self._trace(self._fitted(tokens, reader), pieces, reader), reward)
            for (tokens, pieces), (_, reward) in zip(self._rendered(reader, prompt, answers), answers, strict=True)
        ]
        if len(found) == 2 and found[0][0].tokens == found[1][0].tokens:
            raise Dropped("equal")
        samples = [Sample(prompt, draw, i, traces=[trace], reward=reward) for i, (trace, reward) in enumerate(found)]
        if (kind := self.config.margin_kind()) is not None:
            samples[0].rewards["margin"] = margin_of(prompt.columns, kind, reader.name)
        return Group(prompt, draw, samples)

    def _rendered(self, reader: Reader, prompt: Prompt, answers: list[Answer]) -> Iterator[tuple[list[int], Pieces]]:
        """Tokens of the prompt and of each answer: as a run recorded them if its tokenizer is this one, else of the texts."""
        recorded, decode = prompt.columns.get(RECORDED), reader.renderer.tokenizer.decode
        if recorded and all(
            decode(own, skip_special_tokens=True) == text for (_, own), (text, _) in zip(recorded, answers, strict=True)
        ):
            yield from ((list(before), [(Owner.POLICY, list(own))]) for before, own in recorded)
            return
        content = self._content(reader, prompt)
        tokens = list(reader.renderer.prompt(content, chat=reader.config.chat, system=reader.config.system))
        for answer, _ in answers:
            yield tokens, self._pieces(reader, prompt, content, answer)

    def _content(self, reader: Reader, prompt: Prompt) -> Content:
        """The prompt. A text in the layout of HH is a conversation if it is rendered as a chat."""
        content = prompt.content
        return tuple(dialogue(content)[:-1]) if isinstance(content, str) and _is_dialogue(reader, content) else content

    def _answers(self, reader: Reader, prompt: Prompt) -> list[Answer]:
        row = prompt.columns
        if row.get("chosen") is not None and row.get("rejected") is not None:
            return [(row["chosen"], 1.0), (row["rejected"], 0.0)]
        completion, label = row.get(reader.config.completion), row.get("label")
        if self.pairs:
            other = " (loss: kto takes rows with completion and label)" if label is not None else ""
            raise BadRow(
                f"{reader.name}: a row lacks 'chosen' or 'rejected', which {self.config.comparer()} compares{other}; "
                f"it has {', '.join(sorted(row))}."
            )
        rating = LABELS.get(str(label).lower())
        if completion is None or rating is None:
            raise BadRow(
                f"{reader.name}: a row needs 'completion' with a 'label' of true or false, or 'chosen' and 'rejected'; "
                f"its label is {label!r:.40}, it has {', '.join(sorted(row))}."
            )
        return [(completion, rating)]

    def _pieces(self, reader: Reader, prompt: Prompt, content: Content, answer: Any) -> Pieces:
        """The tokens of an answer: the assistant's turns, and what was said between them."""
        chat, system, renderer = reader.config.chat, reader.config.system, reader.renderer
        if isinstance(answer, str) and isinstance(prompt.content, str) and _is_dialogue(reader, prompt.content):
            answer = dialogue(prompt.content + answer)[len(content) :]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        given = answer if isinstance(answer, Sequence) else ()
        turns = [dict(turn) for turn in given if isinstance(turn, Mapping) and isinstance(turn.get("content"), str)]
        if len(turns) < len(given) or not turns or turns[0]["role"] != "assistant":
            raise BadRow(
                f"{reader.name}: an answer must be a text, or messages of which the assistant's is first, got {answer!r:.80}."
            )
        if not turns[0]["content"].strip():
            raise Dropped("empty")
        if len(turns) == 1:
            return [(Owner.POLICY, renderer.answer(content, turns[0]["content"], chat=chat, system=system))]
        return _talk(
            Conversation(renderer, content if isinstance(content, str) else list(content), chat=chat, system=system), turns
        )

    def _fitted(self, tokens: list[int], reader: Reader) -> list[int]:
        """The prompt, as `data.overlong` treats one that is too long."""
        data = self.config.data
        if len(tokens) <= data.max_prompt_tokens:
            return tokens
        if data.overlong == "fail":
            raise DataError(
                f"{reader.name}: a prompt has {len(tokens)} tokens, more than data.max_prompt_tokens={data.max_prompt_tokens}; "
                "set data.overlong to drop or truncate."
            )
        if data.overlong == "drop":
            raise Dropped("long")
        return tokens[-data.max_prompt_tokens :]

    def _trace(self, prompt: list[int], pieces: Pieces, reader: Reader) -> Trace:
        limit, length = self.config.max_tokens, len(prompt) + sum(len(tokens) for _, tokens in pieces)
        if length > limit and self.config.overlong != "truncate":
            if self.config.overlong == "drop":
                raise Dropped("long")
            raise DataError(
                f"{reader.name}: an answer and its prompt have {length} tokens, more than max_tokens={limit}; set overlong to truncate or drop."
            )
        trace = joined(prompt, pieces, limit)
        if Owner.POLICY not in trace.owners:
            raise Dropped("long")
        return trace


def margin_of(row: Mapping[str, Any], kind: str, name: str) -> float:
    """By how much the chosen answer of a row should score higher: its column `margin`, or the difference of its scores."""
    columns = ("margin",) if kind == "column" else ("score_chosen", "score_rejected")
    try:
        found = [float(row[column]) for column in columns]
    except (KeyError, TypeError, ValueError):
        raise BadRow(
            f"{name}: margin: {kind} needs numbers in {' and '.join(columns)}; a row has {', '.join(sorted(row))}."
        ) from None
    margin = found[0] if kind == "column" else found[0] - found[1]
    if not math.isfinite(margin):
        raise BadRow(f"{name}: margin: {kind} gives {margin} for a row.")
    return margin


def _is_dialogue(reader: Reader, text: str) -> bool:
    chat = reader.renderer.has_template if reader.config.chat is None else reader.config.chat
    return (chat or reader.config.system is not None) and text.lstrip().startswith(HUMAN.strip())


def _where(reader: Reader) -> str:
    """The place of the last row that was read."""
    return place(reader.name, reader.config, reader.at) if is_local(reader.config) else f"row {reader.at + 1}"


def _talk(talk: Conversation, turns: Sequence[Message]) -> Pieces:
    """The pieces of an answer of several turns."""
    talk.prompt()
    pieces: Pieces = [(Owner.POLICY, talk.renderer.turn(turns[0]["content"]))]
    said, heard = turns[0]["content"], list[Message]()
    for turn in turns[1:]:
        if turn["role"] != "assistant":
            heard.append(turn)
            continue
        pieces.append((Owner.ENVIRONMENT, talk.follow(said, heard, pieces[-1][1][-1])))
        pieces.append((Owner.POLICY, talk.renderer.turn(turn["content"])))
        said, heard = turn["content"], []
    return pieces


def joined(prompt: list[int], pieces: Pieces, limit: int) -> Trace:
    """Prompt and answer, cut to `limit` tokens."""
    trace = Trace()
    trace.extend(prompt[:limit], Owner.PROMPT)
    for owner, piece in pieces:
        tokens = piece[: limit - len(trace.tokens)]
        if owner is Owner.POLICY:
            trace.extend(tokens, owner, [0.0] * len(tokens), [0] * len(tokens))
        else:
            trace.extend(tokens, owner)
    return trace


def packed(groups: Sequence[Group], *, pairs: bool) -> Batch:
    """Groups as a batch whose units are pairs, or samples."""
    batch = pack(groups)
    return batch.with_(unit_of=batch.group_of if pairs else torch.arange(batch.num_samples))


def mismatched(groups: Sequence[Group], limit: int) -> list[Group]:
    """Every prompt with the answer of the sample before it in the batch: what KTO estimates the KL on."""
    samples = [sample for group in groups for sample in group.samples]
    found = []
    for i, (own, other) in enumerate(zip(samples, [*samples[-1:], *samples[:-1]], strict=True)):
        prompt, answer = _split(own.traces[0])[0], _split(other.traces[0])[1]
        trace = joined(prompt[: limit - 1], answer, limit)
        found.append(Group(own.prompt, i, [Sample(own.prompt, i, 0, traces=[trace], reward=0.0)]))
    return found


def _split(trace: Trace) -> tuple[list[int], Pieces]:
    begin = trace.owners.index(Owner.POLICY)
    return trace.tokens[:begin], [(o, [t]) for o, t in zip(trace.owners[begin:], trace.tokens[begin:], strict=True)]


class Preferences:
    """Draws batches of preferences, each row once in an epoch."""

    def __init__(self, config: PreferenceRows, renderer: Renderer, notice: Callable[[str], None] = lambda text: None) -> None:
        self.config = config
        self.pairs = config.takes_pairs()
        unlimited = config.data.model_copy(update={"max_prompt_tokens": 2**62})  # the reader drops, so that it can count
        self.source = PromptSource(unlimited, config.seed, renderer, tolerant=True)
        self.reader = PreferenceReader(config)
        self.dropped: Counter[str] = Counter()
        self._notice = notice
        self._told: set[tuple[str, str]] = set()
        self._sound = False

    def groups(self) -> list[Group]:
        """The rows of the next batch: fewer at the end of the last epoch, none after it."""
        found: list[Group] = []
        useless = 0
        while len(found) < self.config.batch and not self.source.exhausted():
            group = self._draw(len(found))
            useless = 0 if group else useless + 1
            if group is not None:
                found.append(group)
            elif useless >= 1000:
                raise DataError(f"1000 rows in a row cannot be used: {dict(self.dropped)}.")
        return found

    def _draw(self, index: int) -> Group | None:
        prompt, reader = self.source.draw_with_reader()
        try:
            if prompt.defect:
                raise BadRow(prompt.defect)
            group = self.reader.group(reader, prompt, index)
        except Dropped as dropped:
            return self._drop(reader, str(dropped), REASONS[str(dropped)])
        except BadRow as error:
            if not self._sound:
                raise
            return self._drop(reader, "bad", str(error))
        self._sound = True
        return group

    def _drop(self, reader: Reader, reason: str, text: str) -> None:
        """Count a row; name the first of a dataset."""
        self.dropped[reason] += 1
        if (reader.name, reason) not in self._told:
            self._told.add((reader.name, reason))
            self._notice(f"{reader.name}: {_where(reader)} is dropped, because {text}; data/dropped/{reason} counts them.")

    def exhausted(self) -> bool:
        """Whether the epochs are over."""
        return self.source.exhausted()

    def metrics(self) -> dict[str, float]:
        """Rows dropped so far by reason, and passes over the largest finite dataset."""
        epoch = {name: value for name, value in self.source.metrics().items() if name == "data/epoch"}
        return epoch | {f"data/dropped/{reason}": float(count) for reason, count in sorted(self.dropped.items())}

    def state(self) -> dict[str, Any]:
        """The place in the row order, and the rows dropped before it."""
        return {**self.source.state(), "dropped": dict(self.dropped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a place in the row order."""
        self.source.restore(state)
        self.dropped = Counter(state.get("dropped", {}))
        self._sound = True


@dataclass
class HeldOut:
    """The usable rows of a held-out set, and what was dropped in words."""

    groups: list[Group]
    note: str = ""


def held_out(config: PreferenceRows, renderer: Renderer) -> dict[str, HeldOut]:
    """The held-out sets by name; a set without a usable row is refused."""
    return {
        name: _held_out(config, Reader(f"held_out.{name}", each, renderer, no_columns))
        for name, each in config.held_out.items()
    }


def _held_out(config: PreferenceRows, own: Reader) -> HeldOut:
    reader, found, first, count = PreferenceReader(config), HeldOut([]), "", 0
    for number, row in enumerate(read(own.name, own.config, seed=0)):
        try:
            found.groups.append(reader.group(own, own.prompt(row, number), number))
        except Dropped as dropped:
            first, count = first or f"{_where(own)}, because {REASONS[str(dropped)]}", count + 1
    if not found.groups:
        raise DataError(f"{own.name} has no row that can be used; the first is dropped: {first}.")
    if count:
        found.note = f"{own.name}: {count} rows are dropped, the first of them {first}."
    return found
