"""An interrupted calibration goes on, a finished one is not repeated, and neither changes its result."""

from pathlib import Path
from typing import Any

import pytest

from specrun.engines.manifest import Bundle
from specrun.engines.whole_text import WholeTextModel
from tests import tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"the serving number {number} of the nose and the tide\n" for number in range(600)))
    return file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the texts that calibration reads (with all activations as outputs); negative: stop there."""
    seen: list[int] = []
    read = WholeTextModel.read

    def counted(self: WholeTextModel, text: Any, outputs: Any, features: Any = None) -> Any:
        if len(outputs) > 3:
            seen.append(len(text))
            if len(seen) == counted_stop[0]:
                raise KeyboardInterrupt
        return read(self, text, outputs, features)

    counted_stop = [-1]
    monkeypatch.setattr(WholeTextModel, "read", counted)
    monkeypatch.setattr(WholeTextModel, "stop_at", counted_stop, raising=False)
    return seen


def stop_at(count: int) -> None:
    WholeTextModel.stop_at[0] = count  # type: ignore[attr-defined]


def test_calibration_goes_on_where_it_was_interrupted(
    target_checkpoint: Path, text: Path, tmp_path: Path, reads: list[int]
) -> None:
    def build(directory: str) -> Bundle:
        (tmp_path / directory).mkdir(exist_ok=True)
        options: dict[str, Any] = {"precision": "int8", "text": text, "accept_quality_loss": True}
        return tiny.make_bundle(tmp_path / directory, target_checkpoint, **options)

    whole = build("whole")
    windows = len(reads)
    assert windows > 4
    reads.clear()
    stop_at(4)
    with pytest.raises(KeyboardInterrupt):
        build("resumed")
    assert not (tmp_path / "resumed" / "bundle").exists()
    reads.clear()
    stop_at(-1)
    resumed = build("resumed")
    assert len(reads) == windows - 3
    assert resumed.manifest.files == whole.manifest.files
    assert resumed.manifest.quality == whole.manifest.quality


def test_a_finished_calibration_serves_the_next_build(
    target_checkpoint: Path, text: Path, tmp_path: Path, reads: list[int]
) -> None:
    options: dict[str, Any] = {"precision": "int8", "text": text, "accept_quality_loss": True}
    first = tiny.make_bundle(tmp_path, target_checkpoint, **options)
    engine = (first.path / "target" / "model.onnx.data").read_bytes()
    reads.clear()
    other = tiny.make_bundle(tmp_path, target_checkpoint, **options, k=3)
    assert not reads
    assert (other.path / "target" / "model.onnx.data").read_bytes() == engine
