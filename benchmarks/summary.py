"""What the raw measurements come to: medians, rates, shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measurement import PREFILL, Run, SystemResult
from benchmarks.systems import PLAIN


@dataclass(frozen=True)
class CallSummary:
    """Calls of one system."""

    milliseconds: dict[int, float]  # by tokens per call
    bound_milliseconds: float  # one reading of the weights at the machine's bandwidth
    prefill_tok_s: float


@dataclass(frozen=True)
class ModeSummary:
    """One system in one mode on one prompt set. Times are medians of the repeats of each prompt."""

    tok_s: float  # whole requests, prefill included
    speedup: float | None  # over plain; None: this is plain, or there is no plain
    step_milliseconds: float | None  # after the first token
    tokens_per_step: float | None
    same: float | None  # share of the prompts whose tokens are those of plain decoding, in all repeats


def summarize_calls(result: SystemResult, bandwidth: float) -> CallSummary | None:
    """None where something is missing."""
    if result.description is None or not result.prefill or not all(result.calls.values()):
        return None
    return CallSummary(
        milliseconds={width: 1000 * median(seconds) for width, seconds in result.calls.items()},
        bound_milliseconds=result.description["weight_bytes"] / bandwidth / 1e6,
        prefill_tok_s=PREFILL / median(result.prefill),
    )


def summarize_mode(result: SystemResult, prompt_set: str, mode: str) -> ModeSummary | None:
    """None where there are no runs."""
    prompts = _by_prompt(result.runs, prompt_set, mode)
    if not prompts:
        return None
    tok_s = _tok_s(prompts)
    plain = [] if mode == PLAIN else _by_prompt(result.runs, prompt_set, PLAIN)
    return ModeSummary(
        tok_s=tok_s,
        speedup=tok_s / _tok_s(plain) if plain else None,
        step_milliseconds=_step_milliseconds(prompts),
        tokens_per_step=_tokens_per_step(prompts),
        same=sum(all(run.same for run in runs) for runs in prompts) / len(prompts) if plain else None,
    )


def best_mode(result: SystemResult, prompt_set: str) -> tuple[str, ModeSummary] | None:
    """The fastest of the speculative modes. None where there are no runs of them."""
    found = {mode: summarize_mode(result, prompt_set, mode) for mode in result.modes if mode != PLAIN}
    done = [(mode, summary) for mode, summary in found.items() if summary is not None]
    return max(done, key=lambda pair: pair[1].tok_s, default=None)


def _by_prompt(runs: Sequence[Run], prompt_set: str, mode: str) -> list[list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        if (run.prompt_set, run.mode) == (prompt_set, mode):
            found.setdefault(run.prompt, []).append(run)
    return list(found.values())


def _tok_s(prompts: list[list[Run]]) -> float:
    return sum(runs[0].tokens for runs in prompts) / sum(median(run.seconds for run in runs) for runs in prompts)


def _tokens_per_step(prompts: list[list[Run]]) -> float | None:
    runs = [run for runs in prompts for run in runs]
    if any(run.steps is None for run in runs):
        return None
    return sum(run.tokens for run in runs) / sum(run.steps or 0 for run in runs)


def _step_milliseconds(prompts: list[list[Run]]) -> float | None:
    """The first step reads the prompt, so it and its time are left out."""
    seconds, steps = 0.0, 0
    for runs in prompts:
        for run in runs:
            if run.steps is None or run.first_seconds is None:
                return None
            steps += run.steps - 1
        seconds += len(runs) * median(run.seconds - (run.first_seconds or 0) for run in runs)
    return 1000 * seconds / steps if steps else None
