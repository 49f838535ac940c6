"""Which layers an early exit leaves out: asked for by the user, or measured."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specrun.engines.compiler import Compile
from specrun.engines.errors import SpecrunError
from specrun.engines.signature import Signature
from specrun.engines.whole_text import WholeTextModel
from specrun.export.early_exit import skip_layers

logger = logging.getLogger(__name__)

EARLY_EXIT, SKIP = "early-exit", "skip"
# Layers kept, as shares of all: what is tried where the user leaves the choice to the build.
SHARES = (1 / 8, 1 / 4, 1 / 3, 1 / 2)


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


def compile_exit(export: Path, engine: Path, signature: Signature, compile_graph: Compile) -> None:
    """The engine of the early exit that `signature.skipped` describes, from an exported target."""
    graph = ir.load(export)
    skip_layers(graph, signature)
    cut = export.with_name("early_exit.onnx")
    ir.save(graph, cut)  # on the export's weights
    del graph
    compile_graph(cut, engine)
    cut.unlink()


def choose_exit(
    export: Path,
    signature: Signature,
    texts: Sequence[Sequence[int]],
    k: int,
    scratch: Path,
    compile_graph: Compile,
) -> tuple[int, ...]:
    """The early exit that promises the largest speed-up on `texts`, token ids each: how often it agrees with the
    target's greedy choice, against its share of the target's time, both on ONNX Runtime. `compile_graph`: for that."""
    plain = replace(signature, taps=())
    target_engine = scratch / "whole.onnx"
    compile_graph(export, target_engine)
    target = WholeTextModel(target_engine, plain)
    wanted = [target.choices(text) for text in texts]
    step = target.step_seconds()
    best: tuple[float, tuple[int, ...]] | None = None
    for kept in sorted({max(1, round(share * signature.num_layers)) for share in SHARES}):
        if kept >= signature.num_layers:
            continue
        skipped = tuple(range(kept, signature.num_layers))
        exit_signature = replace(plain, skipped=skipped)
        engine = scratch / f"exit-{kept}.onnx"
        compile_exit(export, engine, exit_signature, compile_graph)
        model = WholeTextModel(engine, exit_signature)
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
    for file in scratch.glob(f"{target_engine.name}*"):
        file.unlink()
    if best is None:
        raise EarlyExitError(f"a target of {signature.num_layers} layers has no early exit")
    if best[0] < 1:
        logger.warning("no early exit promises to pay; the best one, %.2fx, was built all the same", best[0])
    return best[1]
