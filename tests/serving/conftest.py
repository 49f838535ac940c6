"""A server in this process, on a free port."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import uvicorn

from specrun.engines.manifest import Bundle
from specrun.runner.runner import Completion, Request, Runner
from specrun.runner.serving.app import Limits, make_app
from specrun.runner.serving.service import Service
from specrun.runner.serving.slots import Slots
from tests import tiny, tiny_heads

API_KEY = "secret"
SLOTS, QUEUE = 6, 4
MAX_TOKENS = 300


@dataclass(frozen=True)
class Server:
    url: str
    service: Service
    model: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60)


@pytest.fixture(scope="session")
def served_bundle(tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path) -> Bundle:
    """With a draft of every kind that has an engine; by default lookup and a tree of EAGLE-3 propose."""
    directory = tmp_path_factory.mktemp("served")
    draft = tiny.save_checkpoint(directory / "draft", tiny.make_model(tiny.llama(num_hidden_layers=1), seed=1))
    return tiny.make_bundle(
        directory,
        deep_checkpoint,
        tiny_heads.eagle3(directory / "eagle3"),
        tiny_heads.medusa(directory / "medusa"),
        "early-exit:6",
        draft,
        nodes=9,
        capacity=384,
    )


@pytest.fixture(scope="session", params=["fp32", "int8"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path) -> Bundle:
    """Target and draft model."""
    draft = tiny.make_model(tiny.llama(num_hidden_layers=1), seed=1, sharpness=12.0)
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny.save_checkpoint(directory / "draft", draft)
    return tiny.make_bundle(directory, deep_checkpoint, checkpoint, precision=request.param, accept_quality_loss=True)


@pytest.fixture(scope="session")
def alone(pair: Bundle) -> Callable[[Request], tuple[int, ...]]:
    """What `pair` writes by plain decoding, with the engines that a server uses. Those for one sequence round
    otherwise, which matters where something is quantized."""
    slots = Slots(pair, 1)
    runner = Runner(pair).beside(slots.loader(0))

    def write(request: Request) -> tuple[int, ...]:
        done: list[Completion] = []
        slots.scheduler.spawn(lambda: done.append(runner.generate(request.plain())))
        while not slots.scheduler.idle:
            slots.scheduler.step()
        return done[0].ids

    return write


@pytest.fixture(scope="session")
def solo(served_bundle: Bundle) -> Runner:
    """The same bundle for one request at a time."""
    return Runner(served_bundle)


@pytest.fixture(scope="session")
def server(served_bundle: Bundle) -> Iterator[Server]:
    service = Service.open(served_bundle.path, SLOTS, QUEUE)
    app = make_app(service, Limits(body_bytes=200_000, choices=4, max_tokens=MAX_TOKENS), API_KEY, drain_seconds=5)
    with running(app) as url:
        yield Server(url, service, served_bundle.manifest.target.name)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class running:  # noqa: N801 (reads as a verb)
    """Serve `app` in a thread while the block runs."""

    def __init__(self, app: Any, lifespan: Literal["on", "off"] = "on") -> None:
        self._port = free_port()
        config = uvicorn.Config(
            app, host="127.0.0.1", port=self._port, log_config=None, access_log=False, lifespan=lifespan
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._server.startup, startup = self._startup, self._server.startup  # type: ignore[method-assign]
        self._real_startup = startup
        self._thread = threading.Thread(target=self._server.run)

    async def _startup(self, *arguments: Any, **options: Any) -> None:
        await self._real_startup(*arguments, **options)
        self._started.set()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._started.wait(60)
        return f"http://127.0.0.1:{self._port}"

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)
