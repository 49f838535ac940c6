"""ONNX Runtime GenAI, CPU provider. Speculates by n-gram lookup."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from benchmarks.workers.onnx_weights import bytes_read
from benchmarks.workers.worker import Description, Generation, Settings, Worker, main, timed_generation

CONTEXT = 1024  # of the calls that are timed one by one
# Something must end a generation. The last token of the vocabulary is one that the model hardly ever chooses.
RARE_TOKEN = 49151


class OnnxruntimeGenai(Worker):
    def __init__(self, model: Path, precision: str, threads: int, stop: int | None) -> None:
        config = og.Config(str(model))
        decoder = {"session_options": {"intra_op_num_threads": threads}}
        overlay = {"model": {"eos_token_id": RARE_TOKEN if stop is None else stop, "decoder": decoder}}
        config.overlay(json.dumps(overlay))
        self._path = model
        self._model = og.Model(config)
        self._generator: Any = None

    def describe(self) -> Description:
        runtime = f"{version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"
        return Description(runtime, bytes_read(self._path / "model.onnx"), {})

    def generate(self, ids: list[int], max_tokens: int, settings: Settings) -> Generation:
        statistics: dict[str, Any] = {}
        found, seconds, first = timed_generation(self._stream(ids, max_tokens, settings, statistics))
        steps = len(found)
        if settings:
            # A round gives several tokens; each of the others took a call of its own.
            steps = statistics["rounds"] + len(found) - statistics["tokens_emitted"]
        return Generation(found, seconds, first, steps)

    def _stream(self, ids: list[int], max_tokens: int, settings: Settings, statistics: dict[str, Any]) -> Iterator[int]:
        generator = self._generator_of(len(ids) + max_tokens, settings)
        generator.append_tokens(np.array(ids, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])
        if settings:
            statistics.update(generator.get_speculative_stats())

    def _generator_of(self, max_length: int, settings: Settings) -> Any:
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=max_length, do_sample=False)
        if settings:
            params.set_speculative_options(**settings)
        return og.Generator(self._model, params)

    def start(self, ids: list[int]) -> None:
        self._generator = self._generator_of(CONTEXT, {})
        self.call(ids)

    def call(self, ids: list[int]) -> None:
        self._generator.append_tokens(np.array(ids, np.int32))


if __name__ == "__main__":
    main(OnnxruntimeGenai)
