"""Bundles that many tests share, built once."""

from pathlib import Path

import pytest

from specrun.engines.manifest import Bundle
from specrun.runner.runner import Runner
from tests import tiny

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
def runner(bundle: Bundle) -> Runner:
    return Runner(bundle)


@pytest.fixture(scope="session")
def twin_runner(twin_bundle: Bundle) -> Runner:
    return Runner(twin_bundle)
