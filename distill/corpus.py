"""The target's answers on disk, with the hidden states that it had while it wrote them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]

VALIDATION_EVERY = 40  # one conversation in so many is kept from training


@dataclass(frozen=True)
class Answer:
    """One conversation: the prompt's tokens and what the target wrote.

    `hidden` float16 [len(tokens) - 1, taps * hidden]: row t is the target's state after reading tokens[t].
    """

    tokens: tuple[int, ...]
    prompt_length: int
    hidden: Array


def write_shard(path: Path, answers: list[Answer], key: str) -> None:
    """One file of answers; whole or not at all, so that an interrupted run goes on after the last one. `key`: says
    to what they are answers."""
    arrays = {
        "tokens": np.concatenate([np.array(answer.tokens, np.int32) for answer in answers]),
        "lengths": np.array([len(answer.tokens) for answer in answers], np.int64),
        "prompt_lengths": np.array([answer.prompt_length for answer in answers], np.int64),
        "hidden": np.concatenate([answer.hidden for answer in answers]),
    }
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, metadata={"key": key})
    partial.replace(path)


def shard_key(path: Path) -> str:
    """The key that a shard was written with."""
    with safe_open(path, "numpy") as file:
        return str(file.metadata()["key"])


@dataclass(frozen=True)
class _Place:
    """Where a conversation is: its shard, its first token and its first hidden row there."""

    shard: int
    token: int
    row: int
    length: int
    prompt_length: int


class Corpus(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Conversations of several shards; tokens in memory, hidden states read where they lie."""

    def __init__(self, shards: Sequence[Path], validation: bool, longest: int) -> None:
        """`validation`: the conversations kept from training, or all others. Those longer than `longest` tokens
        are left out."""
        self._shards = list(shards)
        self._tokens: list[Array] = []
        self._files: dict[int, Any] = {}
        self._places: list[_Place] = []
        for shard, path in enumerate(self._shards):
            with safe_open(path, "numpy") as file:
                self._tokens.append(file.get_tensor("tokens"))
                lengths, prompts = file.get_tensor("lengths"), file.get_tensor("prompt_lengths")
            starts = np.concatenate([[0], lengths.cumsum()[:-1]])
            for index, (start, length, prompt) in enumerate(zip(starts, lengths, prompts, strict=True)):
                if (index % VALIDATION_EVERY == 0) == validation and length <= longest:
                    self._places.append(_Place(shard, int(start), int(start) - index, int(length), int(prompt)))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """tokens int64 [T], hidden float16 [T - 1, taps * hidden], answer bool [T] (what the target wrote)."""
        place = self._places[index]
        if place.shard not in self._files:
            self._files[place.shard] = safe_open(self._shards[place.shard], "pt")
        rows = self._files[place.shard].get_slice("hidden")
        tokens = self._tokens[place.shard][place.token : place.token + place.length]
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "hidden": rows[place.row : place.row + place.length - 1],
            "answer": torch.arange(place.length) >= place.prompt_length,
        }

    def lengths(self) -> list[int]:
        """Tokens of each conversation, for batches of like length."""
        return [place.length for place in self._places]

    def answers(self) -> Iterator[Array]:
        """The tokens that the target wrote, one conversation after the other."""
        for place in self._places:
            yield self._tokens[place.shard][place.token + place.prompt_length : place.token + place.length]


def collate(conversations: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch, padded at the end. Padding is no answer, so it never enters a loss."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([each[name] for each in conversations], batch_first=True) for name in conversations[0]}


def frequent_tokens(corpus: Corpus, size: int, always: Sequence[int]) -> Array:
    """The draft vocabulary: ids of the `size` tokens that the target writes most often, ascending, `always` among
    them."""
    counts: Counter[int] = Counter()
    for tokens in corpus.answers():
        counts.update(tokens.tolist())
    chosen = dict.fromkeys(always)
    for token, _ in counts.most_common():
        if len(chosen) == size:
            break
        chosen[token] = None
    for token in range(size):  # a corpus with fewer different tokens: fill up with the lowest ids
        if len(chosen) == size:
            break
        chosen[token] = None
    return np.array(sorted(chosen), np.int64)


def coverage(corpus: Corpus, ids: Array) -> float:
    """The share of `ids` among all tokens that the target wrote."""
    known = [np.isin(tokens, ids) for tokens in corpus.answers()]
    return float(np.concatenate(known).mean()) if known else 0.0
