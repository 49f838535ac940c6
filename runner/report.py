"""A benchmark as one HTML page: tables and plots, nothing loaded from elsewhere."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment
from matplotlib.figure import Figure

from specrun.engines.manifest import Bundle
from specrun.engines.staging import OutputError
from specrun.runner.bench import HEADER, Row, cells
from specrun.runner.statistics import STAGES

mpl.rcParams["svg.fonttype"] = "none"  # text stays text
mpl.rcParams["svg.hashsalt"] = "specrun"  # the same rows give the same file

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>specrun bench: {{ target }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.best td { background: #eef6ee; }
figure { margin: 2rem 0; } svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ target }}: plain against speculative decoding</h1>
<p>{{ backend }}, {{ precision }}, {{ machine }}. Times from the request to the last token, prefill included; plain and
all proposers in turn, medians of the runs of each prompt. Output equal to plain decoding:
<strong>{{ verdict }}</strong>.</p>
{% for title, svg, text in plots %}
<figure><h2>{{ title }}</h2>{{ svg | safe }}<figcaption>{{ text }}</figcaption></figure>
{% endfor %}
<h2>All figures</h2>
<div class="scroll"><table>
<tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for best, row in rows %}
<tr{% if best %} class="best"{% endif %}>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
</body>
</html>
"""


def write_report(rows: Sequence[Row], bundle: Bundle, file: Path) -> None:
    """Write `rows` to `file`, whole or not at all. Raises OutputError."""
    manifest = bundle.manifest
    best = {id(max(group, key=lambda row: row.speedup)) for group in _by_set(rows).values()}
    page = (
        Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            target=manifest.target.name,
            backend=manifest.backend,
            precision=manifest.precision,
            machine=f"{os.cpu_count()} CPU cores ({manifest.versions.get('machine', '')})",
            verdict="yes" if all(row.identical for row in rows) else "see the last column",
            plots=[
                ("Speed-up", _speedups(rows), "Tokens per second over those of plain decoding (the line at 1)."),
                (
                    "Acceptance per position",
                    _acceptance(rows),
                    "Share of the proposals that reach a position of which a token was accepted there.",
                ),
                (
                    "Time per stage",
                    _stages(rows),
                    "Milliseconds per emitted token. Verification is the target's own work; all else is what "
                    "speculation adds, prefill apart.",
                ),
            ],
            header=HEADER,
            rows=[(id(row) in best, cells(row)) for row in rows],
        )
    )
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}; choose another --report") from error


def _by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by prompt set and sampling."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.prompt_set}, temperature {row.temperature:g}", []).append(row)
    return groups


def _name(row: Row) -> str:
    return f"{row.proposer}, {row.nodes} nodes" if row.nodes != row.k else f"{row.proposer}, k = {row.k}"


def _speedups(rows: Sequence[Row]) -> str:
    groups = _by_set(rows)
    names = list(dict.fromkeys(_name(row) for row in rows))
    figure = Figure(figsize=(10, 1.2 + 0.28 * len(names) * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, group) in zip(axes, groups.items(), strict=True):
        bars = axis.barh([_name(row) for row in group], [row.speedup for row in group], color="#4878a8")
        axis.bar_label(bars, fmt="%.2fx", padding=3)
        axis.axvline(1, color="#222", linewidth=1)
        axis.set_title(title, loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def _acceptance(rows: Sequence[Row]) -> str:
    groups = _by_set(rows)
    figure = Figure(figsize=(10, 3.6 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axis, (title, group) in zip(axes, groups.items(), strict=True):
        for row in group:
            shares = row.acceptance_per_position
            axis.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=_name(row))
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(ylim=(0, 1), xlabel="position after the last committed token", ylabel="accepted")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def _stages(rows: Sequence[Row]) -> str:
    groups = _by_set(rows)
    bars = sum(len(group) + 1 for group in groups.values())
    figure = Figure(figsize=(10, 1.5 + 0.28 * bars), layout="constrained")
    axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, group) in zip(axes, groups.items(), strict=True):
        times = {"plain": group[0].plain_milliseconds_per_token}
        times |= {_name(row): row.milliseconds_per_token for row in group}
        left = [0.0] * len(times)
        for stage in STAGES:
            lengths = [each[stage] for each in times.values()]
            axis.barh(list(times), lengths, left=left, label=stage)
            left = [start + length for start, length in zip(left, lengths, strict=True)]
        axis.set_title(title, loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    axes[-1].set_xlabel("milliseconds per token")
    return _svg(figure)


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
