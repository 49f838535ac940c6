"""A bundle that is not what its manifest says is refused before any weight is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.engines.manifest import FORMAT_VERSION, MANIFEST, Bundle, BundleError, Manifest
from specrun.engines.schema import SchemaError, from_json, to_json


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.path, tmp_path / "copy"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    (path / MANIFEST).write_text(json.dumps(data))


def test_manifest_survives_json(bundle: Bundle) -> None:
    data = json.loads(json.dumps(to_json(bundle.manifest)))
    assert from_json(Manifest, data, "manifest") == bundle.manifest


HEAD = {
    "name": "head",
    "parameters": 1,
    "taps": [2],
    "signature": None,
    "positions": 3,
    "capacity": 0,
    "reduced_vocabulary": False,
}
MANIFEST_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = {
    "unknown key": (lambda data: data.update(colour="red"), SchemaError, "colour"),
    "missing key": (lambda data: data.pop("capacity"), SchemaError, "capacity"),
    "unknown nested key": (
        lambda data: data["target"].update(colour="red"),
        SchemaError,
        "target: unknown keys",
    ),
    "text for a number": (lambda data: data.update(capacity="256"), SchemaError, "capacity: got str"),
    "true for a number": (lambda data: data.update(k=True), SchemaError, "k: got bool"),
    "mixed list": (lambda data: data.update(widths=[1, "5"]), SchemaError, r"widths\[1\]"),
    "other version": (
        lambda data: data.update(format_version=1),
        BundleError,
        f"format_version 1, expected {FORMAT_VERSION}",
    ),
    "unknown head": (
        lambda data: data["heads"].update(oracle=HEAD | {"taps": []}),
        SchemaError,
        "the head oracle is unknown",
    ),
    "tap that the target has not": (
        lambda data: data["heads"].update(medusa=HEAD),
        SchemaError,
        "reads other states",
    ),
    "no draft": (lambda data: data.update(draft=None), SchemaError, "draft"),
    "listed file missing": (
        lambda data: data["files"].update({"target/more": {"bytes": 1, "sha256": "0"}}),
        BundleError,
        "missing",
    ),
}


@pytest.mark.parametrize("fault", MANIFEST_FAULTS)
def test_edited_manifest_is_refused(fault: str, copy: Path) -> None:
    change, error, reason = MANIFEST_FAULTS[fault]
    edit(copy, change)
    with pytest.raises(error, match=reason):
        Bundle.open(copy)


def test_manifest_that_is_not_json_is_refused(copy: Path) -> None:
    (copy / MANIFEST).write_text("{")
    with pytest.raises(BundleError, match="not JSON"):
        Bundle.open(copy)
    (copy / MANIFEST).write_text("[]")
    with pytest.raises(BundleError, match="format_version None"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["target/model.onnx", "target/model.onnx.data", "draft/tokenizer.json"])
def test_edited_truncated_or_missing_file_is_refused(name: str, copy: Path) -> None:
    file = copy / name
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(BundleError, match="SHA-256"):
        Bundle.open(copy)
    file.write_bytes(content[:middle])
    with pytest.raises(BundleError, match="bytes, expected"):
        Bundle.open(copy)
    file.unlink()
    with pytest.raises(BundleError, match="missing"):
        Bundle.open(copy)


def test_directory_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"no {MANIFEST}"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match="not a directory"):
        Bundle.open(tmp_path / "nowhere")
