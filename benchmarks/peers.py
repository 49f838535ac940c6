"""`make peers`: specrun beside its peers on this machine, interleaved in one run."""

import json
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import plot, table
from benchmarks.environment import ROOT, PreparationError, python_of
from benchmarks.measurement import Subject, SystemResult, measure
from benchmarks.models import WORK, checkpoint, model_of
from benchmarks.process import WorkerError, WorkerProcess
from benchmarks.prompts import encode_sets, stop_token
from benchmarks.systems import SYSTEMS, System, usable_cores


@click.command()
@click.option("--systems", multiple=True, help="Such as openvino or 'openvino int8'; may be repeated; default: all.")
@click.option("--sets", multiple=True, default=("chat", "code-editing"), show_default=True, help="Or a file.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of each output.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Medians are taken.")
@click.option("--stop", is_flag=True, help="End an answer where the model ends it; else all write max-tokens.")
def main(systems: tuple[str, ...], sets: tuple[str, ...], max_tokens: int, repeats: int, stop: bool) -> None:
    """Compare specrun with its peers: one model, the same prompts, greedy, the same threads.

    Environments, models and results go to .venv/peers and build/peers; what is there is not made again.
    """
    chosen = [each for each in SYSTEMS if not systems or each.name in systems or each.peer in systems]
    if not chosen:
        raise click.UsageError(f"got no known system, expected some of {', '.join(each.name for each in SYSTEMS)}")
    threads = usable_cores()
    prompts = encode_sets(sets, checkpoint())
    end = str(stop_token(checkpoint())) if stop else ""
    settings = {"threads": threads, "max_tokens": max_tokens, "repeats": repeats, "sets": list(sets), "stop": stop}
    bandwidths: list[float] = []
    subjects: list[Subject] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers are ended, too
    try:
        for system in chosen:
            subjects.append(_load(system, threads, end))
        results = [subject.result for subject in subjects]
        for done in measure(subjects, prompts, max_tokens, repeats, threads, bandwidths):
            _progress(done)
            _write(results, settings, bandwidths)
    finally:
        for subject in subjects:
            if subject.worker is not None:
                subject.worker.close()
    plot.draw(results, sets, median(bandwidths), WORK / "results.png")
    click.echo(table.render(results, sets, bandwidths))


def _load(system: System, threads: int, end: str) -> Subject:
    """The system, prepared and loaded, or the reason why it is not."""
    result = SystemResult(system.name, [mode.name for mode in system.modes])
    subject = Subject(system, result)
    try:
        python = python_of(system.peer)
        model = model_of(system, python)
        command = [str(python), "-m", system.worker, str(model), system.precision, str(threads), end]
        subject.worker = WorkerProcess(command, ROOT, WORK / "logs" / f"{system.file_name}.log", threads)
        result.description = subject.worker.description
        _progress(f"{system.name}: loaded")
    except (PreparationError, WorkerError) as error:
        result.error = str(error)
        _progress(f"{system.name}: {error}")
    return subject


def _write(results: Sequence[SystemResult], settings: dict[str, Any], bandwidths: Sequence[float]) -> None:
    machine = {"processor": _processor(), "platform": platform.platform()}
    raw = {
        "machine": machine,
        "settings": settings,
        "bandwidth_gb_s": list(bandwidths),
        "systems": [asdict(result) for result in results],
    }
    (WORK / "results.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    rendered = table.render(results, settings["sets"], bandwidths)
    (WORK / "results.md").write_text(rendered, encoding="utf-8")


def _processor() -> str:
    """Its name, where the system tells."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _progress(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
