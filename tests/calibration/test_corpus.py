"""Text to calibrate with and to measure with."""

from pathlib import Path

import pytest

from specrun.calibration.corpus import HELD_OUT_TOKENS, Corpus, CorpusError
from tests import tiny


def test_built_in_text_is_plenty_and_always_the_same() -> None:
    corpus = Corpus.of(tiny.make_tokenizer(), None, 256)
    assert corpus == Corpus.of(tiny.make_tokenizer(), None, 256)
    assert len(corpus.calibration) == 12
    assert sum(map(len, corpus.held_out)) > 0.98 * HELD_OUT_TOKENS
    assert not {tuple(window) for window in corpus.calibration} & {tuple(window) for window in corpus.held_out}


def test_windows_of_a_file_are_no_longer_than_asked(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the serving of the nose " * 100)
    corpus = Corpus.of(tiny.make_tokenizer(), file, 64)
    assert {len(window) for window in corpus.held_out[:-1]} == {64}


@pytest.mark.parametrize("content", [b"", b"short", b"\xff\xfe\x00bad"])
def test_a_file_without_enough_text_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=r"text\.txt"):
        Corpus.of(tiny.make_tokenizer(), file, 64)
