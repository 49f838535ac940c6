"""The results as one picture: tokens per second of whole requests, and what calls cost."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measurement import CONTEXT, WIDTHS, SystemResult
from benchmarks.summary import best_mode, summarize_calls, summarize_mode
from benchmarks.systems import PLAIN, SPECRUN

PLAIN_COLOR = "#9db4c8"
COLORS = {  # by peer
    SPECRUN: "#c8553d",
    "transformers": "#b59a3c",
    "onnxruntime-genai": "#4878a8",
    "openvino": "#5b9a68",
    "llama-cpp": "#7a6a9b",
}
STYLES = ("-", "--", ":", "-.")  # the precisions of a peer, in the order of the table


def draw(results: Sequence[SystemResult], prompt_sets: Sequence[str], bandwidth: float, file: Path) -> None:
    """Bars per prompt set, plain and the best speculative mode; lines of milliseconds over tokens per call."""
    figure = Figure(figsize=(5.2 * (len(prompt_sets) + 1), 1.6 + 0.42 * len(results)), layout="constrained")
    *bars, lines = figure.subplots(1, len(prompt_sets) + 1)
    for axes, prompt_set in zip(bars, prompt_sets, strict=True):
        _bars(axes, results, prompt_set)
    _lines(lines, results, bandwidth)
    figure.savefig(file)


def _bars(axes: Axes, results: Sequence[SystemResult], prompt_set: str) -> None:
    for place, result in enumerate(results):
        plain, best = summarize_mode(result, prompt_set, PLAIN), best_mode(result, prompt_set)
        axes.barh(place - 0.2, 0 if plain is None else plain.tok_s, 0.38, color=PLAIN_COLOR)
        if best is not None:
            mode, summary = best
            bar = axes.barh(place + 0.2, summary.tok_s, 0.38, color=COLORS[_peer(result)])
            axes.bar_label(bar, [f"{summary.tok_s:.0f}, {mode}"], padding=3, fontsize=7)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=8)
    axes.set_title(f"{prompt_set}: tokens/s, plain (light) and best speculative", fontsize=9, loc="left")
    axes.margins(x=0.22)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Axes, results: Sequence[SystemResult], bandwidth: float) -> None:
    drawn: Counter[str] = Counter()
    for result in results:
        peer, summary = _peer(result), summarize_calls(result, bandwidth)
        if summary is not None:
            costs = [summary.milliseconds[width] for width in WIDTHS]
            style, thickness = STYLES[drawn[peer]], 2.5 if peer == SPECRUN else 1.2
            axes.plot(WIDTHS, costs, style, marker=".", color=COLORS[peer], label=result.name, linewidth=thickness)
        drawn[peer] += 1
    axes.set_title(f"ms per call at a context of {CONTEXT} tokens", fontsize=9, loc="left")
    axes.set_xlabel("tokens per call")
    axes.set_xticks(WIDTHS)
    axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _peer(result: SystemResult) -> str:
    return result.name.split()[0]
