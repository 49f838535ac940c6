"""What a user asks of a build."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from specrun.engines.accept_kernels import require_architecture
from specrun.engines.backend import (
    BACKENDS,
    GPU_BACKENDS,
    ORT,
    TENSORRT_BACKENDS,
)
from specrun.engines.compiler import Compiler
from specrun.engines.precision import find_precision
from specrun.engines.source import BuildError
from specrun.engines.tensorrt_build import FIRST_WIDTH, require_gpus

PREFILL_WIDTH = 128
DEFAULT_CAPACITY = 2048
MAX_K = 64
MAX_NODES = 256
MAX_SLOTS = 64


@dataclass(frozen=True)
class BuildOptions:
    """What a user asks of a build."""

    model: str  # built-in name, folder, GGUF file, hub id, or a directory that `specrun export` left
    out: Path
    drafts: tuple[str, ...] = ()  # models, heads, or an early exit; the first is in the default proposer
    k: int = 4
    nodes: int = 16  # of a proposed tree
    p_min: float = 0.1  # on a CPU one more row of a verification costs about a twentieth of a plain step
    backend: str = ORT  # a name of engines/backend.py
    precision: str | None = None  # a name of engines/precision.py; None: the backend's first
    text: Path | None = None  # to measure a quantized model with; None: built-in
    accept_quality_loss: bool = False  # build a quantized model however much it lost
    capacity: int | None = None  # DEFAULT_CAPACITY, or all positions of a model that has fewer
    gpus: tuple[str, ...] = ()  # architectures to build for: "sm89"
    slots: int = 1  # sequences that one call on a GPU can serve

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_K:
            raise BuildError(f"got k = {self.k}, expected 1 to {MAX_K}")
        if not 1 <= self.nodes <= MAX_NODES:
            raise BuildError(f"got {self.nodes} tree nodes, expected 1 to {MAX_NODES}")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise BuildError(f"got {self.slots} slots, expected 1 to {MAX_SLOTS}")
        if self.slots > 1 and self.backend not in GPU_BACKENDS:
            raise BuildError(
                f"got {self.slots} slots for the backend {self.backend}, whose engines serve any number: leave it out"
            )
        if not 0 <= self.p_min < 1:
            raise BuildError(f"got p-min {self.p_min}, expected a probability below 1 (0: propose everything)")
        if self.backend not in BACKENDS:
            raise BuildError(f"got backend {self.backend!r}, expected one of {', '.join(BACKENDS)}")
        find_precision(self.backend, self.precision)
        if self.capacity is not None and self.capacity <= self.k + 1:
            raise BuildError(f"got capacity {self.capacity}, expected more than k + 1 = {self.k + 1} tokens")
        if self.backend in GPU_BACKENDS and not self.gpus:
            raise BuildError(
                f"the backend {self.backend} needs --gpu: the GPU that the bundle will run on, such as sm89"
            )
        for gpu in self.gpus:
            require_architecture(gpu)
        if self.backend in TENSORRT_BACKENDS:
            require_gpus(self.backend, self.gpus)

    def compiler(self, cache: Path) -> Compiler:
        return Compiler(
            self.backend,
            find_precision(self.backend, self.precision),
            self.engine_widths,
            self.slots,
            self.gpus,
            cache,
        )

    @property
    def export_precision(self) -> str:
        return find_precision(self.backend, self.precision).export

    @property
    def quantized(self) -> bool:
        return find_precision(self.backend, self.precision).quantized

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens per call: plain decoding, verification of a chain, of a tree, prefill chunk."""
        return 1, self.k + 1, self.nodes + 1, PREFILL_WIDTH

    @property
    def engine_widths(self) -> tuple[int, ...]:
        """Those that engines with static shapes have profiles for, ascending. Quantized ones decode at one width only:
        engines of two widths may round differently, which is enough for an activation to fall on the next level."""
        decoding = {max(self.widths[:-1])} if self.quantized else {max(FIRST_WIDTH, width) for width in self.widths}
        return tuple(sorted({*decoding, PREFILL_WIDTH}))

    @property
    def command(self) -> str:
        """That asks for the same again; without the GPUs."""
        parts = ["specrun", "build", self.model, "--out", str(self.out)]
        parts += [part for draft in self.drafts for part in ("--draft", draft)]
        parts += ["--k", str(self.k), "--nodes", str(self.nodes), "--p-min", f"{self.p_min:g}"]
        parts += ["--backend", self.backend]
        for option, value in (("--precision", self.precision), ("--text", self.text), ("--capacity", self.capacity)):
            parts += [option, str(value)] if value else []
        parts += ["--slots", str(self.slots)] if self.slots > 1 else []
        parts += ["--accept-quality-loss"] if self.accept_quality_loss else []
        return shlex.join(parts)
