"""The accept step on the device: verdicts for a batch of requests."""

from typing import Any

import numpy as np

from specrun.runner.cuda.mirror import Mirror
from specrun.runner.cuda.row_sampler import RowSampler
from specrun.runner.filters import LogitsError
from specrun.runner.types import Verdict


class CudaAcceptor:
    """`accept` for a batch of requests whose logits lie on the device."""

    def __init__(self, sampler: RowSampler, device: Any, stream: Any, rejection: bool = False) -> None:
        """`rejection`: some requests may be judged by the rejection rule."""
        self._sampler = sampler
        self._stream = stream
        self._rejection = rejection
        self._verdicts = Mirror(device, stream, (sampler.shape.requests, 1 + sampler.shape.rows), np.int32)

    def launch(self, logits: int, draft_probs: int = 0) -> None:
        """Kernels from logits to verdicts; may be captured in a CUDA graph. `logits`: device address, [requests, rows,
        stride]. `draft_probs`: device address, float32 [requests, rows - 1, columns], for the rejection rule."""
        sampler = self._sampler
        rows, columns = np.int32(sampler.shape.rows), np.int32(sampler.shape.columns)
        kernels = sampler.kernels
        sampler.launch_summaries(logits, with_mass=self._rejection)
        if self._rejection:
            kernels.launch(
                self._stream,
                "reject",
                (sampler.shape.requests, 1),
                sampler.shape.threads,
                sampler.values,
                sampler.summaries.pointer,
                sampler.requests.pointer,
                sampler.tokens.pointer,
                np.uint64(draft_probs),
                rows,
                columns,
                self._verdicts.pointer,
            )
        sampler.launch_noise(drafting=False)
        kernels.launch(
            self._stream,
            "walk",
            (sampler.shape.requests, 1),
            32,
            sampler.best_tokens.pointer,
            sampler.requests.pointer,
            sampler.tokens.pointer,
            sampler.parents.pointer,
            rows,
            self._verdicts.pointer,
        )

    def verdicts(self) -> list[Verdict]:
        """Of the requests that were written, in order. Waits for the device. Raises LogitsError."""
        numbers = self.read()
        found = []
        for index in np.flatnonzero(self._sampler.requests.array["rows"]):
            accepted, next_token, *path = map(int, numbers[index])
            if next_token < 0:
                position = int(self._sampler.requests.array[index]["position"]) + accepted
                raise LogitsError(
                    f"position {position}: the largest logit is no finite number, or no token may be chosen"
                )
            found.append(Verdict(tuple(row - 1 for row in path[:accepted]), next_token))
        return found

    def read(self) -> np.ndarray[Any, Any]:
        """The kernels' own numbers, int32 [requests, 1 + rows]: accepted nodes, next token or -1, rows of the path.
        Waits for the device."""
        self._verdicts.download(self._stream)
        self._stream.sync()
        return self._verdicts.array
