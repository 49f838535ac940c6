"""The model that Triton's Python backend runs: requests of all clients go to one `Service`, which batches them.

`pb_utils` is Triton's own module, which exists inside its stub process only.
"""

import json
import logging
import os
import threading
from typing import Any

import numpy as np

from specrun.engines.errors import SpecrunError
from specrun.runner.runner import Event, Request
from specrun.runner.serving.service import CLIENT_ERRORS, BusyError, DeadlineError, Generation, Service, StoppedError
from specrun.runner.triton.metrics import TritonMetrics
from specrun.runner.triton.request import Asked, read_request
from specrun.runner.triton.settings import Settings

WATCH_SECONDS = 0.05  # how often clients that went away are looked for
DRAIN_SECONDS = 30.0
CODES = {
    **dict.fromkeys(CLIENT_ERRORS, "INVALID_ARG"),
    BusyError: "UNAVAILABLE",
    StoppedError: "UNAVAILABLE",
    DeadlineError: "CANCELLED",
}


class Model:
    """What `TritonPythonModel` does."""

    def __init__(self, pb_utils: Any, arguments: dict[str, str]) -> None:
        """`arguments`: as Triton gives them to `initialize`. Raises what keeps the bundle from being served."""
        self._pb = pb_utils
        logging.getLogger("specrun").addHandler(_TritonLog(pb_utils.Logger))
        logging.getLogger("specrun").setLevel(logging.INFO)
        settings = Settings.of(arguments)
        if arguments["model_instance_kind"] == "GPU":  # before anything asks for a device: each instance is a process
            os.environ["CUDA_VISIBLE_DEVICES"] = arguments["model_instance_device_id"]
        self._settings = settings
        self._service = Service.open(settings.bundle, settings.slots, settings.queue, settings.prefix_cache << 20)
        self._metrics = TritonMetrics(pb_utils, arguments["model_name"], self._service)
        self._live: set[_Reply] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Answers go through each request's sender. Nothing may escape: Triton would show it to the client."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except SpecrunError as error:
                self._refuse(sender, str(error), _code(error))
            except Exception as error:
                logging.getLogger(__name__).error("a request failed: %s", error, exc_info=error)
                self._refuse(sender, "internal error", "INTERNAL")

    def _start(self, request: Any, sender: Any) -> None:
        def tensor(name: str) -> Any:
            found = self._pb.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()

        asked = read_request(tensor, json.loads(request.parameters() or "{}"), self._service.runner)
        reply = _Reply(self._pb, sender, asked, self._close)
        with self._lock:
            self._live.add(reply)
        try:
            with reply.lock:  # no event before it is known whose
                reply.generation = self._service.submit(asked.request, reply.take, self._settings.timeout)
        except BaseException:
            with self._lock:
                self._live.discard(reply)
            raise

    def _close(self, reply: "_Reply") -> None:
        with self._lock:
            self._live.discard(reply)
        if reply.generation is not None:
            self._metrics.finished(reply.generation.statistics, reply.cancelled)

    def _refuse(self, sender: Any, message: str, code: str) -> None:
        error = self._pb.TritonError(message, getattr(self._pb.TritonError, code))
        sender.send(self._pb.InferenceResponse(error=error), flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _watch(self) -> None:
        """Ends what nobody waits for any more, and keeps the gauges true."""
        while not self._ended.wait(WATCH_SECONDS):
            self._metrics.show_load()
            with self._lock:
                live = list(self._live)
            for reply in live:
                if reply.generation is not None and reply.give_up_if_cancelled():
                    self._service.cancel(reply.generation)

    def finalize(self) -> None:
        """The model is unloaded; Triton has waited for the senders of all requests."""
        self._ended.set()
        self._watcher.join()
        self._service.stop(DRAIN_SECONDS)


class _Reply:
    """Sends what one request brings. Events come from the engine's thread, cancellations from the watcher's."""

    def __init__(self, pb_utils: Any, sender: Any, asked: Asked, closed: Any) -> None:
        self._pb, self._sender, self._asked, self._closed = pb_utils, sender, asked, closed
        self.lock = threading.Lock()
        self._open = True
        self._ids: list[int] = []
        self._text: list[str] = []
        self.generation: Generation | None = None
        self.cancelled = False

    @property
    def request(self) -> Request:
        return self._asked.request

    def take(self, event: Event | BaseException) -> None:
        with self.lock:
            if not self._open:
                return
            if isinstance(event, BaseException):
                known = isinstance(event, SpecrunError)
                message, code = (str(event), _code(event)) if known else ("internal error", "INTERNAL")
                self._end(error=self._pb.TritonError(message, getattr(self._pb.TritonError, code)))
                return
            self._ids.append(event.token.id)
            self._text.append(event.text)
            if event.finish_reason is not None:
                self._end(self._tensors(event.finish_reason))
            elif self._asked.stream:
                self._sender.send(self._pb.InferenceResponse(output_tensors=self._tensors("")))
                self._ids, self._text = [], []

    def give_up_if_cancelled(self) -> bool:
        with self.lock:
            if not self._open or not self._sender.is_cancelled():
                return False
            self.cancelled = True
            self._end()
            return True

    def _end(self, tensors: list[Any] | None = None, error: Any = None) -> None:
        """The last response, with its flag: a client that misses it waits for ever."""
        self._open = False
        self._closed(self)  # first, so that a client that has seen the end finds it in the metrics
        final = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if tensors is None and error is None:
            self._sender.send(flags=final)
        else:
            self._sender.send(self._pb.InferenceResponse(output_tensors=tensors or [], error=error), flags=final)

    def _tensors(self, finish_reason: str) -> list[Any]:
        statistics = ""
        if finish_reason and self.generation is not None:
            seed = self.request.sampling.seed
            statistics = json.dumps({"seed": seed, **self.generation.statistics.to_json()})
        texts = {"text_output": "".join(self._text), "finish_reason": finish_reason, "statistics": statistics}
        return [
            self._pb.Tensor("output_ids", np.array(self._ids, np.int32)),
            *(self._pb.Tensor(name, np.array([text.encode()], object)) for name, text in texts.items()),
        ]


class _TritonLog(logging.Handler):
    """Our messages in Triton's log."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        write = {logging.INFO: self._logger.log_info, logging.WARNING: self._logger.log_warn}
        write.get(record.levelno, self._logger.log_error)(self.format(record))


def _code(error: BaseException) -> str:
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), "INTERNAL")
