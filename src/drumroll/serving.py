"""`drumroll serve`: serves a model, or the model of a recipe or a run, over HTTP until Ctrl-C."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drumroll.config import RunConfig, load
from drumroll.data.render import Renderer
from drumroll.engines import Sampling
from drumroll.engines.router import Router
from drumroll.errors import ConfigError, StoreError
from drumroll.runfiles.calls import CallLog
from drumroll.runfiles.format import CONFIG
from drumroll.runfiles.reader import RunReader
from drumroll.sample import sample_seed
from drumroll.serve.caller import Caller, Served
from drumroll.serve.endpoint import Endpoint
from drumroll.serve.traces import Call
from drumroll.serve.writing import EngineClient
from drumroll.workers.runtime import Workers, context_length, open_workers, with_lengths

CONTEXT = 2048
"""Default context length, in tokens, for a model without a recipe."""
SLOTS = 8
"""Default number of concurrent calls, for a model without a recipe."""
KEPT = 1000
"""The number of samples whose conversations stay in memory; above it, the least recently called are dropped."""
LONGEST_CALL = 3600.0
"""Time limit of one call, in seconds."""


def config_of(target: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of a recipe or of a finished run, or a default config for a model."""
    path = Path(target)
    if (path / CONFIG).exists():
        run = RunReader.open(path)
        if not run.model_path.exists():
            raise StoreError(
                f"the run {path} has not ended, so it has no model yet; serve one of its checkpoints' models by path."
            )
        config = load(path / CONFIG, [f"model={run.model_path}", "roles.actor.model=null", *overrides]).config
        if config.trains_scores():
            raise ConfigError(
                f"{target} trained a reward model, which cannot generate text; a recipe asks it by "
                f"roles.reward_model.model: {target}, and `vllm serve {run.model_path} --runner pooling` serves its scores."
            )
        return config
    if path.suffix in (".yaml", ".yml"):
        return with_lengths(load(path, overrides).config, fetch=True)
    bare: dict[str, Any] = {
        "name": target.rstrip("/").rpartition("/")[2],
        "model": target,
        "data": {"train": {"none": {"source": "drumroll.data.problems:sums"}}, "max_prompt_tokens": CONTEXT // 2},
        "rollout": {"max_tokens": CONTEXT // 2},
        "roles": {"rollout": {"slots": SLOTS}},
        "reward": "exact",
    }
    return load(bare, overrides).config


class Callers:
    """Creates and keeps a `Caller` for each sample name in a base URL. Each call to the bare `/v1` is a new sample."""

    def __init__(self, served: Served, router: Router) -> None:
        self.served = served
        self.router = router
        self._kept: OrderedDict[str, Caller] = OrderedDict()
        self._count = 0

    def find(self, name: str | None) -> Caller:
        """Return the caller of this name; without a name, a new one."""
        if name is None:
            self._count += 1
            return self._open(f"call-{self._count}")
        if name not in self._kept:
            self._kept[name] = self._open(name)
        self._kept.move_to_end(name)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[name]

    def _open(self, name: str) -> Caller:
        self._count += 1
        client = EngineClient(self.router.generate, self.served.spell, name, self._count, LONGEST_CALL)
        return Caller(name, self.served, client, Sampling(max_tokens=self.served.context), _seed, fixed=False)


def _seed(number: int, index: int, asked: int | None) -> int:
    """Return a random seed, or one derived from the caller's own seed: equal messages then give equal tokens."""
    return secrets.randbits(63) if asked is None else sample_seed(abs(asked), "serve", 0, index)


@asynccontextmanager
async def serving(
    config: RunConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    record: Path | None = None,
    requests: Path | None = None,
) -> AsyncGenerator[Endpoint]:
    """Open the endpoint of a config's model for the duration of the block.

    `record` is a file for every call with its tokens, `requests` one for every request with its status and time.
    """
    workers = await open_workers(config)
    try:
        renderer = Renderer(workers.tokenizer).given(config.data.template, "data.template")
        served = Served(config.name, renderer, decoder(workers), context_length(config))
        if record is not None:
            log = CallLog(record)
            served.recorded = lambda caller, call, said: log.add(line_of(caller.name, call, said))
        endpoint = Endpoint(served, Callers(served, workers.router).find, token, CallLog(requests).add if requests else None)
        await endpoint.open(host, port)
        try:
            yield endpoint
        finally:
            await endpoint.close()
    finally:
        await workers.close()


def line_of(sample: str, call: Call, said: dict[str, Any]) -> dict[str, Any]:
    """Return a call as plain data: its sample, the call that it continues, what was said and its tokens."""
    written = call.written
    return {
        "sample": sample,
        "call": call.number,
        "parent": None if call.parent is None else call.parent.number,
        **said,
        "seen": call.seen(),
        "written": written.tokens,
        "logprobs": written.logprobs,
        "versions": written.versions,
        "stop": written.stop.value,
    }


def decoder(workers: Workers) -> Callable[[list[int]], str]:
    """Return the function that decodes tokens into the text of an answer."""
    return lambda tokens: workers.tokenizer.decode(tokens, skip_special_tokens=True)


EXAMPLE = """
import openai

client = openai.OpenAI(base_url="{url}/s/my-sample/v1", api_key="{token}")
answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "{content}"}}])
print(answer.choices[0].message.content)
"""


async def serve(config: RunConfig, say: Callable[[str], None], **where: Any) -> None:
    """Serve until Ctrl-C. Prints the token once, with an example that runs unchanged."""
    async with serving(config, **where) as endpoint:
        say(f"serving {endpoint.served.name} at {endpoint.url}/v1; Ctrl-C ends it. Token: {endpoint.token}")
        say(EXAMPLE.format(url=endpoint.url, token=endpoint.token, model=endpoint.served.name, content="12+7="))
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
