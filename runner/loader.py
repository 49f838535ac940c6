"""What loads the engines of a bundle, by where they run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specrun.engines.backend import GPU_BACKENDS
from specrun.engines.manifest import Bundle
from specrun.engines.signature import Signature
from specrun.runner.call_costs import CallCosts
from specrun.runner.logits import Logits
from specrun.runner.session import Session
from specrun.runner.session_ort import OrtLoader

Array = np.ndarray[Any, Any]


class Loader(Protocol):
    """Makes sessions. `dtype`: NumPy name of the element type of caches and outputs. `vocabulary_size`: logits beyond
    it are cut off. `ids`: the token of each logit, ascending, of a draft with a reduced vocabulary."""

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> Any:
        """The KV cache of one sequence, to be given to the sessions that use it. `name`: of the model."""

    def target(self, engine: Path, signature: Signature, cache: Any, dtype: str, vocabulary_size: int) -> Session:
        """The session that verifies."""

    def draft(
        self,
        name: str,
        engine: Path,
        signature: Signature,
        cache: Any,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
    ) -> Session:
        """A session that guesses. `name`: of the draft."""

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], Logits]:
        """Medusa heads: a row of logits each out of a hidden state [width]. `shape`: width, heads, columns."""

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]:
        """What makes features [tokens, hidden] out of hidden states [tokens, width]. `shape`: width, hidden."""


def open_loader(bundle: Bundle, costs: CallCosts) -> Loader:
    """The one for `bundle` on this machine; calls on a CPU are timed in `costs`. Raises UnfitError."""
    if bundle.manifest.backend in GPU_BACKENDS:
        from specrun.runner.cuda.loader import CudaLoader

        return CudaLoader.open(bundle)
    return OrtLoader(bundle.manifest.quantized, costs)
