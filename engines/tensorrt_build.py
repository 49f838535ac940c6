"""Build a TensorRT or TensorRT-RTX engine from an exported graph, through Polygraphy.

One engine has one static profile per width, and two where calls may serve several sequences: for one, for all. Widths
are 2 and more: a profile for one token turns every matrix product into one with a vector, for which TensorRT-RTX stores
the weights a second time, transposed. SmolLM2-135M in FP16 takes 275 MB with the width 1 alone, 494 MB with 1 and 5,
509 MB with 1, 5, 17 and 128, but 298 MB with 2, 5, 17 and 128. So a call of one token has a second row that nobody
reads.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from specrun.engines.accept_kernels import architecture_here
from specrun.engines.backend import TENSORRT_RTX
from specrun.engines.layers import EngineLayers, Layer
from specrun.engines.signature import BATCH, CACHE_LENGTH, CAPACITY, TOKENS, TREE
from specrun.engines.tensorrt import TensorRtError, known_architectures, last_error, library, make_messages
from specrun.export.axes import pin_axes

logger = logging.getLogger(__name__)

FIRST_WIDTH = 2
PRECISION_NAMES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "INT4": "int4", "FP8": "fp8"}
# Layers that hand numbers on as they are.
TRANSPARENT = ("SHUFFLE", "CAST", "IDENTITY")
KV_CACHE_UPDATE, DEQUANTIZE, PLUGIN = "KV_CACHE_UPDATE", "DEQUANTIZE", "PLUGIN"
POLL_SECONDS = 0.1


def build_engine(
    backend: str,
    graph: Path,
    engine: Path,
    shapes: Sequence[tuple[int, int]],
    rows: int,
    gpus: Sequence[str],
    cache: Path,
) -> None:
    """Compile the exported `graph` into `engine`, with what it is made of beside it.

    `shapes`: batch and width of its calls, one profile each; without a KV cache the rows of a call may be anyone's, so
    its batch is 1. `rows`: of the KV cache's buffers. `gpus`: architectures
    that it shall run on. `cache`: directory of timing caches. Raises UnfitError or TensorRtError; when interrupted,
    the builder is stopped first.
    """
    trt, label = library(backend), f"{engine.parent.name}/{engine.stem}"
    loaders, configs, messages = _polygraphy(backend, trt)
    pinned = graph.with_name(f"pinned-{graph.name}")
    model = ir.load(graph)
    inputs = {str(value.name): [str(axis) for axis in value.shape or ()] for value in model.graph.inputs}
    if CACHE_LENGTH not in inputs:
        shapes = sorted({(1, width) for _, width in shapes})
    slots, widths = max(batch for batch, _ in shapes), sorted({width for _, width in shapes})
    pin_axes(model, {CAPACITY: rows, TREE: max(widths), **({BATCH: 1} if slots == 1 else {})})
    ir.save(model, pinned)  # on the export's weights
    del model
    try:
        builder, network, parser = _run(messages, graph, loaders.NetworkFromOnnxPath(str(pinned), strongly_typed=True))
        layers = _describe(network, messages, graph)
        profiles = [_profile(loaders, network, inputs, *shape) for shape in shapes]
        progress = _make_progress(trt, label)
        options: dict[str, Any] = {"profiles": profiles, "progress_monitor": progress}
        timing = None
        if backend == TENSORRT_RTX:  # which times nothing: it chooses kernels where it runs
            capabilities = [(int(gpu[2:-1]), int(gpu[-1])) for gpu in gpus]
            config = configs.CreateConfigRTX(compute_capabilities=capabilities, **options)
        else:
            cache.mkdir(parents=True, exist_ok=True)
            timing = str(cache / f"{backend}-{trt.__version__}-{'-'.join(gpus)}.timing")
            config = loaders.CreateConfig(load_timing_cache=timing if Path(timing).is_file() else None, **options)
        build = loaders.EngineBytesFromNetwork((builder, network, parser), config, save_timing_cache=timing)
        start = time.monotonic()
        data = _interruptible(lambda: _run(messages, graph, build), progress)
        partial = engine.with_name(engine.name + ".partial")
        partial.write_bytes(memoryview(data))
        layers_of = EngineLayers(
            tuple(widths), slots, rows if KV_CACHE_UPDATE in {each.type for each in layers} else 0, layers
        )
        layers_of.write(engine)
        partial.replace(engine)
    finally:
        pinned.unlink(missing_ok=True)
    size = engine.stat().st_size / 2**20
    logger.info("%s: %.0f MiB, built in %.0f s", label, size, time.monotonic() - start)


def require_gpus(backend: str, gpus: Sequence[str]) -> None:
    """Whether `backend` can build for `gpus` on this machine. Raises TensorRtError or UnfitError."""
    known = known_architectures(backend)
    if known is None:
        here = architecture_here()
        if here is None or any(gpu != here for gpu in gpus):
            raise TensorRtError(
                f"the backend {backend} builds for the GPU of the machine it runs on, which is "
                f"{here or 'not there'}; got {', '.join(gpus)}: build there, or with --backend {TENSORRT_RTX}"
            )
        return
    unknown = [gpu for gpu in gpus if gpu not in known]
    if unknown:
        raise TensorRtError(
            f"got GPU {', '.join(unknown)}, {backend} builds for {', '.join(known)}; for others take --backend "
            f"tensorrt on such a machine, or --backend ort-cuda"
        )


def _polygraphy(backend: str, trt: Any) -> tuple[Any, Any, Any]:
    """Polygraphy's loaders for `backend`, its configuration of TensorRT-RTX, and where messages go. Which of the two
    libraries it uses is decided when it is imported."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if backend == TENSORRT_RTX else "0"
    import polygraphy.backend.tensorrt_rtx as configs
    import polygraphy.backend.trt as loaders
    import polygraphy.backend.trt.util as polygraphy_trt
    import polygraphy.config

    if (backend == TENSORRT_RTX) != polygraphy.config.USE_TENSORRT_RTX:
        raise TensorRtError("Polygraphy was imported for the other of TensorRT and TensorRT-RTX; use another process")
    messages = make_messages(trt)
    polygraphy_trt.TRT_LOGGER = messages  # its own one would print
    return loaders, configs, messages


def _run(messages: Any, graph: Path, loader: Any) -> Any:
    """Call a Polygraphy loader; what TensorRT reported becomes an error of ours."""
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            result = loader()
    except PolygraphyException as error:
        raise TensorRtError(f"{graph.name} cannot be compiled: {last_error(messages)} ({error})") from error
    if messages.errors:
        raise TensorRtError(f"{graph.name} cannot be compiled: {last_error(messages)}")
    return result


def _profile(loaders: Any, network: Any, axes: dict[str, list[str]], batch: int, width: int) -> Any:
    profile, sizes = loaders.Profile(), {BATCH: batch, TOKENS: width}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tuple(sizes.get(axis, size) for axis, size in zip(axes[tensor.name], tensor.shape, strict=True))
        profile.add(tensor.name, shape, shape, shape)
    return profile


def _describe(network: Any, messages: Any, graph: Path) -> tuple[Layer, ...]:
    """The layers of a parsed network. Raises TensorRtError where one would not do what the contract says."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    producers = {layer.get_output(at).name: layer for layer in layers for at in range(layer.num_outputs)}
    plugins = sorted({layer.name for layer in layers if layer.type.name.startswith(PLUGIN)})
    if plugins:
        raise TensorRtError(f"{graph.name} needs plugins, which specrun does not use: {', '.join(plugins[:5])}")
    for index in range(network.num_outputs):
        name = network.get_output(index).name
        if name.startswith("present.") and producers[name].type.name != KV_CACHE_UPDATE:
            raise TensorRtError(
                f"{graph.name}: {name} is not a cache updated in place, but a {producers[name].type.name}"
            )
    return tuple(Layer(layer.name, layer.type.name, _precision(layer, producers)) for layer in layers)


def _precision(layer: Any, producers: dict[str, Any]) -> str:
    """What a layer computes in: integers where all it reads was dequantized."""
    names = [layer.get_input(at).name for at in range(layer.num_inputs) if layer.get_input(at) is not None]
    if layer.type.name == "MATRIX_MULTIPLY" and all(_is_dequantized(name, producers) for name in names):
        return "int8"
    kind = layer.get_output(0).dtype.name if layer.num_outputs else ""
    return PRECISION_NAMES.get(kind, "")


def _is_dequantized(tensor: str, producers: dict[str, Any]) -> bool:
    layer = producers.get(tensor)
    while layer is not None and layer.type.name in TRANSPARENT:
        layer = producers.get(layer.get_input(0).name)
    return layer is not None and layer.type.name == DEQUANTIZE


def _make_progress(trt: Any, label: str) -> Any:
    """Reports the builder's outer phases, and stops it when told to."""

    class Progress(trt.IProgressMonitor):  # type: ignore[misc] # imported when it is asked for
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self._outer: set[str] = set()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None or parent in self._outer:
                logger.info("%s: %s", label, name[0].lower() + name[1:])
            if parent is None:
                self._outer.add(name)

        def step_complete(self, name: str, step: int) -> bool:
            return not self.stopped

        def phase_finish(self, name: str) -> None:
            pass

    return Progress()


def _interruptible(build: Any, progress: Any) -> Any:
    """Run `build` in a thread: signals reach the main thread only while it runs Python."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(build())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="engine build")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
    except BaseException:
        progress.stopped = True
        thread.join()
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
