"""The HTTP server: OpenAI's API, health, metrics and a page to look at."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from specrun.engines.errors import RequestError, SpecrunError
from specrun.runner.runner import Event
from specrun.runner.runner import Request as Generation
from specrun.runner.sampling import Sampling
from specrun.runner.serving.metrics import Metrics
from specrun.runner.serving.replies import Replies
from specrun.runner.serving.schema import ChatCompletion, Completion
from specrun.runner.serving.service import CLIENT_ERRORS, BusyError, DeadlineError, Service, StoppedError

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
HEALTH_SECONDS = 30.0
STATUS_OF = {BusyError: 429, StoppedError: 503, DeadlineError: 504}
TYPE_OF = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
NO_LOG = ("/health", "/metrics")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """What one client may ask for."""

    body_bytes: int = 4 << 20
    choices: int = 8
    max_tokens: int | None = None  # None: what the capacity leaves
    seconds: float = 600.0  # from the request's arrival to its last token


def make_app(service: Service, limits: Limits, api_key: str | None, drain_seconds: float) -> FastAPI:
    """The application around a started service, which it stops at shutdown: running requests get `drain_seconds`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.handover = Handover()
        yield
        finished = await asyncio.to_thread(service.stop, drain_seconds)
        logger.info("stopped%s", "" if finished else "; some requests were not finished")

    model = service.bundle.manifest.target.name
    app = FastAPI(title="specrun", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    metrics = Metrics(service)
    app.add_middleware(Gate, limits=limits, api_key=api_key, metrics=metrics)
    _handle_errors(app)

    @app.post("/v1/chat/completions", response_model=None, responses=ERRORS)
    async def chat_completions(body: ChatCompletion, request: Request) -> Any:
        return await answer(body, request, chat=True)

    @app.post("/v1/completions", response_model=None, responses=ERRORS)
    async def completions(body: Completion, request: Request) -> Any:
        return await answer(body, request, chat=False)

    async def answer(body: ChatCompletion | Completion, request: Request, chat: bool) -> Any:
        if body.model != model:
            raise HTTPException(404, f"got model {body.model!r}, this server has {model!r}")
        if body.choices > limits.choices:
            raise RequestError(f"got n = {body.choices}, expected at most {limits.choices}")
        if body.stream_options is not None and not body.stream:
            raise RequestError("got stream_options without stream")
        requests = await asyncio.to_thread(body.requests, service.runner, limits.max_tokens)
        replies = Replies(chat, model, service.runner.tokenizer, requests)
        running = Running(service, metrics, replies, limits.seconds, app.state.handover)
        running.submit()
        if not body.stream:
            await running.whole(request)
            return JSONResponse(replies.whole())
        usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(running.stream(usage), media_type="text/event-stream")

    _add_views(app, service, metrics)
    return app


def _add_views(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """What can be looked at."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {"id": service.bundle.manifest.target.name, "object": "model", "created": 0, "owned_by": "specrun"}
            ],
        }

    @app.get("/health", responses={503: {"description": "not able to serve"}})
    async def health() -> JSONResponse:
        """Runs one token through the model."""
        problem = await _try_one_token(service, app.state.handover)
        return JSONResponse({"status": problem or "ok"}, 200 if problem is None else 503)

    @app.get("/metrics")
    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        text = (resources.files("specrun.runner.serving") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text)


class Handover:
    """From the engine's thread to that of the event loop. To wake the loop takes longer than anything else about a
    token, so it is woken once for all that comes before it has looked."""

    def __init__(self) -> None:
        """For the event loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._woken = False

    def put(self, queue: "asyncio.Queue[Any]", item: Any) -> None:
        """From any thread."""
        self._items.append((queue, item))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False  # before the items are taken: what is put later wakes again
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class Running:
    """The choices of one HTTP request while they are generated."""

    def __init__(
        self, service: Service, metrics: Metrics, replies: Replies, seconds: float, handover: Handover
    ) -> None:
        self._service, self._metrics, self._replies, self._seconds = service, metrics, replies, seconds
        self._handover = handover
        self._events: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()
        self._generations: list[Any] = []
        self._started = time.perf_counter()

    def submit(self) -> None:
        """Raises BusyError, StoppedError or RequestError; then none of the choices runs."""
        try:
            for index, choice in enumerate(self._replies.choices):
                generation = self._service.submit(choice.request, self._sink(index), self._seconds)
                choice.statistics = generation.statistics
                self._generations.append(generation)
        except BaseException:
            self.cancel()
            raise

    def _sink(self, index: int) -> Callable[[Event | BaseException], None]:
        return lambda event: self._handover.put(self._events, (index, event))

    async def events(self) -> AsyncGenerator[tuple[int, Event]]:
        """Until all choices are finished. Raises what ended one of them."""
        left, before = len(self._replies.choices), [0.0] * len(self._replies.choices)
        try:
            while left:
                index, event = await self._events.get()
                if isinstance(event, SpecrunError):
                    raise event
                if isinstance(event, BaseException):  # logged where it happened
                    raise HTTPException(500, "internal error")
                now = time.perf_counter()
                if before[index]:
                    self._metrics.between_tokens.observe(now - before[index])
                else:
                    self._metrics.first_token.observe(now - self._started)
                before[index] = now
                yield index, event
                left -= event.finish_reason is not None
        finally:
            self.cancel()
            for choice in self._replies.choices:
                self._metrics.finished(choice.statistics)

    async def whole(self, request: Request) -> None:
        """Generate everything; stops if the client goes away."""
        gone = asyncio.create_task(_disconnected(request))
        work = asyncio.create_task(self._take_all())
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
            raise HTTPException(499, "the client went away")
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _take_all(self) -> None:
        async for index, event in self.events():
            self._replies.take(index, event)

    async def stream(self, usage: bool) -> AsyncIterator[str]:
        """Server-sent events. An error after the first is one of them: the status has been sent."""
        for index in range(len(self._replies.choices)):
            if (first := self._replies.first(index)) is not None:
                yield _event(first)
        try:
            async with contextlib.aclosing(self.events()) as events:
                async for index, event in events:
                    yield _event(self._replies.take(index, event))
            if usage:
                yield _event(self._replies.last())
        except Exception as error:
            yield _event(_error(*_status(error)))
        yield "data: [DONE]\n\n"

    def cancel(self) -> None:
        for generation in self._generations:
            if not generation.ended:
                self._service.cancel(generation)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def _try_one_token(service: Service, handover: Handover) -> str | None:
    """What is wrong, or None."""
    if not service.alive or not service.accepting:
        return "shutting down" if service.alive else "the engine's thread has ended"
    done: asyncio.Queue[Event | BaseException] = asyncio.Queue()
    probe = Generation((0,), max_tokens=1, sampling=Sampling(seed=0), proposer="none")
    try:
        service.submit(probe, lambda event: handover.put(done, event), HEALTH_SECONDS)
        result = await asyncio.wait_for(done.get(), HEALTH_SECONDS)
    except BusyError:
        return None  # full, and so at work
    except (SpecrunError, TimeoutError) as error:
        return f"a forward pass failed: {error or 'timeout'}"
    return f"a forward pass failed: {result}" if isinstance(result, BaseException) else None


class Gate:
    """In front of everything: key, size of the body, a line in the log without a word of the prompt."""

    def __init__(self, app: Any, limits: Limits, api_key: str | None, metrics: Metrics) -> None:
        self._app, self._limits, self._api_key, self._metrics = app, limits, api_key, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refused = self._refuse(scope)
        received = 0

        async def limited() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limits.body_bytes:
                raise HTTPException(413, f"the body is larger than {self._limits.body_bytes} bytes")
            return message

        try:
            if refused is not None:
                await refused(scope, receive, watched)
            else:
                await self._app(scope, limited, watched)
        finally:
            self._metrics.answered(status)
            if scope["path"] not in NO_LOG:
                milliseconds = (time.perf_counter() - start) * 1e3
                line = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "ms": round(milliseconds, 1),
                }
                logger.info("%s", json.dumps(line))

    def _refuse(self, scope: Scope) -> JSONResponse | None:
        headers = dict(scope["headers"])
        if self._api_key is not None and scope["path"].startswith("/v1/"):
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
            if not secrets.compare_digest(given, self._api_key.encode()):
                return JSONResponse(_error(401, "got no valid API key"), 401)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            return JSONResponse(_error(413, f"the body is larger than {self._limits.body_bytes} bytes"), 413)
        return None


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = "unknown field, which is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        return JSONResponse(_error(400, f"{where}: {message}" if where else message, where or None), 400)

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse(_error(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(SpecrunError)
    async def ours(request: Request, error: SpecrunError) -> JSONResponse:
        status, message = _status(error)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else None
        return JSONResponse(_error(status, message), status, headers)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(_error(500, "internal error"), 500)


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    for kind, status in STATUS_OF.items():
        if isinstance(error, kind):
            return status, str(error)
    if isinstance(error, CLIENT_ERRORS):
        return 400, str(error)
    # Ours say what failed, without a word of the prompt; others may say anything.
    return 500, str(error) if isinstance(error, SpecrunError) else "internal error"


def _error(status: int, message: str, parameter: str | None = None) -> dict[str, Any]:
    kind = TYPE_OF.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": "refused"} for status in (400, 401, 404, 413, 429, 503, 504)
}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
