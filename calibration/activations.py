"""What the products of a model read while it reads text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from specrun.calibration.products import Activation, Graph
from specrun.calibration.progress_store import ProgressStore
from specrun.engines import ort
from specrun.engines.signature import Signature
from specrun.engines.whole_text import WholeTextModel

Array = np.ndarray[Any, Any]

SAMPLED_ROWS = 384  # kept of each activation, to try quantizations on
# Of each window those with the largest values are among them: the first token of a text often has values a hundred
# times as large as any other, and a range that cuts them off ruins the whole text.
EXTREME_ROWS = 4


def collect(
    graph: Path,
    signature: Signature,
    windows: Sequence[Sequence[int]],
    scratch: Path,
    store: ProgressStore,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Activation]:
    """Run the exported `graph` over `windows` of token ids; activations by name. Deterministic. Windows that `store`
    knows are not read again."""
    opened = Graph(graph)
    channels = {product.activation: opened.weights(product.weights).shape[0] for product in opened.products()}
    outputs = {output.name for output in opened.model.graph.output}
    opened.model.graph.output.extend(
        helper.make_empty_tensor_value_info(name) for name in channels if name not in outputs
    )
    observed, engine = scratch / "observed.onnx", scratch / "observed-engine.onnx"
    opened.save(observed)
    del opened
    ort.compile_graph(observed, engine)
    model = WholeTextModel(engine, signature)
    random = np.random.default_rng(0)
    per_window = -(-SAMPLED_ROWS // len(windows))
    maxima: dict[str, Array] = {}
    rows: dict[str, list[Array]] = {name: [] for name in channels}
    for index, window in enumerate(windows):
        picked = random.permutation(len(window))[:per_window]
        read = store.window(index)
        if read is None:
            read = {name: _sample(value, picked) for name, value in model.read(window, channels).items()}
            store.keep_window(index, read)
        for name, (largest, sample) in read.items():
            maxima[name] = np.maximum(maxima.get(name, largest), largest)
            rows[name].append(sample)
        progress(index + 1)
    del model
    for file in (*scratch.glob("observed.onnx*"), *scratch.glob("observed-engine.onnx*")):
        file.unlink()
    return {name: Activation(maxima[name], np.concatenate(rows[name])) for name in channels}


def _sample(value: Array, picked: Array) -> tuple[Array, Array]:
    """The largest magnitude of each channel, and the rows that are kept."""
    value = value.astype(np.float32, copy=False)
    magnitudes = np.abs(value)
    extreme = np.argsort(-magnitudes.max(1), kind="stable")[:EXTREME_ROWS]
    return magnitudes.max(0), value[np.union1d(picked, extreme)]
