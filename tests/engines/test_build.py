"""Building bundles: up to date or not, refused pairs, failures that leave nothing."""

import logging
from pathlib import Path
from typing import Any

import onnx
import pytest

from specrun.engines import memory, ort, source
from specrun.engines.build import build_bundle
from specrun.engines.build_options import BuildOptions
from specrun.engines.context import ContextError
from specrun.engines.errors import UnfitError
from specrun.engines.manifest import MANIFEST, Bundle
from specrun.engines.precision import PrecisionError
from specrun.engines.source import BuildError
from specrun.engines.vocabulary import Vocabulary, VocabularyMismatchError, require_shared
from specrun.export.checkpoint import Checkpoint
from specrun.export.graph import export_model
from tests import tiny


def snapshot(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*") if file.is_file()}


def test_bundle_holds_what_it_says(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.widths == (1, 5, 17, 128)
    assert manifest.capacity == 256
    assert manifest.draft_capacity == 96  # what the draft was trained for
    assert manifest.proposer == "ngram+draft_model_tree"
    assert manifest.target.vocabulary_size == tiny.VOCABULARY_SIZE
    on_disk = {file.relative_to(bundle.path).as_posix() for file in bundle.path.rglob("*") if file.is_file()}
    assert on_disk == {*manifest.files, MANIFEST}


def test_unchanged_inputs_are_not_built_again(target_checkpoint: Path, tmp_path: Path) -> None:
    """From an export, so that the builds are quick."""
    exported = tmp_path / "export"
    export_model(Checkpoint.open(str(target_checkpoint), tmp_path), exported, "fp32", None, None)
    out = tmp_path / "bundle"
    assert build_bundle(BuildOptions(str(exported), out, capacity=128), tmp_path)
    before = snapshot(out)
    assert not build_bundle(BuildOptions(str(exported), out, capacity=128), tmp_path)
    assert snapshot(out) == before
    assert build_bundle(BuildOptions(str(exported), out, capacity=128, k=3), tmp_path)
    assert Bundle.open(out).manifest.k == 3
    (out / "target" / "model.onnx").write_bytes(b"damaged")
    assert build_bundle(BuildOptions(str(exported), out, capacity=128, k=3), tmp_path)
    Bundle.open(out)
    with pytest.raises(ContextError, match="trained for 512 positions"):
        build_bundle(BuildOptions(str(exported), out, capacity=513), tmp_path)
    with pytest.raises(BuildError, match="exported as fp32"):
        build_bundle(BuildOptions(str(exported), out, capacity=128, precision="fp16"), tmp_path)


def test_graph_is_optimized_at_build(bundle: Bundle) -> None:
    kinds = [node.op_type for node in onnx.load(bundle.path / "target/model.onnx", load_external_data=False).graph.node]
    assert "QuickGelu" in kinds  # Sigmoid and Mul fused: an optimization that the exported file has not had


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k": 0}, "k = 0"),
        ({"k": 65}, "k = 65"),
        ({"nodes": 257}, "257 tree nodes"),
        ({"p_min": 1.0}, "p-min 1.0, expected a probability below 1"),
        ({"precision": "int3"}, "got precision 'int3', the backend ort has fp32, fp16, int8"),
        ({"capacity": 5}, "capacity 5"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises((BuildError, PrecisionError), match=reason):
        BuildOptions("model", tmp_path, **options)


def test_draft_of_another_family_is_refused(target_checkpoint: Path, tmp_path: Path) -> None:
    """Known fault 14. The same number of tokens, two of them spelled otherwise."""
    other = tiny.make_tokenizer(changed={"a": "q!", "b": "q?"})
    draft = tiny.save_checkpoint(tmp_path / "draft", tiny.make_model(tiny.llama()), other)
    with pytest.raises(VocabularyMismatchError, match="'a' in the target and 'q!' in the draft"):
        build_bundle(BuildOptions(str(target_checkpoint), tmp_path / "out", (str(draft),), capacity=128), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


def test_draft_with_a_smaller_vocabulary_is_refused() -> None:
    target = Vocabulary({index: str(index) for index in range(1000)})
    require_shared(target, Vocabulary({index: str(index) for index in range(995)}))
    with pytest.raises(VocabularyMismatchError, match="share only 500"):
        require_shared(target, Vocabulary({index: str(index) for index in range(500)}))


def test_draft_of_unusual_size_is_warned_about(
    target_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("specrun"), "propagate", True)
    tiny.make_bundle(tmp_path, target_checkpoint, target_checkpoint)
    assert "100 % of the target's parameters; 5 to 20 % usually pay" in caplog.text


def test_too_little_memory_is_said_before_the_build(
    target_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known fault 24."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 << 20)
    monkeypatch.setattr(source, "write_export", lambda *_: pytest.fail("the build began"))
    with pytest.raises(UnfitError, match="not enough memory"):
        build_bundle(BuildOptions(str(target_checkpoint), tmp_path / "out", capacity=128), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failing_build_leaves_nothing(target_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known fault 24, after the export has been written."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ort, "compile_graph", fail)
    with pytest.raises(MemoryError):
        build_bundle(BuildOptions(str(target_checkpoint), tmp_path / "out", capacity=128), tmp_path)
    assert list(tmp_path.iterdir()) == []
