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


class Reads:
    """The texts that calibration reads (with all activations as outputs)."""

    def __init__(self) -> None:
        self.count = 0
        self.stop_at: int | None = None  # the read that is interrupted

    def note(self) -> None:
        self.count += 1
        if self.count == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    seen, read = Reads(), WholeTextModel.read

    def counted(self: WholeTextModel, text: Any, outputs: Any, features: Any = None) -> Any:
        if len(outputs) > 3:
            seen.note()
        return read(self, text, outputs, features)

    monkeypatch.setattr(WholeTextModel, "read", counted)
    return seen


def test_calibration_goes_on_where_it_was_interrupted(
    target_checkpoint: Path, text: Path, tmp_path: Path, reads: Reads
) -> None:
    def build(directory: str) -> Bundle:
        (tmp_path / directory).mkdir(exist_ok=True)
        options: dict[str, Any] = {"precision": "int8", "text": text, "accept_quality_loss": True}
        return tiny.make_bundle(tmp_path / directory, target_checkpoint, **options)

    whole = build("whole")
    windows = reads.count
    assert windows > 4
    reads.count, reads.stop_at = 0, 4
    with pytest.raises(KeyboardInterrupt):
        build("resumed")
    assert not (tmp_path / "resumed" / "bundle").exists()
    reads.count, reads.stop_at = 0, None
    resumed = build("resumed")
    assert reads.count == windows - 3
    assert resumed.manifest.files == whole.manifest.files
    assert resumed.manifest.quality == whole.manifest.quality


def test_a_finished_calibration_serves_the_next_build(
    target_checkpoint: Path, text: Path, tmp_path: Path, reads: Reads
) -> None:
    options: dict[str, Any] = {"precision": "int8", "text": text, "accept_quality_loss": True}
    first = tiny.make_bundle(tmp_path, target_checkpoint, **options)
    engine = (first.path / "target" / "model.onnx.data").read_bytes()
    reads.count = 0
    other = tiny.make_bundle(tmp_path, target_checkpoint, **options, k=3)
    assert reads.count == 0
    assert (other.path / "target" / "model.onnx.data").read_bytes() == engine
