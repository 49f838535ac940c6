"""Rows of logits on the device. What comes back to the host are verdicts, guesses, and single rows on request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.runner.cuda.acceptor import CudaAcceptor
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.cuda.row_sampler import Part, RowSampler, Shape
from specrun.runner.logits import Place
from specrun.runner.sampling import NO_GUESSES, Chooser, Guesses
from specrun.runner.types import Proposal, Verdict

Array = np.ndarray[Any, Any]


class DeviceLogits:
    """Where the rows of an engine's calls lie: at the same address for all calls."""

    def __init__(
        self,
        gpu: Gpu,
        rows: int,
        stride: int,
        columns: int,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
    ) -> None:
        """`rows`: of the widest call. `stride`: logits from one row to the next; `columns`: those that count.
        `vocabulary_size`: of the target. `ids`: the token of each column, of a draft with a reduced vocabulary."""
        self._gpu = gpu
        self._stride, self._columns, self._dtype = stride, columns, np.dtype(dtype)
        self._vocabulary_size = vocabulary_size
        self._ids = ids
        self._buffer = gpu.zeros(rows * stride * self._dtype.itemsize)
        self._judges: dict[tuple[int, bool], _Judge] = {}
        self._guessers: dict[tuple[int, int, bool], _Guesser] = {}
        self._row = Mirror(gpu.device, gpu.stream, (stride,), self._dtype)

    @property
    def address(self) -> int:
        return int(self._buffer.handle)

    def rows(self, first: int, count: int) -> "DeviceRows":
        """Those that a call left for one sequence."""
        return DeviceRows(self, first, count)

    def accept(self, first: int, proposal: Proposal, chooser: Chooser, position: int) -> Verdict:
        """With the rows from `first` on. Waits for the device. Raises LogitsError or DeviceError."""
        rows, rejects = _rounded_up(1 + len(proposal.tokens)), chooser.sampling.rejects
        if (rows, rejects) not in self._judges:
            sampler = self._sampler(requests=1, rows=rows, guesses=1)
            self._judges[rows, rejects] = _Judge(self._gpu, sampler, rejects)
        return self._judges[rows, rejects].verdict(self._address_of(first), Part(chooser, position, proposal))

    def guess(self, first: int, places: Sequence[Place], chooser: Chooser, count: int) -> list[Guesses]:
        """With the rows from `first` on. Waits for the device. Raises DeviceError."""
        if not places:
            return []
        assert [at.row - places[0].row for at in places] == list(range(len(places)))
        rows, rejects = _rounded_up(len(places)), chooser.sampling.rejects
        count = 1 if rejects else min(count, self._columns)
        if (rows, count, rejects) not in self._guessers:
            sampler = self._sampler(requests=rows, rows=1, guesses=count)
            self._guessers[rows, count, rejects] = _Guesser(self._gpu, sampler, rejects)
        parts = [Part(chooser, at.position, path=at.path) for at in places]
        found = self._guessers[rows, count, rejects].guesses(self._address_of(first + places[0].row), parts)
        processor = chooser.processor
        return [
            each if processor is None or processor.may_continue(at.path) else NO_GUESSES
            for each, at in zip(found, places, strict=True)
        ]

    def row(self, index: int) -> Array:
        """Waits for the device. Raises DeviceError."""
        from cuda.core import Buffer

        size = self._stride * self._dtype.itemsize
        source = Buffer.from_handle(self._address_of(index), size, owner=self._buffer)
        with device_errors("reading logits"):
            self._row.copy_from(source, self._gpu.stream)
            self._row.download(self._gpu.stream)
        self._gpu.sync()
        return self._row.array[: self._columns].astype(np.float32)

    def _address_of(self, row: int) -> int:
        return self.address + row * self._stride * self._dtype.itemsize

    def _sampler(self, requests: int, rows: int, guesses: int) -> RowSampler:
        shape = Shape(
            requests=requests,
            rows=rows,
            columns=self._columns,
            stride=self._stride,
            dtype=self._dtype.name,
            vocabulary_size=self._vocabulary_size,
            guesses=guesses,
        )
        return RowSampler(self._gpu.kernels, self._gpu.device, self._gpu.stream, shape, self._ids)


@dataclass(frozen=True)
class DeviceRows:
    """The rows of one sequence; as `Logits`."""

    logits: DeviceLogits
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def accept(self, proposal: Proposal, chooser: Chooser, position: int) -> Verdict:
        return self.logits.accept(self.first, proposal, chooser, position)

    def guess(self, places: Sequence[Place], chooser: Chooser, count: int) -> list[Guesses]:
        return self.logits.guess(self.first, places, chooser, count)

    def row(self, index: int) -> Array:
        return self.logits.row(self.first + index)


class _Judge:
    """Verdicts for proposals of up to so many nodes. Its launches are captured in a CUDA graph for each address, at the
    second one."""

    def __init__(self, gpu: Gpu, sampler: RowSampler, rejects: bool) -> None:
        self._gpu, self._sampler = gpu, sampler
        self._acceptor = CudaAcceptor(sampler, gpu.device, gpu.stream, rejection=rejects)
        shape = sampler.shape
        size = (shape.rows - 1, shape.columns) if rejects else (0,)
        self._draft_probs = Mirror(gpu.device, gpu.stream, size, np.float32)
        self._warm: set[int] = set()
        self._graphs: dict[int, Any] = {}

    def verdict(self, logits: int, part: Part) -> Verdict:
        """`logits`: address of the first row."""
        with device_errors("the accept step"):
            self._sampler.write([part])
            for index, probs in enumerate(part.proposal.draft_probs or ()):
                self._draft_probs.array[index] = 0
                self._draft_probs.array[index, : len(probs)] = probs[: self._sampler.shape.columns]
            if part.proposal.draft_probs:
                self._draft_probs.upload(self._gpu.stream)
            if logits in self._warm and logits not in self._graphs:
                self._graphs[logits] = self._gpu.captured(lambda: self._launch(logits))
            if logits in self._graphs:
                self._graphs[logits].launch(self._gpu.stream)
            else:
                self._launch(logits)
                self._warm.add(logits)
            (verdict,) = self._acceptor.verdicts()
        return verdict

    def _launch(self, logits: int) -> None:
        self._acceptor.launch(logits, int(self._draft_probs.pointer))


class _Guesser:
    """Guesses of a draft for up to so many rows that follow each other."""

    def __init__(self, gpu: Gpu, sampler: RowSampler, rejects: bool) -> None:
        self._gpu, self._sampler = gpu, sampler
        size = (sampler.shape.requests, sampler.shape.vocabulary_size) if rejects else (0,)
        self._probs = Mirror(gpu.device, gpu.stream, size, np.float32)
        self._rejects = rejects

    def guesses(self, logits: int, parts: Sequence[Part]) -> list[Guesses]:
        with device_errors("a draft's guess"):
            self._sampler.write(parts)
            self._sampler.launch_choices(logits, drafting=True, probs=int(self._probs.pointer) if self._rejects else 0)
            if self._rejects:
                self._probs.download(self._gpu.stream)
            found = self._sampler.guesses()
        if not self._rejects:
            return found
        return [
            Guesses(each.tokens, each.shares, probs.copy()) if len(each.tokens) else each
            for each, probs in zip(found, self._probs.array, strict=False)
        ]


def _rounded_up(rows: int) -> int:
    """To a power of two: how many kinds of launches there are."""
    return 1 << (rows - 1).bit_length()
