"""What a bundle costs on this machine as things grow: context, requests side by side, rows of logits; memory, start.

    python benchmarks/scaling.py BUNDLE

Calls are those of the runner, on its own sessions; medians of interleaved repeats.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import click
import numpy as np

from specrun.engines.backend import LEAST_ROWS
from specrun.engines.manifest import TARGET, Bundle
from specrun.runner.bench import align
from specrun.runner.call_costs import CallCosts
from specrun.runner.kv_cache import KVCache
from specrun.runner.serving.batch import BatchCache, BatchEngine
from specrun.runner.session import feed
from specrun.runner.session_ort import OrtSession
from specrun.runner.slot_session import SlotCall, SlotSession, at_once

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16)
WIDTHS = (1, 5, 9, 17)
BATCH_CONTEXT = 250
PREFILL = 128

# In a process of its own: seconds until the first token, and resident bytes before anything, loaded, and used.
STARTED = """
import json, resource, sys, time
start = time.perf_counter()
from pathlib import Path
from specrun.runner.runner import Request, Runner
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
imported, empty = time.perf_counter() - start, resident()
runner = Runner.open(Path(sys.argv[1]))
loaded = time.perf_counter() - start
prompt = runner.encode("The lighthouse stood")
runner.generate(Request(prompt, max_tokens=1))
first = time.perf_counter() - start
runner.generate(Request(prompt, max_tokens=200))
print(json.dumps({"imported": imported, "loaded": loaded, "first": first, "empty": empty, "used": resident()}))
"""


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--repeats", default=15, show_default=True)
def main(path: Path, repeats: int) -> None:
    """Measure the bundle at PATH."""
    bundle = Bundle.open(path)
    sections = [
        ("ms a call by tokens committed", _by_context(bundle, repeats)),
        (f"ms a call by requests side by side, {BATCH_CONTEXT} tokens committed", _by_batch(bundle, repeats)),
        ("ms a call by rows of logits", _by_logit_rows(bundle, repeats)),
        ("memory and start", _process(bundle)),
    ]
    for title, lines in sections:
        print(f"\n{title}\n{align(lines, left=1)}")


def _session(bundle: Bundle, capacity: int) -> OrtSession:
    target = bundle.manifest.target
    cache = KVCache(target.signature, target.cache_dtype, capacity, spare_rows=LEAST_ROWS - 1)
    return OrtSession(
        bundle.engine(TARGET),
        target.signature,
        cache,
        target.cache_dtype,
        target.vocabulary_size,
        least_rows=LEAST_ROWS if bundle.manifest.quantized else 1,
    )


def _by_context(bundle: Bundle, repeats: int) -> list[tuple[str, ...]]:
    session = _session(bundle, CONTEXTS[-1] + 64)
    lines = [("context", *(f"{width} tokens" for width in WIDTHS))]
    for context in CONTEXTS:
        while session.length < context:
            feed(session, [1] * min(PREFILL, context - session.length), wanted=0)
        milliseconds = _medians([_chain(session, width) for width in WIDTHS], repeats)
        lines.append((str(context), *milliseconds))
    return lines


def _chain(session: OrtSession | SlotSession, width: int, wanted: int | None = None) -> Callable[[], None]:
    def call() -> None:
        session.grow([1] * width, range(-1, width - 1), wanted=wanted)
        session.truncate(session.length)

    return call


def _by_batch(bundle: Bundle, repeats: int) -> list[tuple[str, ...]]:
    manifest, target = bundle.manifest, bundle.manifest.target
    cache = BatchCache(target.signature, target.cache_dtype, manifest.capacity, BATCHES[-1], manifest.widths[-1])
    engine = BatchEngine(
        bundle.engine(TARGET),
        target.signature,
        cache,
        target.cache_dtype,
        target.vocabulary_size,
        None,
        CallCosts(),
        TARGET,
    )
    asked: list[SlotCall] = []

    def collect(_: object, call: SlotCall, __: int) -> None:
        asked.append(call)

    sessions = [SlotSession(collect, engine, cache, slot) for slot in range(BATCHES[-1])]
    for slot, session in enumerate(sessions):
        feed(SlotSession(at_once, engine, cache, slot), [1] * BATCH_CONTEXT, wanted=0)
        session.truncate(BATCH_CONTEXT)

    def together(batch: int, width: int) -> Callable[[], None]:
        def call() -> None:
            asked.clear()
            for session in sessions[:batch]:
                session.grow([1] * width, range(-1, width - 1))
                session.truncate(BATCH_CONTEXT)
            engine.call(asked)

        return call

    lines = [("requests", *(f"{width} tokens" for width in WIDTHS), "ms a token, plain")]
    for batch in BATCHES:
        milliseconds = _medians([together(batch, width) for width in WIDTHS], repeats)
        lines.append((str(batch), *milliseconds, f"{float(milliseconds[0]) / batch:.2f}"))
    return lines


def _by_logit_rows(bundle: Bundle, repeats: int) -> list[tuple[str, ...]]:
    session = _session(bundle, bundle.manifest.capacity)
    feed(session, [1] * BATCH_CONTEXT, wanted=0)
    lines: list[tuple[str, ...]] = [("tokens", "all rows", "one row", "none")]
    for width in (*WIDTHS, PREFILL):
        calls = [_chain(session, width, wanted) for wanted in (width, 1, 0)]
        lines.append((str(width), *_medians(calls, repeats)))
    return lines


def _medians(calls: Sequence[Callable[[], None]], repeats: int) -> list[str]:
    """Milliseconds of each, made in turn; of two calls in a row the second counts, like one of many."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            call()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [f"{1000 * median(taken):.2f}" for taken in times]


def _process(bundle: Bundle) -> list[tuple[str, ...]]:
    runs = [_started(bundle.path) for _ in range(3)]
    weights = sum(file.stat().st_size for file in bundle.path.glob("*/*.data"))
    target = bundle.manifest.target.signature
    itemsize = np.dtype(bundle.manifest.target.cache_dtype).itemsize
    caches = 2 * target.num_layers * target.kv_heads * target.head_dim * 256 * itemsize
    grown = median(run["used"] - run["empty"] for run in runs)
    return [
        ("seconds until imported", f"{median(run['imported'] for run in runs):.2f}"),
        ("seconds until loaded", f"{median(run['loaded'] for run in runs):.2f}"),
        ("seconds until the first token", f"{median(run['first'] for run in runs):.2f}"),
        ("weights on disk, MB", f"{weights / 1e6:.0f}"),
        ("KV cache of the target for 256 tokens, MB", f"{caches / 1e6:.0f}"),
        ("memory in use beyond the libraries', MB", f"{grown / 1e6:.0f}"),
        ("of weights and cache", f"{grown / (weights + caches):.2f}"),
    ]


def _started(path: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", STARTED, str(path)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
