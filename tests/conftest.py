"""Bundles that many tests share, built once."""

from pathlib import Path

import pytest

from specrun.engines.manifest import Bundle
from specrun.runner.runner import Runner
from tests import tiny, tiny_heads

SHARPNESS = 12.0  # gives the tiny target a clear favourite at most positions


@pytest.fixture(scope="session")
def target_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(
        tmp_path_factory.mktemp("target"), tiny.make_model(tiny.llama(), seed=0, sharpness=SHARPNESS)
    )


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft that knows nothing of the target, with a larger padded vocabulary and a shorter context."""
    config = tiny.llama(num_hidden_layers=1, hidden_size=32, vocab_size=384, max_position_embeddings=96)
    return tiny.save_checkpoint(tmp_path_factory.mktemp("draft"), tiny.make_model(config, seed=1, sharpness=SHARPNESS))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, target_checkpoint: Path, draft_checkpoint: Path) -> Bundle:
    """Target with the random draft."""
    return tiny.make_bundle(tmp_path_factory.mktemp("pair"), target_checkpoint, draft_checkpoint)


@pytest.fixture(scope="session")
def twin_bundle(tmp_path_factory: pytest.TempPathFactory, target_checkpoint: Path) -> Bundle:
    """Target with itself as draft."""
    return tiny.make_bundle(tmp_path_factory.mktemp("twin"), target_checkpoint, target_checkpoint)


@pytest.fixture(scope="session")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with enough layers for EAGLE-3's three taps."""
    config = tiny.llama(num_hidden_layers=8, initializer_range=0.1)
    return tiny.save_checkpoint(tmp_path_factory.mktemp("deep"), tiny.make_model(config, seed=0, sharpness=2.0))


@pytest.fixture(scope="session")
def heads_bundle(tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path, draft_checkpoint: Path) -> Bundle:
    """A target with one draft of every kind."""
    directory = tmp_path_factory.mktemp("heads")
    return tiny.make_bundle(
        directory,
        deep_checkpoint,
        tiny_heads.medusa(directory / "medusa"),
        tiny_heads.eagle1(directory / "eagle1"),
        tiny_heads.eagle3(directory / "eagle3"),
        "early-exit:6",
        draft_checkpoint,
        nodes=9,
    )


@pytest.fixture(scope="session")
def heads_runner(heads_bundle: Bundle) -> Runner:
    return Runner(heads_bundle)


@pytest.fixture(scope="session")
def runner(bundle: Bundle) -> Runner:
    return Runner(bundle)


@pytest.fixture(scope="session")
def twin_runner(twin_bundle: Bundle) -> Runner:
    return Runner(twin_bundle)
