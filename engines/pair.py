"""Whether a draft fits its target. Asked at build and again at load."""

import logging

from specrun.engines.vocabulary import Vocabulary, require_shared

logger = logging.getLogger(__name__)

# Smaller drafts are rarely accepted, larger ones cost more than they save.
FIT_SHARE = (0.05, 0.20)


def require_pair(target: Vocabulary, draft: Vocabulary, parameter_share: float) -> None:
    """Refuse a draft of another family, warn about one of an unusual size.

    `parameter_share`: the draft's parameters divided by the target's. Raises VocabularyMismatchError.
    """
    require_shared(target, draft)
    low, high = FIT_SHARE
    if not low <= parameter_share <= high:
        logger.warning(
            "the draft has %.3g %% of the target's parameters; %.0f to %.0f %% usually pay",
            100 * parameter_share,
            100 * low,
            100 * high,
        )
