"""Choices from rows of logits that lie on the device. Only a few numbers a row come back to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrun.runner.arithmetic import MASS_BITS
from specrun.runner.cuda.kernels import NO_POINTER, AcceptKernels
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.sampling import NO_GUESSES, Chooser, Guesses
from specrun.runner.types import EMPTY, ROOT, Proposal

Array = np.ndarray[Any, Any]

THREADS, CHUNKS = 1024, 16

# The structs of accept.cu.
REQUEST = np.dtype(
    [
        ("seed", "u8"),
        ("position", "u8"),
        ("top_p", "f8"),
        ("inverse_temperature", "f4"),
        ("min_p_distance", "f4"),
        ("repetition_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("top_k", "i4"),
        ("greedy", "i4"),
        ("rejection", "i4"),
        ("deterministic", "i4"),
        ("masked", "i4"),
        ("rows", "i4"),
        ("first_edit", "i4"),
        ("edits", "i4"),
    ],
    align=True,
)
EDIT = np.dtype([("column", "i4"), ("bias", "f4"), ("count", "f4"), ("seen", "i4")])
SUMMARY = np.dtype([("mass", "u8"), ("top", "f4"), ("threshold", "f4"), ("best", "i4"), ("valid", "i4")], align=True)


@dataclass(frozen=True)
class Shape:
    """What stays the same from call to call."""

    requests: int
    rows: int  # of each request: 1 + the nodes that are proposed at most
    columns: int  # logits of a row that count: padding is cut off
    stride: int  # logits from one row to the next
    dtype: str  # of the logits: float32, bfloat16 or float16
    vocabulary_size: int  # of the target, which masks and draft probabilities are counted in
    edits: int = 1 << 14  # columns that the processors of one request may change
    guesses: int = 1  # best tokens per row
    threads: int = field(default_factory=lambda: THREADS)  # of a block
    chunks: int = field(default_factory=lambda: CHUNKS)  # blocks that share a row where they can


@dataclass(frozen=True)
class Part:
    """One request's part of a call: the rows of `proposal`, after its root's row."""

    chooser: Chooser
    position: int  # of the first proposed token
    proposal: Proposal = EMPTY
    path: Sequence[int] | None = ()  # tokens between the committed ones and the first proposed one; None: not known


class RowSampler:
    """Chooses from rows of logits that lie on the device: a target's or a draft's.

    A call goes `write` (host arrays filled, copied), `launch_choices` (kernels only, nothing else: may be captured
    in a CUDA graph), then `guesses`.
    """

    def __init__(
        self,
        kernels: AcceptKernels,
        device: Any,
        stream: Any,
        shape: Shape,
        ids: Array | None = None,
    ) -> None:
        """`ids`: the token of each column, ascending, of a draft with a reduced vocabulary."""
        self.shape = shape
        self.kernels = kernels
        self._stream = stream
        self._ids = ids
        rows = (shape.requests, shape.rows)
        mask_words = -(-shape.vocabulary_size // 32)

        def mirror(dims: tuple[int, ...], dtype: Any) -> Mirror:
            return Mirror(device, stream, dims, dtype)

        self.requests = mirror((shape.requests,), REQUEST)
        self.tokens = mirror(rows, np.int32)
        self.parents = mirror(rows, np.int32)
        self._edits = mirror((shape.requests * min(shape.edits, shape.columns),), EDIT)
        self._masks = mirror((*rows, mask_words), np.uint32)
        self._token_ids = mirror((0,) if ids is None else ids.shape, np.int32)
        self.summaries = mirror(rows, SUMMARY)
        self.best_tokens = mirror((*rows, shape.guesses), np.int32)
        self._best_values = mirror((*rows, shape.guesses), np.float32)
        self._best_masses = mirror(rows, np.uint64)
        # Processed logits, then noisy scores: these never leave the device.
        self._values = device.allocate(4 * shape.requests * shape.rows * shape.columns, stream=stream)
        if ids is not None:
            self._token_ids.array[:] = ids
            self._token_ids.upload(stream)

    def write(self, parts: Sequence[Part]) -> None:
        """Tell the device about the next call: one part a request, in order; fewer than the shape has leave the rest
        idle. What an earlier call gave must have been read: its inputs are written over."""
        if len(parts) > self.shape.requests:
            raise AssertionError(f"got {len(parts)} requests, the shape has {self.shape.requests}")
        self.requests.array["rows"] = 0
        first_edit = 0
        for index, part in enumerate(parts):
            first_edit = self._write_part(index, part, first_edit)
        for mirror in (self.requests, self.tokens, self.parents):
            mirror.upload(self._stream)
        if first_edit:
            self._edits.upload(self._stream)
        if self.requests.array["masked"].any():
            self._masks.upload(self._stream)

    def launch_summaries(self, logits: int, with_mass: bool) -> None:
        """Process and summarize the rows of logits at device address `logits`."""
        shape, every = self.shape, self._rows
        self._launch(
            f"process_{shape.dtype}",
            (shape.chunks, every),
            np.uint64(logits),
            np.int32(shape.stride),
            self.values,
            self.requests.pointer,
            self.tokens.pointer,
            self.parents.pointer,
            self._edits.pointer,
            self._masks.pointer,
            np.int32(self._masks.array.shape[-1]),
            self._id_pointer,
            np.int32(shape.rows),
            np.int32(shape.columns),
        )
        self._launch(
            "summarize", (every, 1), self.values, self.summaries.pointer, *self._row_arguments, np.int32(with_mass)
        )

    def launch_choices(self, logits: int, drafting: bool = False, probs: int = 0) -> None:
        """All the way to the best tokens of each row. `probs`: device address where a draft's distributions are to go,
        float32 [requests, rows, vocabulary_size], zero where the draft knows no token; for the rejection rule."""
        self.launch_summaries(logits, with_mass=bool(probs))
        if probs:
            self._launch(
                "probabilities",
                (self.shape.chunks, self._rows),
                self.values,
                self.summaries.pointer,
                self.requests.pointer,
                self._id_pointer,
                np.int32(self.shape.rows),
                np.int32(self.shape.columns),
                np.int32(self.shape.vocabulary_size),
                np.uint64(probs),
            )
        self.launch_noise(drafting)

    def launch_noise(self, drafting: bool) -> None:
        """From summaries on."""
        shape = self.shape
        self._launch(
            "add_noise",
            (shape.chunks, self._rows),
            self.values,
            self.summaries.pointer,
            self.requests.pointer,
            self.parents.pointer,
            self._id_pointer,
            np.int32(shape.rows),
            np.int32(shape.columns),
            np.int32(drafting),
        )
        self._launch(
            "best",
            (self._rows, 1),
            self.values,
            self.summaries.pointer,
            self.requests.pointer,
            self._id_pointer,
            np.int32(shape.rows),
            np.int32(shape.columns),
            np.int32(shape.guesses),
            self.best_tokens.pointer,
            self._best_values.pointer,
            self._best_masses.pointer if drafting else NO_POINTER,
        )

    def guesses(self) -> list[Guesses]:
        """Of row 0 of each request, as `Chooser.best` gives them; the distributions stay on the device. Waits."""
        for mirror in (self.best_tokens, self._best_values, self._best_masses, self.summaries):
            mirror.download(self._stream)
        self._stream.sync()
        return [self._guesses_of(int(index)) for index in np.flatnonzero(self.requests.array["rows"])]

    @property
    def values(self) -> np.uint64:
        return np.uint64(int(self._values.handle))

    @property
    def _rows(self) -> int:
        return self.shape.requests * self.shape.rows

    @property
    def _id_pointer(self) -> np.uint64:
        return NO_POINTER if self._ids is None else self._token_ids.pointer

    @property
    def _row_arguments(self) -> tuple[Any, ...]:
        return self.requests.pointer, np.int32(self.shape.rows), np.int32(self.shape.columns)

    def _guesses_of(self, index: int) -> Guesses:
        tokens = self.best_tokens.array[index, 0]
        values = self._best_values.array[index, 0][tokens >= 0]
        tokens = tokens[tokens >= 0].astype(np.int64)
        if not len(tokens):
            return NO_GUESSES
        if self.requests.array[index]["rejection"]:
            mass = float(self.summaries.array[index, 0]["mass"])
            largest = np.float32(2.0**MASS_BITS) * np.float32(1 / mass)
            return Guesses(tokens, np.log(np.array([largest], np.float64)), None)
        total = float(self._best_masses.array[index, 0])
        shares = (values - values[0]).astype(np.float64) - np.log(total / 2.0**MASS_BITS)
        return Guesses(tokens, shares, None)

    def _launch(self, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        self.kernels.launch(self._stream, name, grid, self.shape.threads, *arguments)

    def _write_part(self, index: int, part: Part, first_edit: int) -> int:
        proposal, chooser = part.proposal, part.chooser
        rows = 1 + len(proposal.tokens)
        if rows > self.shape.rows:
            raise AssertionError(f"got {rows - 1} proposed nodes, the shape has {self.shape.rows - 1}")
        self.tokens.array[index, 1:rows] = proposal.tokens
        self.parents.array[index, 0] = ROOT
        self.parents.array[index, 1:rows] = np.add(proposal.parents, 1)
        policy, processing = chooser.policy, chooser.processing
        request = self.requests.array[index : index + 1]
        request["seed"], request["position"], request["rows"] = chooser.seed, part.position, rows
        request["greedy"], request["rejection"] = policy.greedy, chooser.sampling.rejects
        request["deterministic"] = proposal.draft_probs is None
        request["top_k"], request["top_p"] = policy.top_k, policy.top_p
        request["inverse_temperature"], request["min_p_distance"] = policy.inverse_temperature, policy.min_p_distance
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            request[name] = getattr(processing, name)
        request["masked"] = self._write_masks(index, part)
        edits = self._edits_of(part)
        end = first_edit + len(edits)
        if len(edits) > self.shape.edits:
            raise AssertionError(f"got {len(edits)} edited logits, the shape has room for {self.shape.edits}")
        self._edits.array[first_edit:end] = edits
        request["first_edit"], request["edits"] = first_edit, len(edits)
        return end

    def _write_masks(self, index: int, part: Part) -> bool:
        if part.chooser.processor is None:
            return False
        masked = False
        first: list[int] | None = None if part.path is None else list(part.path)
        paths = [first]
        for token, parent in zip(part.proposal.tokens, part.proposal.parents, strict=True):
            paths.append([*(paths[parent + 1] or ()), token])
        for row, path in enumerate(paths):
            allowed = part.chooser.processor.allowed(path)
            words = self._masks.array[index, row]
            if allowed is None:
                words[:] = 0xFFFFFFFF
                continue
            masked = True
            bits = np.packbits(allowed, bitorder="little")
            words.view(np.uint8)[: len(bits)] = bits
        return masked

    def _edits_of(self, part: Part) -> Array:
        if part.chooser.processor is None:
            return np.empty(0, EDIT)
        tokens, bias, counts, seen = part.chooser.processor.edits(part.path or (), part.proposal.tokens)
        if self._ids is None:
            there = tokens < self.shape.columns
            columns = tokens[there]
        else:
            columns = np.minimum(np.searchsorted(self._ids, tokens), len(self._ids) - 1)
            there = self._ids[columns] == tokens
            columns = columns[there]
        edits = np.empty(len(columns), EDIT)
        edits["column"], edits["bias"], edits["count"] = columns, bias[there], counts[there]
        edits["seen"] = seen[there]
        return edits
