"""specrun, from a bundle."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnxruntime

from benchmarks.workers.onnx_weights import bytes_read
from benchmarks.workers.worker import Description, Generation, Settings, Worker, main, timed_generation
from specrun.engines.manifest import TARGET, Bundle
from specrun.runner.runner import NO_PROPOSER, Request, Runner
from specrun.runner.session import feed
from specrun.runner.statistics import Statistics

DEFAULT = "default"  # the bundle's own proposer


class Specrun(Worker):
    def __init__(self, model: Path, precision: str, threads: int, stop: int | None) -> None:
        bundle = Bundle.open(model)
        target = replace(bundle.manifest.target, stop_token_ids=() if stop is None else (stop,))
        self._bundle = replace(bundle, manifest=replace(bundle.manifest, target=target))
        self._runner = Runner(self._bundle)

    def describe(self) -> Description:
        size = bytes_read(self._bundle.engine(TARGET))
        notes = {"proposer": self._bundle.manifest.proposer, "k": str(self._bundle.manifest.k)}
        return Description(f"{version('specrun')}, onnxruntime {onnxruntime.__version__}", size, notes)

    def generate(self, ids: list[int], max_tokens: int, settings: Settings) -> Generation:
        name = settings.get("proposer", NO_PROPOSER)
        request = Request(tuple(ids), max_tokens, proposer=None if name == DEFAULT else name)
        statistics = Statistics()
        found, seconds, first = timed_generation(self._stream(request, statistics))
        return Generation(found, seconds, first, statistics.rounds)

    def _stream(self, request: Request, statistics: Statistics) -> Iterator[int]:
        for event in self._runner.stream(request, statistics):
            yield event.token.id

    def start(self, ids: list[int]) -> None:
        width = self._bundle.manifest.widths[-1]
        self._runner.target.truncate(0)
        for begin in range(0, len(ids), width):
            feed(self._runner.target, ids[begin : begin + width], wanted=1)

    def call(self, ids: list[int]) -> None:
        feed(self._runner.target, ids, wanted=None)  # the logits of all


if __name__ == "__main__":
    main(Specrun)
