"""`specrun bench --server`: many clients against a running server, speculation off and as it decides in turn."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import httpx
import numpy as np

from specrun.engines.errors import SpecrunError

PLAIN, AUTO = "plain", "speculative"
ASKS = 4  # of each client in a burst, at least
GOLDEN = 0.618034  # multiples of it spread evenly between 0 and 1, however many there are
HEADER = (
    "prompt set",
    "clients",
    "mode",
    "tokens/s",
    "speed-up",
    "first token p50/p95 ms",
    "between tokens p50/p95 ms",
)


class LoadError(SpecrunError):
    """The server does not answer as it should."""


@dataclass
class Burst:
    """What one round of requests brought until the first client had nothing more to ask: fewer of them are another
    load. Times in seconds."""

    tokens: int = 0
    seconds: float = 0.0  # 0 until then
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class LoadRow:
    """One prompt set, number of clients and mode; medians over repeats."""

    prompt_set: str
    clients: int
    mode: str
    tokens_per_second: float
    speedup: float  # against plain
    first_token: tuple[float, float]  # 50th and 95th percentile, seconds
    between_tokens: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LoadOptions:
    server: str
    api_key: str | None
    clients: tuple[int, ...] = (1, 4, 16)
    max_tokens: int = 64  # on the average
    temperature: float = 0.0
    repeats: int = 2
    rate: float | None = None  # requests that arrive per second; None: a client asks again when it has its answer


def run_load(
    options: LoadOptions, sets: Mapping[str, Sequence[str]], progress: Callable[[], None] = lambda: None
) -> list[LoadRow]:
    """Every set with every number of clients. Raises LoadError."""
    try:
        return asyncio.run(_run(options, sets, progress))
    except httpx.HTTPError as error:
        raise LoadError(f"{options.server} does not answer: {error or type(error).__name__}") from error


async def _run(options: LoadOptions, sets: Mapping[str, Sequence[str]], progress: Callable[[], None]) -> list[LoadRow]:
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    limits = httpx.Limits(max_connections=4 * max(options.clients))
    rows = []
    async with httpx.AsyncClient(base_url=options.server, headers=headers, limits=limits, timeout=600) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        for name, prompts in sets.items():
            for clients in options.clients:
                bursts: dict[str, list[Burst]] = {PLAIN: [], AUTO: []}
                for _ in range(options.repeats):
                    for mode, done in bursts.items():
                        bodies = [_body(options, model, prompt, mode) for prompt in prompts]
                        done.append(await _burst(client, bodies, clients, options.rate))
                        progress()
                plain = median(burst.rate for burst in bursts[PLAIN])
                rows += [_row(name, clients, mode, done, plain) for mode, done in bursts.items()]
    return rows


def _body(options: LoadOptions, model: str, prompt: str, mode: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": 1,
        "stream": True,
        "cache_prompt": False,  # the same prompts come again and again
        **({"proposer": "none"} if mode == PLAIN else {}),
    }


async def _burst(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], clients: int, rate: float | None
) -> Burst:
    """Answers are as long as wanted, a half more or less: without speculation those of one length would end in step,
    which no traffic does."""
    count, burst = max(len(bodies), ASKS * clients), Burst()
    todo = iter(
        [
            {**body, "max_tokens": max(1, round(body["max_tokens"] * (0.5 + index * GOLDEN % 1)))}
            for index, body in enumerate(itertools.islice(itertools.cycle(bodies), count))
        ]
    )
    start = time.perf_counter()

    async def work() -> None:
        for body in todo:
            await _ask(client, body, burst)
        burst.seconds = burst.seconds or time.perf_counter() - start

    if rate is None:
        await asyncio.gather(*(work() for _ in range(clients)))
    else:
        tasks = []
        for body in todo:
            tasks.append(asyncio.create_task(_ask(client, body, burst)))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*tasks)
        burst.seconds = time.perf_counter() - start
    return burst


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], burst: Burst) -> None:
    before, first = time.perf_counter(), True
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            text = (await reply.aread()).decode(errors="replace")
            raise LoadError(f"the server answered {reply.status_code}: {text[:300]}")
        async for piece in _pieces(reply):
            if "error" in piece:
                raise LoadError(f"the server broke off: {piece['error']['message']}")
            if "specrun" not in piece:  # the role, before the first token
                continue
            if burst.seconds:
                continue
            now = time.perf_counter()
            (burst.first if first else burst.between).append(now - before)
            before, first = now, False
            burst.tokens += 1


async def _pieces(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _row(name: str, clients: int, mode: str, bursts: Sequence[Burst], plain: float) -> LoadRow:
    rate = median(burst.rate for burst in bursts)
    return LoadRow(
        prompt_set=name,
        clients=clients,
        mode=mode,
        tokens_per_second=rate,
        speedup=rate / plain,
        first_token=_percentiles([each for burst in bursts for each in burst.first]),
        between_tokens=_percentiles([each for burst in bursts for each in burst.between]),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    if not seconds:
        return 0.0, 0.0
    middle, high = np.percentile(seconds, (50, 95))
    return float(middle), float(high)


def load_table(rows: Sequence[LoadRow]) -> str:
    """For people."""
    cells = [
        (
            row.prompt_set,
            str(row.clients),
            row.mode,
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}x",
            f"{1e3 * row.first_token[0]:.0f} / {1e3 * row.first_token[1]:.0f}",
            f"{1e3 * row.between_tokens[0]:.0f} / {1e3 * row.between_tokens[1]:.0f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [HEADER, *cells]) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [HEADER, *cells]
    )
