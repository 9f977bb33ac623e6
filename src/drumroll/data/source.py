"""Drawing prompts: an endless, seeded, resumable order over several datasets in fixed shares.

The n-th draw depends only on the config and n. Shares hold to within one prompt after every draw, because each draw
goes to the dataset that is furthest behind. With `data.epochs`, without a mixture, and if all datasets are finite, it goes
to the one that has done the least of its epoch, so that every row is drawn as often as the epochs say.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.config.environment import NONE, EnvironmentConfig
from drumroll.data.conversation import Conversation
from drumroll.data.render import Content, Renderer
from drumroll.data.rows import read
from drumroll.data.split import Row
from drumroll.errors import BadRow, ConfigError, DataError
from drumroll.sample import Owner, Prompt, Scene

FIRST_ROWS = 100
"""If none of so many first rows of a dataset is usable, the recipe does not fit it."""
MORE = "more"
"""Column with the rest of an episode to imitate: texts, observed and answered in turn."""


def given(row: Mapping[str, Any], config: DatasetConfig) -> Any:
    """The prompt or conversation of a row, as it stands there."""
    content = row.get(config.prompt)
    return row.get("messages") if content is None else content


def ends_with_answer(content: Any) -> bool:
    """Whether a prompt is a conversation that ends with the assistant's turn."""
    return not isinstance(content, str) and bool(content) and content[-1].get("role") == "assistant"


def _has_answer(content: Any) -> bool:
    """Whether a prompt is a conversation with a turn of the assistant."""
    return isinstance(content, tuple) and any(turn.get("role") == "assistant" for turn in content)


class RequiredColumns(Protocol):
    """Domain → (column, who asks for it); rows that are `played` in an environment may have no other reward."""

    def __call__(self, domain: str, *, played: bool = False) -> Sequence[tuple[str, str]]: ...


def no_columns(domain: str, *, played: bool = False) -> Sequence[tuple[str, str]]:
    """Nothing is asked of the rows."""
    return ()


@dataclass
class RowCheck:
    """What the rows of one dataset must have: a prompt, and the columns that rewards ask for."""

    name: str
    config: DatasetConfig
    required: RequiredColumns
    environment: EnvironmentConfig = NONE

    def __call__(self, row: Row, number: int) -> tuple[str, Content, Row, Scene | None]:
        """Return domain, prompt, columns and scene; a missing column is named with the row's place and the columns it has."""
        if not isinstance(row, dict):
            raise BadRow(f"{self.name}: row {number + 1} must be a mapping of columns to values, it is a {type(row).__name__}.")
        scene = self._scene(row)
        own = row.get("environment") if scene is not None and self.config.environment is None else None
        domain = str(self.config.domain or row.get("domain") or own or self.name.rpartition(".")[2])
        content, row = self._content(row, number)
        if scene is not None and content is None:
            content = f"{scene.use} {json.dumps(row, sort_keys=True, default=str)}"
        wanted = [(self.config.prompt, "the prompt")] if content is None else []
        required = self.required(domain) if scene is None else self.required(domain, played=True)
        answered = {self.config.completion} if _has_answer(content) else set[str]()
        missing = [*wanted, *((c, who) for c, who in required if row.get(c) is None and c not in answered)]
        if missing or content is None:
            column, who = missing[0]
            has = ", ".join(sorted(str(c) for c, value in row.items() if value is not None)) or "nothing"
            lacks = f"lacks the column '{column}'"
            if column == self.config.completion and isinstance(content, tuple):
                lacks = f"has neither a turn of the assistant nor the column '{column}'"
            raise BadRow(f"{self.name}: row {number + 1} {lacks}, which {who} needs; it has {has}.")
        return domain, content, row, scene

    def _scene(self, row: Row) -> Scene | None:
        """The environment that a row is played in, if any."""
        config, default = self.config, self.environment
        named = row.get("environment") if default.use is not None else None
        use = config.environment or named or default.use
        if use is None or use == "none":
            return None
        args = config.environment_args
        if args is None:
            args = default.args if use == default.use else {}
        return Scene(str(use), args, config.chat, config.system, config.template)

    def _content(self, row: Row, number: int) -> tuple[Content | None, Row]:
        """The prompt of a row. A conversation that ends with the assistant's turn gives that turn as the completion."""
        content = given(row, self.config)
        if content is None or isinstance(content, str):
            return content, row
        if not isinstance(content, Sequence) or not all(isinstance(turn, dict) and "role" in turn for turn in content):
            raise BadRow(
                f"{self.name}: in row {number + 1} the prompt must be a text or a list of messages with role and content, "
                f"got {content!r:.80}."
            )
        turns = tuple(content)
        if ends_with_answer(turns):
            answer = turns[-1]
            plain = {key for key, value in answer.items() if value is not None} == {"role", "content"}
            return turns[:-1], {**row, self.config.completion: answer["content"] if plain else [answer]}
        return turns, row


@dataclass
class Reader:
    """Turns the rows of one dataset into prompts, checking each where it enters."""

    name: str
    config: DatasetConfig
    renderer: Renderer
    required: RequiredColumns
    environment: EnvironmentConfig = NONE
    stream: str = ""
    unrendered: bool = False
    """Leave the rendering to the caller, who renders prompts together with their answers."""
    at: int = 0
    """The number of the last row, from 0."""

    def __post_init__(self) -> None:
        self.check = RowCheck(self.name, self.config, self.required, self.environment)
        self.renderer = self.renderer.given(self.config.template, f"{self.name}.template")

    def prompt(self, row: Row, number: int) -> Prompt:
        """One row as a prompt."""
        self.at = number
        domain, content, row, scene = self.check(row, number)
        if scene is not None:
            return Prompt(Prompt.stable_id([domain, content, row]), domain, content, (), row, self.stream, scene)
        if self.unrendered:
            return Prompt(Prompt.stable_id([domain, content]), domain, content, (), row, self.stream)
        tokens = self.renderer.prompt(content, chat=self.config.chat, system=self.config.system)
        if not tokens:
            raise BadRow(f"{self.name}: row {number + 1} has an empty prompt.")
        return Prompt(Prompt.stable_id([domain, content]), domain, content, tokens, row, self.stream)

    def defective(self, number: int, error: Exception) -> Prompt:
        """Stands for a row that cannot be used."""
        self.at = number
        domain = self.config.domain or self.name.rpartition(".")[2]
        return Prompt(Prompt.stable_id([self.name, number]), domain, "", (), {}, self.stream, defect=str(error))

    def is_chat(self) -> bool:
        """Whether prompts that are texts become a user's turn."""
        return self.config.system is not None or (self.renderer.has_template if self.config.chat is None else self.config.chat)

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        """Whether a row holds its prompt and its answers in one list of messages."""
        return ends_with_answer(given(row, self.config)) or row.get(self.config.completion) is None

    def answer(self, prompt: Prompt) -> list[int]:
        """Tokens of the answer to imitate."""
        completion = prompt.columns.get(self.config.completion)
        if not isinstance(completion, str):
            raise BadRow(
                f"{self.name}: a row has no text in its column '{self.config.completion}' to imitate; "
                f"it has {', '.join(sorted(prompt.columns))}."
            )
        return self.renderer.answer(prompt.content, completion, chat=self.config.chat, system=self.config.system)

    def answers(self, prompt: Prompt) -> list[tuple[Owner, list[int]]]:
        """All that follows a prompt: the answer to imitate and, in an episode, what was observed and answered after it."""
        answer, more = self.answer(prompt), prompt.columns.get(MORE)
        if more is None:
            return [(Owner.POLICY, answer)]
        if not isinstance(more, list) or len(more) % 2 or not all(isinstance(text, str) for text in more):
            raise BadRow(f"{self.name}: the column '{MORE}' must list texts, observed and answered in turn, got {more!r:.80}.")
        said = str(prompt.columns[self.config.completion])
        first = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
        talk = Conversation(self.renderer, first, chat=self.config.chat, system=self.config.system)
        talk.prompt()
        pieces = [(Owner.POLICY, self.renderer.turn(said))]
        for observation, text in zip(more[::2], more[1::2], strict=True):
            pieces.append((Owner.ENVIRONMENT, talk.follow(said, observation, pieces[-1][1][-1])))
            pieces.append((Owner.POLICY, self.renderer.turn(text)))
            said = text
        return pieces


@dataclass
class _Stream:
    """The endless row order of one dataset."""

    reader: Reader
    rows: Sequence[Row] | Iterator[Row]
    share: float
    shuffle_seed: str | None
    taken: int = 0
    sound: bool = False
    """Whether a row is known to be usable."""
    _order: array[int] = field(default_factory=lambda: array("q"))
    _epoch: int = -1

    def next(self) -> tuple[Row, int]:
        number = self.taken
        self.taken += 1
        if not isinstance(self.rows, Sequence):
            try:
                return next(self.rows), number
            except DataError:
                raise
            except Exception as error:
                if not isinstance(error, StopIteration):
                    text = f"{type(error).__name__}: {error}"
                    raise DataError(f"{self.reader.name}: its function failed after {number} rows: {text}.") from error
                raise DataError(
                    f"{self.reader.name}: its function ended after {number} rows; return a list to have it repeated."
                ) from None
        epoch, place = divmod(number, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("q", range(len(self.rows)))
            if self.shuffle_seed is not None:
                random.Random(f"{self.shuffle_seed}/{epoch}").shuffle(self._order)
        index = self._order[place]
        return self.rows[index], index

    def is_sound(self) -> bool:
        """Whether some row is usable: if none of the first rows is, the recipe is at fault and not a row."""
        if not self.sound and isinstance(self.rows, Sequence):
            self.sound = any(map(self._is_usable, range(min(FIRST_ROWS, len(self.rows)))))
        return self.sound

    def _is_usable(self, number: int) -> bool:
        assert isinstance(self.rows, Sequence)
        try:
            self.reader.prompt(self.rows[number], number)
        except (BadRow, ConfigError):
            return False
        return True

    def epochs(self) -> float:
        return self.taken / len(self.rows) if isinstance(self.rows, Sequence) else 0.0

    def size(self) -> int:
        """The rows of an epoch; 0 if there is no end to them."""
        return len(self.rows) if isinstance(self.rows, Sequence) else 0


class PromptSource:
    """Draws prompts from the mixture."""

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        renderer: Renderer,
        required: RequiredColumns = no_columns,
        environment: EnvironmentConfig = NONE,
        *,
        tolerant: bool = False,
        unrendered: bool = False,
        answers: bool = False,
    ) -> None:
        """`tolerant` gives an unusable row as a prompt with a `defect` instead of raising, if its dataset has usable ones.

        `unrendered` gives prompts without tokens, for a caller who renders them with their answers; with `answers` a run gives
        its answers, not pairs of them.
        """
        self.config = config
        self.tolerant = tolerant
        self.overlong = self.longest = 0  # prompts above `data.max_prompt_tokens`, and the tokens of the longest
        self._draws = 0
        mixture = config.mixture or dict.fromkeys(config.train, 1.0)
        total = sum(mixture.values())
        self.shares = {name: share for name, share in config.mixture.items() if share} if config.mixture else {"": 1.0}
        self._streams = [
            _Stream(
                Reader(
                    f"data.train.{name}", dataset, renderer, required, environment, name if config.mixture else "", unrendered
                ),
                read(f"data.train.{name}", dataset, seed, answers=answers),
                mixture[name] / total,
                f"{seed}/{name}" if config.shuffle else None,
            )
            for name, dataset in config.train.items()
            if mixture[name] > 0
        ]
        self._drawn = [0] * len(self._streams)
        self._by_size = config.epochs is not None and config.mixture is None and all(s.size() for s in self._streams)

    def draw(self) -> Prompt | None:
        """The next prompt; None when the epochs are over. Over-long ones are dropped, cut or refused, by config."""
        drawn = self.draw_with_reader()
        return None if drawn is None else drawn[0]

    def draw_with_reader(self) -> tuple[Prompt, Reader] | None:
        """The next prompt, and the reader that knows its dataset; None when the epochs are over."""
        for _ in range(1000):
            if self.exhausted():
                break
            chosen = self._furthest_behind()
            stream = self._streams[chosen]
            prompt = self._fit(self._read(stream), stream.reader.name)
            if prompt is not None:
                self._draws += 1
                self._drawn[chosen] += 1
                return prompt, stream.reader
        else:
            raise DataError(f"{stream.reader.name}: 1000 prompts in a row {self._too_long()}")
        if self.overlong and self.overlong == sum(each.taken for each in self._streams):
            raise DataError(f"all {self.overlong:,} prompts of data.train {self._too_long()}")
        return None

    def _too_long(self) -> str:
        return (
            f"are longer than data.max_prompt_tokens={self.config.max_prompt_tokens}, up to {self.longest} tokens; raise it, or set "
            "data.overlong: truncate."
        )

    def _furthest_behind(self) -> int:
        """The number of the dataset to draw from."""
        if self._by_size:
            done = [stream.epochs() for stream in self._streams]
            return done.index(min(done))
        behind = [s.share * (self._draws + 1) - n for s, n in zip(self._streams, self._drawn, strict=True)]
        return behind.index(max(behind))

    def _read(self, stream: _Stream) -> Prompt:
        number = stream.taken
        try:
            row, number = stream.next()
            prompt = stream.reader.prompt(row, number)
        except (BadRow, ConfigError) as error:  # a domain without a reward is a ConfigError
            if not (self.tolerant and stream.is_sound()):
                raise
            return stream.reader.defective(number, error)
        stream.sound = True
        return prompt

    def _fit(self, prompt: Prompt, name: str) -> Prompt | None:
        limit, length = self.config.max_prompt_tokens, len(prompt.tokens)
        if length <= limit:
            return prompt
        self.overlong, self.longest = self.overlong + 1, max(self.longest, length)
        if self.config.overlong == "fail":
            raise DataError(
                f"{name}: prompt {prompt.id} has {length} tokens, more than data.max_prompt_tokens={limit}; set data.overlong to drop or truncate."
            )
        if self.config.overlong == "drop":
            return None
        return replace(prompt, tokens=prompt.tokens[-limit:])

    def exhausted(self) -> bool:
        """Whether `data.epochs` passes are done, over every dataset or, in a mixture, over the largest finite one."""
        if self._by_size and self.config.epochs is not None:
            return all(stream.epochs() >= self.config.epochs for stream in self._streams)
        largest = max(self._streams, key=_Stream.size)
        return self.config.epochs is not None and largest.size() > 0 and largest.epochs() >= self.config.epochs

    def metrics(self) -> dict[str, float]:
        """Over-long prompts met so far, and passes over the largest finite dataset."""
        epochs = max(self._streams, key=_Stream.size).epochs()
        overlong = {"data/overlong": float(self.overlong)} | ({"data/longest": float(self.longest)} if self.overlong else {})
        return overlong | ({"data/epoch": epochs} if epochs else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many rows were taken from each dataset."""
        taken = {s.reader.name: s.taken for s in self._streams}
        return {
            "draws": self._draws,
            "drawn": list(self._drawn),
            "taken": taken,
            "overlong": self.overlong,
            "longest": self.longest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the order where a checkpoint left it."""
        self._draws, self._drawn, self.overlong = state["draws"], list(state["drawn"]), state["overlong"]
        self.longest = state.get("longest", 0)
        for stream in self._streams:
            taken = state["taken"].get(stream.reader.name, 0)
            stream.sound = taken > 0
            if isinstance(stream.rows, Sequence):
                stream.taken = taken
            else:
                while stream.taken < taken:
                    with suppress(BadRow):
                        stream.next()
