"""Writes a model repository: the model that serves a bundle, and its engines as plain models."""

import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from specrun.engines.backend import GPU_BACKENDS, ORT, ORT_CUDA, TENSORRT
from specrun.engines.errors import RequestError
from specrun.engines.manifest import DRAFT, TARGET, Bundle
from specrun.engines.signature import (
    BATCH,
    CACHE_LENGTH,
    CAPACITY,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITION_IDS,
    ROWS,
    TOKENS,
    TREE,
    TREE_MASK,
    Shape,
    Signature,
)
from specrun.runner.triton.tensors import INPUTS, OUTPUTS, Tensor

MODEL = "specrun"
VERSION = "1"
BUNDLE_FOLDER = "bundle"
# Of plain models: Triton's backend, the name it wants for the file, and the type of the graph's numbers.
BACKENDS = {
    ORT: ("onnxruntime", "model.onnx"),
    ORT_CUDA: ("onnxruntime", "model.onnx"),
    TENSORRT: ("tensorrt", "model.plan"),
}
KINDS = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}
CONTROLS = {
    **dict.fromkeys((INPUT_IDS, POSITION_IDS, CACHE_LENGTH, LOGIT_ROWS), "TYPE_INT64"),
    TREE_MASK: "TYPE_BOOL",
}


@dataclass(frozen=True)
class RepositoryOptions:
    """What `config.pbtxt` is to say."""

    slots: int | None = None  # None: what the service takes
    queue: int = 64
    prefix_cache: int = 1024  # MiB
    gpus: tuple[int, ...] = ()  # devices, an instance of the bundle on each; none: the first
    copy: bool = False  # the bundle into the repository, instead of its path
    engines: bool = False  # its engines as plain models, too


def write_repository(bundle: Bundle, out: Path, options: RepositoryOptions) -> list[str]:
    """Write `out`, which must not exist; returns the names of its models. Raises RequestError."""
    if out.exists():
        raise RequestError(f"{out} exists already; give a directory that does not")
    scratch = out.with_name(f".{out.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        names = [_write_model(bundle, scratch / MODEL, options)]
        if options.engines:
            names += _write_engines(bundle, scratch)
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return names


def _write_model(bundle: Bundle, folder: Path, options: RepositoryOptions) -> str:
    version = folder / VERSION
    version.mkdir(parents=True)
    code = resources.files("specrun.runner.triton") / "model_file.py"
    (version / "model.py").write_text(code.read_text(encoding="utf-8"), encoding="utf-8")
    where = str(bundle.path.resolve())
    if options.copy:
        shutil.copytree(bundle.path, version / BUNDLE_FOLDER)
        where = BUNDLE_FOLDER
    parameters = {"bundle": where, "queue": str(options.queue), "prefix_cache": str(options.prefix_cache)}
    if options.slots is not None:
        parameters["slots"] = str(options.slots)
    on_gpu = bundle.manifest.backend in GPU_BACKENDS
    if options.gpus and not on_gpu:
        raise RequestError(
            f"got GPU {options.gpus[0]} for a bundle of the backend {bundle.manifest.backend}, which uses none"
        )
    devices = ", ".join(map(str, options.gpus or (0,)))
    gpu = f"{{ kind: KIND_GPU count: 1 gpus: [ {devices} ] }}"
    cpu = "{ kind: KIND_CPU count: 1 }"
    (folder / "config.pbtxt").write_text(_config(parameters, gpu if on_gpu else cpu), encoding="utf-8")
    # KIND_GPU does not load on a machine without one: `tritonserver --model-config-name=cpu`.
    (folder / "configs").mkdir()
    (folder / "configs" / "cpu.pbtxt").write_text(_config(parameters, cpu), encoding="utf-8")
    return MODEL


def _config(parameters: dict[str, str], instances: str) -> str:
    quoted = "".join(
        f'parameters {{ key: "{name}" value: {{ string_value: "{_escaped(value)}" }} }}\n'
        for name, value in parameters.items()
    )
    return (
        f'name: "{MODEL}"\nbackend: "python"\nmax_batch_size: 0\n'
        f"model_transaction_policy {{ decoupled: true }}\n"
        f"input [\n{_tensors(INPUTS, optional=True)}\n]\noutput [\n{_tensors(OUTPUTS, optional=False)}\n]\n"
        f"instance_group [ {instances} ]\n{quoted}"
    )


def _tensors(tensors: tuple[Tensor, ...], optional: bool) -> str:
    more = " optional: true" if optional else ""
    return ",\n".join(
        f'  {{ name: "{each.name}" data_type: TYPE_{each.kind} dims: [ {each.dims} ]{more} }}' for each in tensors
    )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _write_engines(bundle: Bundle, out: Path) -> list[str]:
    """The target, the draft model and the heads, each with its KV caches as inputs and outputs, for callers that make
    the rounds themselves."""
    manifest = bundle.manifest
    if manifest.backend not in BACKENDS:
        raise RequestError(f"Triton has no backend for engines of {manifest.backend}: leave --engines out")
    target = manifest.target
    graphs: dict[str, tuple[Path, Signature, str]] = {
        TARGET: (bundle.engine(TARGET), target.signature, target.cache_dtype)
    }
    if manifest.draft is not None:
        graphs[DRAFT] = (bundle.engine(DRAFT), manifest.draft.signature, manifest.draft.cache_dtype)
    for name, head in manifest.heads.items():
        if head.signature is not None and bundle.engine(name).is_file():
            graphs[name] = (bundle.engine(name), head.signature, target.cache_dtype)
    names = []
    for name, (engine, signature, dtype) in graphs.items():
        names.append(_write_engine(bundle, out / f"{MODEL}_{name}", engine, signature, dtype))
    return names


def _write_engine(bundle: Bundle, folder: Path, engine: Path, signature: Signature, dtype: str) -> str:
    backend, file = BACKENDS[bundle.manifest.backend]
    version = folder / VERSION
    version.mkdir(parents=True)
    shutil.copy2(engine, version / file)
    for data in engine.parent.glob(f"{engine.name}.data"):  # ONNX names it inside the graph: the name must stay
        shutil.copy2(data, version)
    kind = "KIND_GPU" if bundle.manifest.backend in GPU_BACKENDS else "KIND_CPU"
    inputs, outputs = signature.inputs(), signature.outputs()
    if bundle.manifest.backend == ORT:
        inputs[LOGIT_ROWS], outputs[LOGITS] = (BATCH, ROWS), (BATCH, ROWS, signature.vocab_size)
    config = (
        f'name: "{folder.name}"\nbackend: "{backend}"\nmax_batch_size: 0\n'
        f"input [\n{_graph_tensors(inputs, dtype)}\n]\n"
        f"output [\n{_graph_tensors(outputs, dtype)}\n]\n"
        f"instance_group [ {{ kind: {kind} count: 1 }} ]\n"
    )
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return folder.name


def _graph_tensors(shapes: dict[str, Shape], dtype: str) -> str:
    lines = []
    for name, shape in shapes.items():
        dims = ", ".join("-1" if axis in (BATCH, TOKENS, TREE, CAPACITY, ROWS) else str(axis) for axis in shape)
        lines.append(f'  {{ name: "{name}" data_type: {CONTROLS.get(name, KINDS[dtype])} dims: [ {dims} ] }}')
    return ",\n".join(lines)
