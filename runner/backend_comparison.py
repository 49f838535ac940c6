"""`specrun compare`: two bundles of one model, the targets' logits on the same texts, through Polygraphy.

The sessions are those that generate, so what is compared is what serves: the backends' kernels, and how calls of every
width are bound to them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import numpy as np

from specrun.engines.errors import RequestError, UnfitError
from specrun.runner.runner import Runner
from specrun.runner.session import Session, feed

Array = np.ndarray[Any, Any]

MAX_TOKENS = 192  # of each text
INPUT_IDS, CHUNKS, LOGITS = "input_ids", "chunks", "logits"


@dataclass(frozen=True)
class TextComparison:
    """The logits of one text."""

    tokens: int
    agreement: float  # share of positions where both have the same largest logit
    largest_difference: float
    mean_difference: float
    largest_logit: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_backends(
    runners: Sequence[Runner], texts: Sequence[Sequence[int]], progress: Callable[[], None] = lambda: None
) -> list[TextComparison]:
    """Two runners over `texts`, token ids each. The first half of a text is read as a prompt is, the second in calls of
    all widths that decoding has. Raises RequestError if the models are not the same, UnfitError without Polygraphy."""
    _require_same_model(*runners)
    try:
        from polygraphy.comparator import Comparator, SimpleCompareFunc
        from polygraphy.logger import G_LOGGER
    except ImportError as error:
        raise UnfitError(
            f"comparing backends needs {error.name}, which is not installed: pip install polygraphy"
        ) from error
    columns = min(runner.bundle.manifest.target.vocabulary_size for runner in runners)
    sessions = [_polygraphy_runner(runner, name, columns) for runner, name in zip(runners, "ab", strict=True)]
    room = min(MAX_TOKENS, *(runner.target.capacity for runner in runners))
    widths = runners[0].bundle.manifest.widths
    measure = SimpleCompareFunc(check_error_stat="max", atol=np.inf, rtol=np.inf)
    found = []
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        for results in Comparator.run(sessions, data_loader=_feeds(texts, widths, room), streaming=True):
            first, second = (iterations[0][LOGITS] for _, iterations in results)
            (accuracy,) = Comparator.compare_accuracy(results, compare_func=measure)
            ((_, (result,)),) = accuracy.items()
            found.append(
                TextComparison(
                    tokens=len(first),
                    agreement=float((first.argmax(-1) == second.argmax(-1)).mean()),
                    largest_difference=float(result[LOGITS].max_absdiff),
                    mean_difference=float(result[LOGITS].mean_absdiff),
                    largest_logit=float(np.abs(first).max()),
                )
            )
            progress()
    return found


def _require_same_model(first: Runner, second: Runner) -> None:
    one, other = first.bundle.manifest.target, second.bundle.manifest.target
    if (one.vocabulary_sha256, one.parameters, one.family) != (other.vocabulary_sha256, other.parameters, other.family):
        raise RequestError(
            f"{first.bundle.path} holds {one.name} ({one.family}, {one.parameters:,} parameters), {second.bundle.path} "
            f"{other.name} ({other.family}, {other.parameters:,}); expected the same model twice"
        )


def _feeds(texts: Sequence[Sequence[int]], widths: Sequence[int], room: int) -> Iterator[dict[str, Array]]:
    *decoding, prefill = widths
    for text in texts:
        ids = list(text[:room])
        chunks = [min(prefill, len(ids) // 2 - start) for start in range(0, len(ids) // 2, prefill)]
        for width in cycle(decoding):
            left = len(ids) - sum(chunks)
            if not left:
                break
            chunks.append(min(width, left))
        yield {INPUT_IDS: np.array(ids, np.int64), CHUNKS: np.array(chunks, np.int64)}


def _polygraphy_runner(runner: Runner, name: str, columns: int) -> Any:
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    class TargetRunner(BaseRunner):  # type: ignore[misc] # Polygraphy publishes no types
        """Feeds a text to the target, chunk by chunk."""

        def activate_impl(self) -> None:
            pass

        def deactivate_impl(self) -> None:
            pass

        def get_input_metadata_impl(self) -> Any:
            return TensorMetadata().add(INPUT_IDS, np.int64, (-1,)).add(CHUNKS, np.int64, (-1,))

        def infer_impl(self, feed_dict: dict[str, Array]) -> dict[str, Array]:
            self.inference_time = 0.0
            return {LOGITS: _read(runner.target, feed_dict[INPUT_IDS], feed_dict[CHUNKS], columns)}

    return TargetRunner(name)


def _read(session: Session, ids: Array, chunks: Array, columns: int) -> Array:
    session.truncate(0)
    rows: list[Array] = []
    for start, width in zip(np.cumsum(chunks) - chunks, chunks, strict=True):
        logits = feed(session, ids[start : start + width].tolist(), wanted=None).logits
        rows += [logits.row(index)[:columns].copy() for index in range(len(logits))]
    return np.stack(rows)
