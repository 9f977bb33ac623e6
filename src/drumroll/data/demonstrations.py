"""Rows to imitate as groups of one sample each: prompts with answers, conversations, and samples of a run.

The tokens that are trained belong to the policy. A row whose template rewrites earlier turns has several traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from drumroll.batch import Batch, pack
from drumroll.config.sft import SFTConfig
from drumroll.data.drawing import Dropped, GivenRows, fitted, joined, rendering, where
from drumroll.data.held_out import read_held_out
from drumroll.data.render import Renderer
from drumroll.data.runs import recorded_traces
from drumroll.data.source import MORE, Reader
from drumroll.data.turns import ALL, Pieces, Turns, chosen_turns, conversation, tools_of
from drumroll.errors import BadRow, DataError
from drumroll.sample import Group, Owner, Prompt, Sample


class Demonstrations(GivenRows):
    """Draws batches of rows to imitate."""

    def __init__(self, config: SFTConfig, renderer: Renderer, notice: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(config.data, config.seed, config.batch, renderer, notice, answers=True)
        self.config, self.truncated = config, 0
        chosen = "train_column" if config.train_column else f"train_on: {config.train_on}".replace("'", "")
        self.reasons = {
            "long": f"it has no room in max_tokens: {config.max_tokens} or its prompt none in data.max_prompt_tokens: {config.data.max_prompt_tokens}",
            "untrained": f"{chosen} chooses none of its turns",
        }
        self.held_out = read_held_out(config.held_out, renderer, self.group, self.reasons, answers=True)
        self.truncated = 0  # of the training rows

    def batch(self) -> Batch | None:
        """The next rows, packed; None after the last epoch."""
        groups = self.groups()
        return pack(groups) if groups else None

    @override
    def group(self, reader: Reader, prompt: Prompt, draw: int) -> Group:
        traces = self._rendered(reader, prompt)
        if not any(owner is Owner.POLICY for pieces in traces for owner, _ in pieces):
            raise Dropped("untrained")
        if traces[0][0][0] is Owner.PROMPT:
            traces[0][0] = (Owner.PROMPT, fitted(traces[0][0][1], self.config.data, reader))
        if self.config.train_on == ALL:
            traces = [_all_trained(pieces) for pieces in traces]
        self._measure(max(sum(len(tokens) for _, tokens in pieces) for pieces in traces), reader)
        fitting = [joined([], pieces, self.config.max_tokens) for pieces in traces]
        kept = [trace for trace in fitting if Owner.POLICY in trace.owners]
        if not kept:
            raise Dropped("long")
        return Group(prompt, draw, [Sample(prompt, draw, 0, traces=kept, reward=0.0)])

    def _measure(self, length: int, reader: Reader) -> None:
        """Drop, refuse or count a row that is too long."""
        limit = self.config.max_tokens
        if length <= limit:
            return
        if self.config.overlong == "drop":
            raise Dropped("long")
        if self.config.overlong == "fail":
            raise DataError(
                f"{reader.name}: {where(reader)} has {length} tokens, more than max_tokens={limit}; set overlong to truncate or drop."
            )
        self.truncated += 1
        self.tell(
            reader, "truncated", f"has {length} tokens and is cut to max_tokens={limit}; data/truncated counts such rows."
        )

    def _rendered(self, reader: Reader, prompt: Prompt) -> list[Pieces]:
        """The traces of a row, in parts."""
        row, config, renderer = prompt.columns, reader.config, reader.renderer
        if recorded := recorded_traces(row, renderer.tokenizer):
            return recorded
        completion = row.get(config.completion)
        if completion is not None and not isinstance(completion, (str, Sequence, Mapping)):
            raise BadRow(
                f"{reader.name}: the column '{config.completion}' must be a text or messages, got {completion!r:.40} ({type(completion).__name__})."
            )
        if completion is None and isinstance(prompt.content, str):
            if self.config.train_on == ALL:  # a text alone
                return [[(Owner.POLICY, renderer.ended(list(renderer.prompt(prompt.content, chat=False))))]]
            raise BadRow(f"{reader.name}: a row has no '{config.completion}' to imitate; it has {', '.join(sorted(row))}.")
        with rendering(reader):
            if row.get(MORE) is not None or not (reader.is_chat() or isinstance(prompt.content, tuple)):
                tokens = list(renderer.prompt(prompt.content, chat=config.chat, system=config.system))
                if not tokens:
                    raise BadRow(f"{reader.name}: a row has an empty prompt.")
                return [[(Owner.PROMPT, tokens), *reader.answers(prompt)]]
            return self._turns(reader, prompt, () if completion is None else completion)

    def _turns(self, reader: Reader, prompt: Prompt, completion: Any) -> list[Pieces]:
        """A conversation with its chosen turns."""
        row, what = prompt.columns, f"{reader.name}: messages"
        said = reader.renderer.turns(prompt.content, chat=True) or []
        messages = [*conversation(said, what), *conversation(completion, what)]
        first = 0 if reader.is_conversation(row) else len(said)
        column = self.config.train_column
        if column is not None and row.get(column) is None:
            raise BadRow(f"{reader.name}: a row has no '{column}', which train_column names; it has {', '.join(sorted(row))}.")
        chosen = chosen_turns(messages, first, self.config.train_on, row.get(column) if column else None, what)
        if self.config.train_on == ALL:
            chosen = [number == len(messages) - 1 for number in range(len(messages))]
        if reader.config.system is not None:
            messages, chosen = [{"role": "system", "content": reader.config.system}, *messages], [False, *chosen]
        tools = tools_of(row, f"{reader.name}: the column 'tools'")
        return Turns(reader.renderer, messages, tools).traces(chosen)

    @override
    def metrics(self) -> dict[str, float]:
        return super().metrics() | ({"data/truncated": float(self.truncated)} if self.truncated else {})

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "truncated": self.truncated}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.truncated = state.get("truncated", 0)


def _all_trained(pieces: Pieces) -> Pieces:
    """Everything is trained but the first token, which nothing comes before."""
    tokens = [token for _, piece in pieces for token in piece]
    return [(Owner.PROMPT, tokens[:1]), (Owner.POLICY, tokens[1:])]
