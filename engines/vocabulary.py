"""The vocabulary of a tokenizer: token by id, and whether two models share it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specrun.engines.errors import SpecrunError

# Checkpoints of one family differ by a few added tokens (chat markers, tool markers); another family
# differs in thousands.
MAX_MISSING_SHARE = 0.01
SHOWN_DIFFERENCES = 3


class TokenizerError(SpecrunError):
    """tokenizer.json is missing or unreadable."""


class VocabularyMismatchError(SpecrunError):
    """Draft and target do not share a vocabulary."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Read `tokenizer.json` at `path`, without the padding and truncation that some carry from training.

    Raises TokenizerError.
    """
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist; expected a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. Ids without a token (holes, padding rows of the embedding) are not in it."""

    tokens: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        return cls({index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()})

    @property
    def size(self) -> int:
        """One more than the highest id: how many logits of a row can mean a token."""
        return max(self.tokens, default=-1) + 1

    def digest(self) -> str:
        """SHA-256 over ids and tokens: the identity that a manifest records."""
        state = hashlib.sha256()
        for index in sorted(self.tokens):
            state.update(f"{index}\t{self.tokens[index]}\n".encode("utf-8", "surrogatepass"))
        return state.hexdigest()


def require_shared(target: Vocabulary, draft: Vocabulary) -> None:
    """Refuse a draft whose ids mean other tokens than the target's.

    Every id that both know must carry the same token; each may know a few that the other lacks.
    Embedding tables padded to different sizes do not matter here: padding has no token.

    Raises VocabularyMismatchError, naming the first differing tokens.
    """
    shared = target.tokens.keys() & draft.tokens.keys()
    differing = sorted(index for index in shared if target.tokens[index] != draft.tokens[index])
    if differing:
        shown = ", ".join(
            f"id {index} is {target.tokens[index]!r} in the target and {draft.tokens[index]!r} in the draft"
            for index in differing[:SHOWN_DIFFERENCES]
        )
        raise VocabularyMismatchError(
            f"the draft is of another family: {len(differing)} of {len(shared)} shared token ids differ "
            f"({shown}); use a draft that was trained with the target's tokenizer"
        )
    missing = max(len(target.tokens), len(draft.tokens)) - len(shared)
    if missing > MAX_MISSING_SHARE * len(target.tokens):
        raise VocabularyMismatchError(
            f"the draft is of another family: its vocabulary has {len(draft.tokens)} tokens, the target's has "
            f"{len(target.tokens)}, and they share only {len(shared)}; "
            f"use a draft that was trained with the target's tokenizer"
        )
