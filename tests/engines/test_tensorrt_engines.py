"""Real engines of TensorRT-RTX, which it builds without a GPU: what they are made of, and what is refused."""

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specrun.engines import tensorrt, tensorrt_build
from specrun.engines.backend import TENSORRT_RTX
from specrun.engines.build import build_bundle
from specrun.engines.build_options import BuildOptions
from specrun.engines.errors import UnfitError
from specrun.engines.layers import EngineLayers
from specrun.engines.manifest import Bundle
from specrun.engines.precision import PrecisionError
from specrun.engines.source import BuildError
from specrun.engines.tensorrt import TensorRtError
from tests import tiny, tiny_heads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tensorrt_rtx is a test dependency on Linux only")

ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
LAYERS = 8


def small_model(directory: Path) -> Path:
    """TensorRT's attention wants heads of 16 columns or more."""
    config = tiny.llama(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, max_position_embeddings=96)
    return tiny.save_checkpoint(directory, tiny.make_model(config, seed=1, sharpness=12.0))


@pytest.fixture(scope="module", params=["fp16", "int8"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path) -> Bundle:
    directory = tmp_path_factory.mktemp(request.param)
    return tiny.make_bundle(
        directory,
        deep_checkpoint,
        tiny_heads.medusa(directory / "medusa"),
        tiny_heads.eagle1(directory / "eagle1"),
        tiny_heads.eagle3(directory / "eagle3"),
        "early-exit:6",
        small_model(directory / "draft"),
        nodes=9,
        backend=TENSORRT_RTX,
        precision=request.param,
        gpus=("sm89",),
        accept_quality_loss=True,
    )


def kinds(bundle: Bundle, engine: str) -> Counter[tuple[str, str]]:
    return Counter((layer.type, layer.precision) for layer in EngineLayers.read(bundle.path / engine).layers)


@pytest.mark.parametrize(
    ("engine", "attentions"),
    [
        ("target/model.engine", LAYERS),
        ("target/early_exit.engine", 6),
        ("draft/model.engine", 1),
        ("eagle/model.engine", 1),
        ("eagle3/model.engine", 1),
        ("medusa/model.engine", 0),
        ("eagle3/fuse.engine", 0),
    ],
)
def test_every_engine_has_native_attention_and_a_profile_for_each_width(
    engine: str, attentions: int, bundle: Bundle
) -> None:
    made_of, counts = EngineLayers.read(bundle.path / engine), kinds(bundle, engine)
    assert counts["ATTENTION_INPUT", "fp16"] == attentions
    assert counts["KV_CACHE_UPDATE", "fp16"] == 2 * attentions
    assert not [kind for kind, _ in counts if kind.startswith("PLUGIN")]
    assert made_of.widths == bundle.manifest.engine_widths
    assert (bundle.path / engine).stat().st_size > 10_000
    precisions = {precision for kind, precision in counts if kind == "MATRIX_MULTIPLY"}
    quantized = bundle.manifest.precision == "int8" and engine.startswith(("target", "draft"))
    assert precisions <= ({"int8", "fp16"} if quantized else {"fp16"})
    assert ("int8" in precisions) == quantized


def test_profiles_of_the_precisions(bundle: Bundle) -> None:
    """Quantized engines decode at one width: two widths may round differently."""
    wanted = (10, 128) if bundle.manifest.precision == "int8" else (2, 5, 10, 128)
    assert bundle.manifest.engine_widths == wanted


def test_the_bundle_records_what_it_is_for(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert (manifest.backend, manifest.gpus) == (TENSORRT_RTX, ("sm89",))
    assert manifest.versions[TENSORRT_RTX] == tensorrt.version(TENSORRT_RTX)
    assert "--backend tensorrt-rtx" in manifest.command
    with pytest.raises(UnfitError, match=r"this GPU is sm120, .* rebuild it with: specrun build .* --gpu sm120"):
        bundle.require_gpu("sm120")


def test_the_weights_are_stored_once(tmp_path: Path) -> None:
    """A profile for one token would store them again, transposed."""
    config = tiny.llama(hidden_size=512, intermediate_size=1024, vocab_size=320)
    checkpoint = tiny.save_checkpoint(tmp_path / "wide", tiny.make_model(config))
    bundle = tiny.make_bundle(tmp_path, checkpoint, backend=TENSORRT_RTX, gpus=("sm89",))
    weights = 2 * bundle.manifest.target.parameters
    assert weights < (bundle.path / "target/model.engine").stat().st_size < 1.9 * weights + 6e6


@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_an_engine_is_built_for(gpu: str, tmp_path: Path, draft_checkpoint: Path) -> None:
    bundle = tiny.make_bundle(
        tmp_path, small_model(tmp_path / "target"), backend=TENSORRT_RTX, gpus=(gpu,), capacity=64
    )
    assert bundle.engine("target").stat().st_size > 10_000
    assert bundle.manifest.gpus == (gpu,)


@pytest.mark.parametrize(("precision", "shapes"), [("fp16", 7), ("int8", 2)])
def test_engines_serve_several_sequences_in_one_call(precision: str, shapes: int, tmp_path: Path) -> None:
    """A profile for one and one for all of each width that decodes; quantized engines for all only. Caches are updated
    in place there, too."""
    model = tiny.make_model(tiny.llama(num_hidden_layers=1), seed=1, sharpness=12.0)
    bundle = tiny.make_bundle(
        tmp_path,
        tiny.save_checkpoint(tmp_path / "target", model),
        tiny_heads.medusa(tmp_path / "medusa"),
        backend=TENSORRT_RTX,
        precision=precision,
        gpus=("sm89",),
        nodes=9,
        capacity=64,
        slots=4,
        accept_quality_loss=True,
    )
    assert len(bundle.manifest.shapes) == shapes
    assert bundle.manifest.shapes[-1] == (1, 128)
    target, heads = (EngineLayers.read(bundle.path / name / "model.engine") for name in ("target", "medusa"))
    assert (target.slots, target.widths) == (4, bundle.manifest.engine_widths)
    assert sum(layer.type == "KV_CACHE_UPDATE" for layer in target.layers) == 2
    assert heads.slots == 1, "rows without a cache may be anyone's"
    assert "--slots 4" in bundle.manifest.command


def test_slots_are_for_engines_with_fixed_shapes(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"got 4 slots for the backend ort, whose engines serve any number"):
        BuildOptions("m", tmp_path, slots=4)
    with pytest.raises(BuildError, match=r"got 0 slots, expected 1 to 64"):
        BuildOptions("m", tmp_path, slots=0)


def test_all_known_architectures_are_tested() -> None:
    assert tensorrt.known_architectures(TENSORRT_RTX) == ARCHITECTURES


def test_what_cannot_be_built_is_refused_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TensorRtError, match=r"got GPU sm90, tensorrt-rtx builds for sm75, .*; for others"):
        BuildOptions("m", tmp_path, backend=TENSORRT_RTX, gpus=("sm90",))
    for here, found in ((None, "not there"), ("sm90", "sm90")):
        monkeypatch.setattr(tensorrt_build, "architecture_here", lambda here=here: here)
        with pytest.raises(TensorRtError, match=f"builds for the GPU of the machine it runs on, which is {found}; got"):
            BuildOptions("m", tmp_path, backend="tensorrt", gpus=("sm89",))
    with pytest.raises(BuildError, match="needs --gpu"):
        BuildOptions("m", tmp_path, backend=TENSORRT_RTX)
    with pytest.raises(BuildError, match="got backend 'cuda', expected one of ort, ort-cuda, tensorrt, tensorrt-rtx"):
        BuildOptions("m", tmp_path, backend="cuda")
    with pytest.raises(PrecisionError, match="got precision 'fp32', the backend tensorrt-rtx has fp16, int8"):
        BuildOptions("m", tmp_path, backend=TENSORRT_RTX, precision="fp32", gpus=("sm89",))


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt, "MODULES", {TENSORRT_RTX: "no_such_library"})
    with pytest.raises(UnfitError, match=r"the backend tensorrt-rtx needs no_such_library, .*pip install tensorrt-rtx"):
        BuildOptions("m", tmp_path, backend=TENSORRT_RTX, gpus=("sm89",))


def test_a_graph_that_tensorrt_refuses_leaves_no_engine(tmp_path: Path) -> None:
    """Its attention has no kernel for heads of 8 columns."""
    config = tiny.llama(num_hidden_layers=1, hidden_size=32)
    checkpoint = tiny.save_checkpoint(tmp_path / "target", tiny.make_model(config))
    with pytest.raises(TensorRtError, match=r"model.onnx cannot be compiled: .*Attention operation was not supported"):
        tiny.make_bundle(tmp_path, checkpoint, backend=TENSORRT_RTX, gpus=("sm89",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_an_interrupted_build_stops_the_builder_and_leaves_no_engine(
    tmp_path: Path, deep_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    make_progress = tensorrt_build._make_progress

    def interrupting(trt: Any, label: str) -> Any:
        progress = make_progress(trt, label)

        class Interrupting(type(progress)):  # type: ignore[misc]
            def step_complete(self, name: str, step: int) -> bool:
                asked.set()
                return not self.stopped

        return Interrupting()

    join = threading.Thread.join

    def interrupted_join(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread.name == "engine build" and timeout is not None and asked.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(tensorrt_build, "_make_progress", interrupting)
    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    options = BuildOptions(
        str(deep_checkpoint), tmp_path / "bundle", backend=TENSORRT_RTX, gpus=("sm89",), capacity=256
    )
    with pytest.raises(KeyboardInterrupt):
        build_bundle(options, tmp_path / "downloads")
    assert not any(thread.name == "engine build" for thread in threading.enumerate())
    assert list(tmp_path.iterdir()) == []
