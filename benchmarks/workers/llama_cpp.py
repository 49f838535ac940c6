"""llama.cpp through llama-cpp-python. Speculates by prompt lookup."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.workers.worker import Description, Generation, Settings, Worker, main, timed_generation

CONTEXT = 1024
BATCH = 512


class CountingLlama(llama_cpp.Llama):  # type: ignore[misc] # it publishes no types
    """Counts calls of the model."""

    calls = 0

    def eval(self, tokens: Any) -> None:
        self.calls += 1
        super().eval(tokens)


class LlamaCpp(Worker):
    def __init__(self, model: Path, precision: str, threads: int, stop: int | None) -> None:
        def load(logits_all: bool) -> CountingLlama:
            return CountingLlama(
                str(model),
                n_ctx=CONTEXT,
                n_batch=BATCH,
                n_ubatch=BATCH,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=True,  # what llama.cpp itself chooses; the bindings do not by default
                logits_all=logits_all,
                verbose=False,
            )

        self._path, self._stop = model, stop
        self._plain, self._lookup = load(False), load(True)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._read = 0

    def describe(self) -> Description:
        return Description(llama_cpp.__version__, self._path.stat().st_size, {"flash_attn": "on"})

    def generate(self, ids: list[int], max_tokens: int, settings: Settings) -> Generation:
        llama = self._plain
        if settings:
            llama = self._lookup
            llama.draft_model = LlamaPromptLookupDecoding(**settings)
        llama.reset()  # else a prompt that was seen before is not read again
        llama.calls = 0
        found, seconds, first = timed_generation(self._until_stop(islice(llama.generate(ids, temp=0.0), max_tokens)))
        return Generation(found, seconds, first, llama.calls)

    def _until_stop(self, ids: Iterator[int]) -> Iterator[int]:
        for token in ids:
            yield token
            if token == self._stop:
                return

    def start(self, ids: list[int]) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._plain.ctx), True)
        self._read = 0
        self._decode(ids, all_logits=False)

    def call(self, ids: list[int]) -> None:
        self._decode(ids, all_logits=True)

    def _decode(self, ids: list[int], all_logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row] = token
            batch.pos[row] = self._read + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = all_logits or row == len(ids) - 1
        status = llama_cpp.llama_decode(self._plain.ctx, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_get_logits(self._plain.ctx)
        self._read += len(ids)


if __name__ == "__main__":
    main(LlamaCpp)
