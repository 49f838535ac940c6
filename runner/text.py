"""Tokens -> text: deltas that join to the whole text, cut before the first stop string."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

UNFINISHED = "\ufffd"  # what the tokenizer puts where a character's bytes are incomplete
# A byte token of a sentencepiece vocabulary. A run of them is decoded as a whole, so one bad byte turns even
# the good characters before it into replacement characters: nothing of a run is certain before it ends.
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """Decodes one generation piece by piece.

    A delta is held back while it ends inside a character, and while it may be the beginning of a stop string.
    Special tokens (the end-of-sequence token among them) give no text. (The tokenizers package has a
    DecodeStream; it fails on invalid byte tokens, and never gives out what is held back at the end.)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        """`stop`: strings that end the generation, in text beyond the first `min_tokens` tokens."""
        self._tokenizer = tokenizer
        self._stop_later = tuple(stop)
        self._min_tokens = min_tokens
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)
        self._ids: list[int] = []
        # Decoding a window gives the right text only if it starts where the text before it is settled.
        self._window_start = 0
        self._window_end = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take one token, return the text that became certain. `stopped` tells that a stop string appeared."""
        self._ids.append(token_id)
        if token_id not in self._special and not BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or ""):
            self._held += self._decoded()
        return self._release(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        if self.stopped:
            return ""
        self._held += self._tail()
        return self._release(final=True)

    def _decoded(self) -> str:
        """Text of the newest tokens, empty while they end inside a character."""
        settled = self._decode(self._window_start, self._window_end)
        text = self._decode(self._window_start, len(self._ids))
        if text.endswith(UNFINISHED) or len(text) <= len(settled):
            return ""
        self._window_start, self._window_end = self._window_end, len(self._ids)
        return text[len(settled) :]

    def _tail(self) -> str:
        settled = self._decode(self._window_start, self._window_end)
        return self._decode(self._window_start, len(self._ids))[len(settled) :]

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True))

    @property
    def _stop(self) -> tuple[str, ...]:
        return self._stop_later if len(self._ids) >= self._min_tokens else ()

    def _release(self, final: bool) -> str:
        found = [index for stop in self._stop if (index := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
