"""A small language model of the target's family guesses token by token."""

import logging

from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, prefill
from specrun.runner.types import EMPTY, Proposal

logger = logging.getLogger(__name__)


class DraftModel:
    """Chooses under the target's own sampling and noise, so that a good draft agrees at any temperature."""

    def __init__(self, session: Session, prefill_width: int) -> None:
        self._session = session
        self._prefill_width = prefill_width
        self._exhausted = False

    def start(self, prompt: list[int]) -> None:
        self._session.truncate(0)
        self._exhausted = False

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        # The last proposed token is never read, so limit - 1 rows are written after the committed ones.
        limit = min(limit, self._session.capacity - len(tokens) + 1)
        if limit < 1:
            self._report_exhausted(len(tokens))
            return EMPTY
        # All committed tokens that the cache lacks: the prompt at first, then the last token, or the last two
        # after a proposal that was accepted whole.
        missing = tokens[self._session.length :]
        prefill(self._session, missing[:-2], self._prefill_width)
        logits = self._session.forward(missing[-2:])
        guesses: list[int] = []
        while True:
            guesses.append(chooser.choose(logits[-1], len(tokens) + len(guesses)))
            if len(guesses) == limit:
                return Proposal(tuple(guesses))
            logits = self._session.forward(guesses[-1:])

    def truncate(self, length: int) -> None:
        self._session.truncate(min(length, self._session.length))

    def _report_exhausted(self, length: int) -> None:
        if not self._exhausted:
            logger.warning(
                "the draft's context of %d tokens is used up at token %d; decoding goes on without it",
                self._session.capacity,
                length,
            )
        self._exhausted = True
