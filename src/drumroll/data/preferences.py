"""Rows with preferences as groups of samples: a pair's two answers, or one rated answer; the good ones have reward 1.

A row that cannot be used is dropped, counted, and named once for each dataset and reason. Both answers of a pair are dropped
or neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from drumroll.batch import Batch, pack
from drumroll.config.preferences import PreferenceRows
from drumroll.data.drawing import Dropped, GivenRows, fitted, joined, rendering
from drumroll.data.held_out import HeldOut, read_held_out
from drumroll.data.preference_layouts import ASSISTANT, HUMAN, dialogue
from drumroll.data.render import Content, Renderer
from drumroll.data.runs import RECORDED
from drumroll.data.source import Reader
from drumroll.data.turns import Pieces, Turns, conversation, tools_of
from drumroll.errors import BadRow, DataError
from drumroll.sample import Group, Message, Owner, Prompt, Sample, Trace

Answer = tuple[str | Sequence[Message], float]


def reasons(config: PreferenceRows) -> dict[str, str]:
    """Why a row is dropped though nothing is wrong with it."""
    return {
        "equal": "both answers are the same, or have the same score",
        "empty": "an answer is empty",
        "long": f"an answer has no room in max_tokens: {config.max_tokens} or its prompt none in data.max_prompt_tokens: {config.data.max_prompt_tokens}",
    }


LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
"""Labels as they stand in files; those of CSV are texts."""


class PreferenceReader:
    """Makes groups of the rows of a dataset."""

    def __init__(self, config: PreferenceRows) -> None:
        self.config = config
        self.pairs = config.takes_pairs()

    def group(self, reader: Reader, prompt: Prompt, draw: int) -> Group:
        """The answers of a row: chosen before rejected."""
        answers = self._answers(reader, prompt)
        found = [
            (self._trace(fitted(tokens, self.config.data, reader), pieces, reader), reward)
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
        for answer, _ in answers:
            content, turns = self._turns(reader, prompt, answer)
            if not turns[0].get("tool_calls") and not str(turns[0].get("content") or "").strip():
                raise Dropped("empty")
            with rendering(reader):
                tokens, pieces = self._tokens(reader, prompt, content, turns)
            if not tokens:
                raise BadRow(f"{reader.name}: a row has an empty prompt.")
            yield tokens, pieces

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

    def _turns(self, reader: Reader, prompt: Prompt, answer: Any) -> tuple[Content, list[Message]]:
        """The prompt, and the messages of an answer. In a chat, texts in the layout of HH are conversations."""
        content = prompt.content
        if isinstance(content, str) and _is_dialogue(reader, content):
            said = dialogue(content)
            begun = said[-1]["role"] == "assistant"
            if isinstance(answer, str):
                opening = "" if begun or answer.lstrip().startswith(ASSISTANT.strip()) else ASSISTANT
                answer = dialogue(f"{content}{opening}{answer}")[len(said) - begun :]
            content = tuple(said[:-1] if begun else said)
        given = isinstance(answer, (str, Mapping, Sequence))
        turns = conversation(answer, f"{reader.name}: messages of an answer") if given else []
        if not turns or turns[0]["role"] != "assistant":
            raise BadRow(
                f"{reader.name}: an answer must be a text, or messages of which the assistant's is first, got {answer!r:.80}."
            )
        return content, turns

    def _tokens(self, reader: Reader, prompt: Prompt, content: Content, turns: list[Message]) -> tuple[list[int], Pieces]:
        """Tokens of the prompt, and of an answer: the assistant's turns, and what was said between them."""
        renderer, chat, system = reader.renderer, reader.config.chat, reader.config.system
        said = renderer.turns(content, chat, system)
        if said is None:
            if len(turns) > 1 or turns[0].get("tool_calls"):
                raise BadRow(
                    f"{reader.name}: an answer of several turns, or with calls of tools, needs a chat template, and not chat: false."
                )
            return list(renderer.prompt(content, chat=chat)), [(Owner.POLICY, renderer.turn(turns[0]["content"]))]
        chosen = [False] * len(said) + [turn["role"] == "assistant" for turn in turns]
        tools = tools_of(prompt.columns, f"{reader.name}: the column 'tools'")
        first, *more = Turns(renderer, [*said, *turns], tools).traces(chosen)
        if more:
            raise BadRow(
                f"{reader.name}: the chat template of {renderer.name} rewrites earlier turns (for example removes their thoughts), so an "
                "answer of several turns is not one sequence of tokens; use answers of one turn, or another template."
            )
        return first[0][1], first[1:]

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
            f"{name}: margin: {kind} needs numbers in {' and '.join(columns)}, got {', '.join(repr(row.get(c)) for c in columns):.60}; "
            f"the row has {', '.join(sorted(row))}."
        ) from None
    margin = found[0] if kind == "column" else found[0] - found[1]
    if not math.isfinite(margin):
        raise BadRow(f"{name}: margin: {kind} gives {margin} for a row.")
    return margin


def _is_dialogue(reader: Reader, text: str) -> bool:
    return reader.is_chat() and text.lstrip().startswith(HUMAN.strip())


def packed(groups: Sequence[Group], *, pairs: bool) -> Batch:
    """Groups as a batch whose units are pairs, or samples."""
    batch = pack(groups)
    return batch.with_(unit_of=batch.group_of if pairs else torch.arange(batch.num_samples))


def mismatched(groups: Sequence[Group], limit: int) -> list[Group]:
    """Every prompt with an answer of the row before it in the batch, if its prompt is another: what KTO estimates the KL on."""
    found: list[Group] = []
    for own, other in zip(groups, [*groups[-1:], *groups[:-1]], strict=True):
        for i, sample in enumerate(own.samples if own.prompt.id != other.prompt.id else ()):
            prompt = _split(sample.traces[0])[0]
            answer = _split(other.samples[i % len(other.samples)].traces[0])[1]
            trace = joined(prompt[: limit - 1], answer, limit)
            found.append(Group(own.prompt, len(found), [Sample(own.prompt, len(found), 0, traces=[trace], reward=0.0)]))
    return found


def _split(trace: Trace) -> tuple[list[int], Pieces]:
    begin = trace.owners.index(Owner.POLICY)
    return trace.tokens[:begin], [(o, [t]) for o, t in zip(trace.owners[begin:], trace.tokens[begin:], strict=True)]


class Preferences(GivenRows):
    """Draws batches of preferences, each row once in an epoch."""

    def __init__(self, config: PreferenceRows, renderer: Renderer, notice: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(config.data, config.seed, config.batch, renderer, notice)
        self.config, self.reasons = config, reasons(config)
        self.reader = PreferenceReader(config)

    @override
    def group(self, reader: Reader, prompt: Prompt, draw: int) -> Group:
        return self.reader.group(reader, prompt, draw)


def held_out(config: PreferenceRows, renderer: Renderer) -> dict[str, HeldOut]:
    """The held-out sets by name."""
    return read_held_out(config.held_out, renderer, PreferenceReader(config).group, reasons(config))
