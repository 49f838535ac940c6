"""What is compared: systems, their precisions, and their ways to decode."""

import os
from dataclasses import dataclass
from typing import Any

SPECRUN = "specrun"
PLAIN = "plain"


@dataclass(frozen=True)
class Mode:
    """A way to decode. `settings` are the system's own words for how to speculate; its worker reads them."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class System:
    """One library with the model in one precision."""

    peer: str
    precision: str
    modes: tuple[Mode, ...]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.precision}"

    @property
    def file_name(self) -> str:
        return f"{self.peer}-{self.precision}"

    @property
    def worker(self) -> str:
        return f"benchmarks.workers.{self.peer.replace('-', '_')}"


def _of(peer: str, precisions: tuple[str, ...], *speculative: Mode) -> list[System]:
    return [System(peer, precision, (Mode(PLAIN, {}), *speculative)) for precision in precisions]


SYSTEMS = [
    *_of(
        "transformers",
        ("fp32", "bf16"),
        Mode("lookup 8", {"prompt_lookup_num_tokens": 8}),
    ),
    *_of(
        "onnxruntime-genai",
        ("fp32", "int8", "int4"),
        Mode("ngram 4", {"ngram_size": 3, "max_draft_tokens": 4}),
        Mode("ngram 8", {"ngram_size": 3, "max_draft_tokens": 8}),
        Mode("ngram adaptive", {"ngram_size": 4, "ngram_chained_lookup": True, "min_adaptive_k": 2}),
    ),
    *_of(
        "openvino",
        ("fp32", "bf16", "int8", "int4"),
        Mode("lookup 4", {"num_assistant_tokens": 4, "max_ngram_size": 3}),
        Mode("lookup 8", {"num_assistant_tokens": 8, "max_ngram_size": 3}),
    ),
    *_of(
        "llama-cpp",
        ("f32", "q8_0", "q4_0"),
        Mode("lookup 4", {"max_ngram_size": 2, "num_pred_tokens": 4}),
        Mode("lookup 10", {"max_ngram_size": 2, "num_pred_tokens": 10}),
    ),
    *_of(
        SPECRUN,
        ("fp32", "int8"),
        Mode("default", {"proposer": "default"}),
        Mode("ngram", {"proposer": "ngram"}),
    ),
]


def usable_cores() -> int:
    """How many threads every system gets."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
