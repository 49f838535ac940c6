"""The results as Markdown."""

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.measurement import CONTEXT, PREFILL, WIDTHS, SystemResult
from benchmarks.summary import CallSummary, ModeSummary, best_mode, summarize_calls, summarize_mode
from benchmarks.systems import PLAIN

CALL_HEADER = (
    *("system", "weights MB", *(f"{width} tok ms" for width in WIDTHS), f"{WIDTHS[-1]} : {WIDTHS[0]}"),
    *("weights / bandwidth ms", "share of it", "prefill tok/s"),
)
MODE_HEADER = ("system", "mode", "tok/s", "vs plain", "ms per step", "tokens per step", "same as plain")


def render(results: Sequence[SystemResult], prompt_sets: Sequence[str], bandwidths: Sequence[float]) -> str:
    """An overview, calls, whole requests per prompt set, versions. What failed stands there with its reason."""
    bandwidth = median(bandwidths)
    parts = [
        f"Memory bandwidth (reading): {bandwidth:.1f} GB/s.",
        "### Overview: tokens/s of whole requests, plain and the fastest speculative mode",
        _table(_overview_header(prompt_sets), [_overview_row(result, prompt_sets) for result in results]),
        f"### Calls at a context of {CONTEXT} tokens, prefill of {PREFILL} tokens",
        _table(CALL_HEADER, [_call_row(result, bandwidth) for result in results]),
    ]
    for prompt_set in prompt_sets:
        rows = [_mode_row(result, prompt_set, mode) for result in results for mode in result.modes]
        parts += [f"### Whole requests: {prompt_set}", _table(MODE_HEADER, rows)]
    versions = [
        f"* {result.name}: {result.description['version']}"
        + "".join(f"; {name} {value}" for name, value in result.description["notes"].items())
        for result in results
        if result.description is not None
    ]
    return "\n\n".join([*parts, "### Versions", "\n".join(versions)]) + "\n"


def _overview_header(prompt_sets: Sequence[str]) -> tuple[str, ...]:
    return ("system", *(name for each in prompt_sets for name in (f"{each}, plain", f"{each}, speculative", "mode")))


def _overview_row(result: SystemResult, prompt_sets: Sequence[str]) -> tuple[str, ...]:
    cells: list[str] = []
    for prompt_set in prompt_sets:
        plain, best = summarize_mode(result, prompt_set, PLAIN), best_mode(result, prompt_set)
        cells.append(_why(result, PLAIN) if plain is None else f"{plain.tok_s:.0f}")
        cells += ["", ""] if best is None else [f"{best[1].tok_s:.0f}", best[0]]
    return (result.name, *cells)


def _call_row(result: SystemResult, bandwidth: float) -> tuple[str, ...]:
    summary = summarize_calls(result, bandwidth)
    if summary is None:
        return (result.name, _why(result, *(f"calls of {width}" for width in WIDTHS), "prefill"))
    assert result.description is not None
    return (result.name, f"{result.description['weight_bytes'] / 1e6:.0f}", *_call_cells(summary))


def _call_cells(summary: CallSummary) -> Iterable[str]:
    first, last = summary.milliseconds[WIDTHS[0]], summary.milliseconds[WIDTHS[-1]]
    yield from (f"{summary.milliseconds[width]:.1f}" for width in WIDTHS)
    yield f"{last / first:.2f}"
    yield f"{summary.bound_milliseconds:.1f}"
    yield f"{100 * summary.bound_milliseconds / first:.0f} %"
    yield f"{summary.prefill_tok_s:.0f}"


def _mode_row(result: SystemResult, prompt_set: str, mode: str) -> tuple[str, ...]:
    summary = summarize_mode(result, prompt_set, mode)
    if summary is None:
        return (result.name, mode, _why(result, mode))
    return (result.name, mode, *_mode_cells(summary))


def _mode_cells(summary: ModeSummary) -> Iterable[str]:
    yield f"{summary.tok_s:.1f}"
    yield _number(summary.speedup, "x")
    yield _number(summary.step_milliseconds)
    yield _number(summary.tokens_per_step)
    yield "" if summary.same is None else f"{100 * summary.same:.0f} %"


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def _why(result: SystemResult, *attempts: str) -> str:
    errors = [result.mode_errors[what] for what in attempts if what in result.mode_errors]
    return f"error: {(errors or [result.error or 'not measured'])[0]}".replace("|", "\\|")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows may be shorter than the header."""
    lines = [header, ["---"] * len(header), *([*row, *[""] * (len(header) - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
