"""Output that follows a grammar: which tokens may come next. llguidance does the parsing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from specrun.engines.errors import SpecrunError, UnfitError

Array = np.ndarray[Any, Any]
GrammarKind = Literal["json_schema", "regex"]
# Between the parts of a document. Without a bound a model can write blanks until its tokens run out.
OWN_OPTIONS = "x-guidance"
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{0,32}"}


class GrammarError(SpecrunError):
    """A grammar cannot be read, or became too complex while it was followed."""


@dataclass(frozen=True)
class Grammar:
    """What the whole output must match: a JSON schema (as JSON text), or a regular expression (Rust's syntax)."""

    kind: GrammarKind
    text: str


class GrammarCompiler:
    """Makes matchers for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int, stop_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._stop_token_ids = stop_token_ids

    def start(self, grammar: Grammar) -> "GrammarState":
        """The state before the first token. Raises GrammarError, or UnfitError without llguidance."""
        llguidance, vocabulary = self._vocabulary
        compiler = llguidance.LLMatcher
        try:
            if grammar.kind == "json_schema":
                schema = json.loads(grammar.text)
                if not isinstance(schema, dict):
                    raise ValueError("expected a JSON object")
                # A schema with options of its own (x-guidance) says itself how it wants its blanks.
                options = None if OWN_OPTIONS in schema else JSON_OPTIONS
                source = compiler.grammar_from_json_schema(schema, defaults=options)
            else:
                source = compiler.grammar_from_regex(grammar.text)
        except ValueError as error:
            raise GrammarError(f"got a {grammar.kind} that cannot be read: {error}") from error
        matcher = compiler(vocabulary, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"got a {grammar.kind} that cannot be used: {matcher.get_error()}")
        return GrammarState(matcher, self._vocabulary_size, self._stop_token_ids)

    @cached_property
    def _vocabulary(self) -> tuple[Any, Any]:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise UnfitError(
                "output after a grammar needs llguidance, which is not installed: pip install 'specrun[grammar]'"
            ) from error
        return llguidance, llguidance.LLTokenizer(
            self._tokenizer.to_str(), self._vocabulary_size, sorted(self._stop_token_ids)
        )


class GrammarState:
    """The grammar after the committed tokens, and after any path of tokens that may follow them.

    The parser stands at the end of the path it was last asked about. To move to another one it goes back to where the
    two part. Stop tokens are not shown to it: its rollback does not count one that comes where nothing else may.
    """

    def __init__(self, matcher: Any, vocabulary_size: int, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._stop_token_ids = stop_token_ids
        self._only_stop = np.isin(np.arange(vocabulary_size), sorted(stop_token_ids))
        self._ended = False  # a stop token was committed
        self._path: list[int] = []  # what the parser has read beyond the committed tokens

    def allowed(self, path: Sequence[int]) -> Array:
        """Which tokens may follow the committed ones and `path`: bool [vocabulary]. Stop tokens alone where the
        grammar is complete, after a stop token too; none after a path that breaks the grammar. Raises GrammarError."""
        if self._ended or any(token in self._stop_token_ids for token in path):
            return self._only_stop
        if not self._go_to(path):
            return np.zeros(self._vocabulary_size, bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._require_sound()
        return np.unpackbits(bits, count=self._vocabulary_size, bitorder="little").view(bool)

    def commit(self, token: int) -> None:
        """`token` was emitted."""
        if self._ended or token in self._stop_token_ids:
            self._ended = True
        elif self._path[:1] == [token] or self._go_to([token]):
            del self._path[0]
        else:
            raise GrammarError(f"token {token} was emitted against the grammar")

    def _go_to(self, path: Sequence[int]) -> bool:
        same = 0
        for old, new in zip(self._path, path, strict=False):
            if old != new:
                break
            same += 1
        if len(self._path) > same:
            self._matcher.rollback(len(self._path) - same)
            del self._path[same:]
        self._path += path[same : same + self._matcher.try_consume_tokens(list(path[same:]))]
        self._require_sound()
        return len(self._path) == len(path)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar could not be followed further: {self._matcher.get_error()}")
