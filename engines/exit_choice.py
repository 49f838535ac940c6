"""Which layers an early exit leaves out: asked for by the user, or measured."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from specrun.engines import ort
from specrun.engines.errors import SpecrunError
from specrun.engines.signature import (
    CACHE_LENGTH,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    TREE_MASK,
    Signature,
    past,
    present,
)
from specrun.export.early_exit import skip_layers

logger = logging.getLogger(__name__)

EARLY_EXIT, SKIP = "early-exit", "skip"
# Layers kept, as shares of all: what is tried where the user leaves the choice to the build.
SHARES = (1 / 8, 1 / 4, 1 / 3, 1 / 2)
TIMED_CALLS = 9
MAX_TEXT_TOKENS = 256


class EarlyExitError(SpecrunError):
    """An early exit that the target cannot have."""


def parse_early_exit(option: str) -> tuple[int, ...] | int | None:
    """What `--draft OPTION` asks for: the number of first layers to keep (`early-exit:N`), 0 for a measured choice
    (`early-exit`), the layers to leave out (`skip:3,5-8`), or None if it is no early exit. Raises EarlyExitError.
    """
    kind, _, value = option.partition(":")
    if kind == EARLY_EXIT:
        if value and not value.isdigit():
            raise EarlyExitError(f"got {option!r}, expected {EARLY_EXIT} or {EARLY_EXIT}:N with a number of layers")
        return int(value) if value else 0
    if kind != SKIP or not value:
        return None
    skipped: set[int] = set()
    for part in value.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise EarlyExitError(f"got {option!r}, expected for example {SKIP}:3,5-8 (layers count from 0)")
        skipped |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(skipped))


def skipped_layers(asked: tuple[int, ...] | int, num_layers: int) -> tuple[int, ...]:
    """The layers that are left out. Raises EarlyExitError."""
    skipped = tuple(range(asked, num_layers)) if isinstance(asked, int) else asked
    if not skipped or skipped[-1] >= num_layers or len(skipped) >= num_layers:
        raise EarlyExitError(
            f"the target has layers 0 to {num_layers - 1}; an early exit must keep at least one and leave out at least "
            f"one of them, got {len(skipped)} to leave out, the last {skipped[-1] if skipped else 'none'}"
        )
    return skipped


def compile_exit(export: Path, engine: Path, signature: Signature) -> None:
    """The engine of the early exit that `signature.skipped` describes, from an exported target."""
    graph = ir.load(export)
    skip_layers(graph, signature)
    cut = export.with_name("early_exit.onnx")
    ir.save(graph, cut)  # on the export's weights
    del graph
    ort.compile_graph(cut, engine)
    cut.unlink()


def choose_exit(
    export: Path, target_engine: Path, signature: Signature, texts: Sequence[Sequence[int]], k: int, scratch: Path
) -> tuple[int, ...]:
    """The early exit that promises the largest speed-up on `texts`, token ids each: how often it agrees with the
    target's greedy choice, against its share of the target's time."""
    plain = replace(signature, taps=())
    target = _Model(target_engine, plain)
    wanted = [target.choices(text) for text in texts]
    step = target.step_seconds()
    best: tuple[float, tuple[int, ...]] | None = None
    for kept in sorted({max(1, round(share * signature.num_layers)) for share in SHARES}):
        if kept >= signature.num_layers:
            continue
        skipped = tuple(range(kept, signature.num_layers))
        exit_signature = replace(plain, skipped=skipped)
        engine = scratch / f"exit-{kept}.onnx"
        compile_exit(export, engine, exit_signature)
        model = _Model(engine, exit_signature)
        agreement = float(np.mean(np.concatenate([model.choices(text) for text in texts]) == np.concatenate(wanted)))
        cost = model.step_seconds() / step
        length = sum(agreement**position for position in range(k + 1))
        speedup = length / (1 + k * cost)
        logger.info(
            "early exit after %d layers: agrees on %.0f %%, takes %.0f %% of the time, promises %.2fx",
            kept,
            100 * agreement,
            100 * cost,
            speedup,
        )
        if best is None or speedup > best[0]:
            best = (speedup, skipped)
        del model
        for file in scratch.glob(f"{engine.name}*"):
            file.unlink()
    if best is None:
        raise EarlyExitError(f"a target of {signature.num_layers} layers has no early exit")
    if best[0] < 1:
        logger.warning("no early exit promises to pay; the best one, %.2fx, was built all the same", best[0])
    return best[1]


class _Model:
    """Whole texts and single steps, on an empty cache."""

    def __init__(self, engine: Path, signature: Signature) -> None:
        self._session = ort.load_engine(engine)
        self._signature = signature
        self._binding = self._session.io_binding()
        dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self._dtype = dtype[self._session.get_outputs()[0].type]
        shape = (1, signature.kv_heads, MAX_TEXT_TOKENS, signature.head_dim)
        for part in signature.cache_parts():
            cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, self._dtype))
            self._binding.bind_ortvalue_input(past(*part), cache)
            self._binding.bind_ortvalue_output(present(*part), cache)

    def choices(self, text: Sequence[int]) -> np.ndarray[Any, Any]:
        """The greedy choice after each token."""
        return np.asarray(self._call(list(text[:MAX_TEXT_TOKENS])).argmax(-1))

    def step_seconds(self) -> float:
        times = []
        for _ in range(TIMED_CALLS):
            start = time.perf_counter()
            self._call([0])
            times.append(time.perf_counter() - start)
        return median(times)

    def _call(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        width = len(tokens)
        inputs = {
            INPUT_IDS: np.array([tokens], np.int64),
            POSITION_IDS: np.arange(width)[None],
            CACHE_LENGTH: np.zeros(1, np.int64),
            TREE_MASK: np.tri(width, dtype=bool)[None],
        }
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        logits = np.empty((1, width, self._signature.vocab_size), self._dtype)
        self._binding.bind_ortvalue_output(LOGITS, onnxruntime.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(self._binding)
        return np.asarray(logits[0])
