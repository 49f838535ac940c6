"""Plain against speculative decoding of one request: the same tokens? how much faster? if not the same, why?"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from specrun.engines.errors import RequestError
from specrun.runner.processors import Processing
from specrun.runner.runner import Completion, Request, Runner

# A call of another width adds its numbers in another order. Rows whose logits differ by more than this share
# of the largest logit differ by more than that. Measured on SmolLM2-135M: 1.4e-6 for fp32, 8.4e-4 for fp16.
ROUNDING = {"float32": 2e-5, "float16": 5e-3}


@dataclass(frozen=True)
class Divergence:
    """The first position where the two differ, and what the target saw there in each run."""

    index: int  # in the output
    plain_token: int
    speculative_token: int
    gap: float  # how far, noise included, the plain choice led over the other token
    logit_difference: float  # largest difference of a logit between the two runs
    within_rounding: bool


@dataclass(frozen=True)
class Comparison:
    plain: Completion
    speculative: Completion
    plain_seconds: float  # medians over the repeats, from the request to the last token
    speculative_seconds: float
    plain_decode_seconds: float  # the same without prefill and text
    speculative_decode_seconds: float
    divergence: Divergence | None

    @property
    def identical(self) -> bool:
        return self.divergence is None

    @property
    def lossless(self) -> bool:
        """Identical, or different only where rounding decided."""
        return self.divergence is None or self.divergence.within_rounding

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second, end to end."""
        plain = len(self.plain.ids) / self.plain_seconds
        return len(self.speculative.ids) / self.speculative_seconds / plain

    def to_json(self) -> dict[str, Any]:
        return {
            "plain": self.plain.to_json() | {"tok_s": len(self.plain.ids) / self.plain_seconds},
            "speculative": self.speculative.to_json() | {"tok_s": len(self.speculative.ids) / self.speculative_seconds},
            "identical": self.identical,
            "speedup": self.speedup,
            "divergence": asdict(self.divergence) if self.divergence else None,
        }


def compare(runner: Runner, request: Request, repeats: int) -> Comparison:
    """Run `request` plain and speculative in turn, `repeats` times each, after one short warm-up of both."""
    return compare_all(runner, [request], repeats)[0]


def compare_all(
    runner: Runner, requests: Sequence[Request], repeats: int, progress: Callable[[], None] = lambda: None
) -> list[Comparison]:
    """The same for several ways to speculate on one prompt, all against the same plain runs: plain and each of
    `requests` in turn. They differ in the way to speculate only. `progress` is called after each run.
    """
    sampling = requests[0].sampling.with_seed()
    if sampling.rejects:
        raise RequestError(
            "under the rejection rule speculative output has the same distribution as plain output, but other tokens; "
            "compare with accept rule coupled"
        )
    requests = [replace(request, sampling=sampling) for request in requests]
    ways = [requests[0].plain(), *requests]
    for warm_up in ways:
        runner.generate(replace(warm_up, max_tokens=2, processing=Processing()))
    runs: list[list[Completion]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, done in zip(ways, runs, strict=True):
            done.append(runner.generate(way))
            progress()
    return [_comparison(runner, request, runs[0], done) for request, done in zip(requests, runs[1:], strict=True)]


def _comparison(
    runner: Runner, request: Request, plain_runs: list[Completion], speculative_runs: list[Completion]
) -> Comparison:
    # Every repeat must agree; one that does not is the one to report.
    pairs = list(zip(plain_runs, speculative_runs, strict=True))
    plain, speculative = next((pair for pair in pairs if pair[0].ids != pair[1].ids), pairs[0])
    divergence = None
    if plain.ids != speculative.ids:
        divergence = explain(runner, request, plain.ids, speculative.ids)
    return Comparison(
        plain=plain,
        speculative=speculative,
        plain_seconds=median(run.statistics.total_seconds for run in plain_runs),
        speculative_seconds=median(run.statistics.total_seconds for run in speculative_runs),
        plain_decode_seconds=median(run.statistics.decode_seconds for run in plain_runs),
        speculative_decode_seconds=median(run.statistics.decode_seconds for run in speculative_runs),
        divergence=divergence,
    )


def explain(runner: Runner, request: Request, plain: tuple[int, ...], speculative: tuple[int, ...]) -> Divergence:
    """Run both again and look at the logits of the first position where they differ."""
    # Not strict: from the first difference on, one may end earlier. Equal tokens end equally.
    index = next(at for at, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b)
    position = len(request.prompt_ids) + index
    plain_row = _row(runner, request.plain(), position)
    speculative_row = _row(runner, request, position)
    chooser = runner.chooser(request)
    for token in plain[:index]:
        chooser.commit(token)
    scores = chooser.noisy_scores(plain_row, position)
    # Rounding is to blame only if each run emitted what its own logits say.
    chosen = chooser.choose(plain_row, position), chooser.choose(speculative_row, position)
    honest = chosen == (plain[index], speculative[index])
    difference = float(np.abs(plain_row - speculative_row).max())
    bound = ROUNDING[runner.bundle.manifest.target.cache_dtype] * float(np.abs(plain_row).max())
    return Divergence(
        index=index,
        plain_token=plain[index],
        speculative_token=speculative[index],
        gap=float(scores[plain[index]] - scores[speculative[index]]),
        logit_difference=difference,
        within_rounding=honest and difference <= bound,
    )


def _row(runner: Runner, request: Request, position: int) -> np.ndarray[Any, Any]:
    rows: dict[int, np.ndarray[Any, Any]] = {}

    def observe(at: int, logits: np.ndarray[Any, Any], token: int) -> None:
        if at == position:
            rows[at] = logits.copy()

    runner.generate(request, observe)
    return rows[position]
