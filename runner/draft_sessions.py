"""The drafts of a bundle: their engines, loaded when first asked for, and the proposers made of them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from specrun.engines.backend import EARLY_EXIT_MODEL, FUSE
from specrun.engines.manifest import (
    DRAFT,
    DRAFT_MODEL,
    EARLY_EXIT,
    MEDUSA,
    TARGET,
    TREE_SUFFIX,
    VOCABULARY_FILE,
    Bundle,
)
from specrun.runner.draft_tree import CHAIN, TreeShape
from specrun.runner.loader import Loader
from specrun.runner.logits import Logits
from specrun.runner.proposers import Proposer
from specrun.runner.proposers.draft_model import DraftModel
from specrun.runner.proposers.eagle import Eagle
from specrun.runner.proposers.early_exit import EarlyExit
from specrun.runner.proposers.medusa import Medusa
from specrun.runner.session import Session

Array = np.ndarray[Any, Any]


class DraftSessions:
    """Makes proposers; those of the same draft share its engine and its cache."""

    def __init__(self, bundle: Bundle, loader: Loader, target_cache: Any) -> None:
        """`target_cache`: as `loader` made it."""
        self._bundle = bundle
        self._loader = loader
        self._manifest = bundle.manifest
        self._target_cache = target_cache
        self._session = cache(self._load_session)
        self._heads = cache(self._load_heads)
        self._fuse = cache(self._load_fuse)
        self._kinds = [*([DRAFT_MODEL] if self._manifest.draft else []), *self._manifest.heads]

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names: each draft as a chain and as a tree."""
        return tuple(name for kind in self._kinds for name in (kind, kind + TREE_SUFFIX))

    def proposer(self, name: str, nodes: int, p_min: float) -> Proposer:
        """One of `proposers`; `nodes`: of a tree; `p_min`: as in `TreeShape`."""
        kind = name.removesuffix(TREE_SUFFIX)
        shape = replace(CHAIN if name == kind else TreeShape.of(nodes), p_min=p_min)
        prefill_width = self._manifest.widths[-1]
        if kind == DRAFT_MODEL:
            return DraftModel(self._session(kind), prefill_width, shape)
        if kind == EARLY_EXIT:
            return EarlyExit(self._session(kind), shape)
        columns = self._tapped_columns(kind)
        if kind == MEDUSA:
            heads = self._heads(kind)
            return Medusa(lambda hidden: heads(hidden[columns]), shape)
        fuse = self._fuse(kind) if self._bundle.engine(kind, FUSE).is_file() else np.copy
        return Eagle(self._session(kind), lambda hidden: fuse(hidden[:, columns]), prefill_width, shape)

    def _tapped_columns(self, kind: str) -> Array:
        """Which columns of the target's hidden_states this head reads."""
        size, taps = self._manifest.target.signature.hidden_size, self._manifest.target.signature.taps
        parts = [np.arange(size) + size * taps.index(tap) for tap in self._manifest.heads[kind].taps]
        return np.concatenate(parts)

    def _vocabulary(self, kind: str) -> Array | None:
        if not self._manifest.heads[kind].reduced_vocabulary:
            return None
        return np.asarray(np.load(self._bundle.model_file(kind, VOCABULARY_FILE), allow_pickle=False))

    def _load_session(self, kind: str) -> Session:
        target, draft, loader = self._manifest.target, self._manifest.draft, self._loader
        if kind == DRAFT_MODEL:
            assert draft is not None
            return loader.draft(
                kind,
                self._bundle.engine(DRAFT),
                draft.signature,
                loader.cache(kind, draft.signature, draft.cache_dtype, self._manifest.draft_capacity),
                draft.cache_dtype,
                min(draft.vocabulary_size, target.vocabulary_size),
            )
        head = self._manifest.heads[kind]
        assert head.signature is not None
        if kind == EARLY_EXIT:
            engine, kv_cache = self._bundle.engine(TARGET, EARLY_EXIT_MODEL), self._target_cache
        else:
            engine = self._bundle.engine(kind)
            kv_cache = loader.cache(kind, head.signature, target.cache_dtype, head.capacity)
        size = head.signature.vocab_size if head.reduced_vocabulary else target.vocabulary_size
        return loader.draft(kind, engine, head.signature, kv_cache, target.cache_dtype, size, self._vocabulary(kind))

    def _load_heads(self, kind: str) -> Callable[[Array], Logits]:
        head, target, ids = self._manifest.heads[kind], self._manifest.target, self._vocabulary(kind)
        columns = target.signature.vocab_size if ids is None else len(ids)
        shape = (len(self._tapped_columns(kind)), head.positions, columns)
        size = target.vocabulary_size if ids is None else columns
        return self._loader.heads(kind, self._bundle.engine(kind), shape, target.cache_dtype, size, ids)

    def _load_fuse(self, kind: str) -> Callable[[Array], Array]:
        signature = self._manifest.heads[kind].signature
        assert signature is not None
        shape = (len(self._tapped_columns(kind)), signature.hidden_size)
        return self._loader.fuse(self._bundle.engine(kind, FUSE), shape, self._manifest.target.cache_dtype)
