"""Streamed text: deltas join to the whole text, stop strings are cut, nothing leaks."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from specrun.runner.text import TextStream
from tests import tiny

SAMPLES = ["plain text", "emoji 😀👩‍👩‍👧 and Hangul 한국어 mixed", "e\u0301 combining", "a\ufffdb"]


def byte_fallback_tokenizer() -> Tokenizer:
    """As sentencepiece models have it: a space mark, and one token per byte for what is not in the vocabulary."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ["▁", "▁a", "b", "▁the", "é", "▁▁", ".", "한", "<s>"]:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZERS = {"byte level": tiny.make_tokenizer, "byte fallback": byte_fallback_tokenizer}


def stream(tokenizer: Tokenizer, ids: list[int], *stop: str) -> tuple[list[str], bool]:
    text = TextStream(tokenizer, stop)
    deltas = []
    for token_id in ids:
        deltas.append(text.push(token_id))
        if text.stopped:
            return deltas, True
    return [*deltas, text.finish()], text.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
def test_deltas_join_to_the_whole_text(name: str) -> None:
    """Known fault 20, for ordinary text and for any bytes a model may emit."""
    tokenizer = TOKENIZERS[name]()
    rng = random.Random(0)
    size = tokenizer.get_vocab_size()
    cases = [tokenizer.encode(sample).ids for sample in SAMPLES]
    cases += [[rng.randrange(size) for _ in range(rng.randrange(1, 40))] for _ in range(500)]
    for ids in cases:
        deltas, _ = stream(tokenizer, ids)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_delta_ends_inside_a_character() -> None:
    tokenizer = tiny.make_tokenizer()
    deltas, _ = stream(tokenizer, tokenizer.encode("한국 😀!").ids)
    assert [delta for delta in deltas if delta] == ["한", "국", " ", "😀", "!"]


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("one tw", ("two",), "one tw"),
        ("one two", ("twos",), "one two"),
        ("한국어", ("국",), "한"),
        ("stop", ("stop",), ""),
    ],
)
def test_text_ends_before_the_first_stop_string(text: str, stop: tuple[str, ...], wanted: str) -> None:
    tokenizer = tiny.make_tokenizer()
    deltas, stopped = stream(tokenizer, tokenizer.encode(text).ids, *stop)
    assert "".join(deltas) == wanted
    assert stopped == (wanted != text)


def test_possible_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = tiny.make_tokenizer()
    text = TextStream(tokenizer, ["XYZ"])
    deltas = [text.push(token_id) for token_id in tokenizer.encode("aXYaXYZ").ids]
    assert deltas == ["a", "", "", "XYa", "", "", ""]
    assert text.stopped
