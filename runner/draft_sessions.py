"""The drafts of a bundle: their engines, loaded when first asked for, and the proposers made of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from specrun.engines.manifest import (
    DRAFT,
    DRAFT_MODEL,
    EARLY_EXIT,
    EARLY_EXIT_FILE,
    ENGINE_FILE,
    FUSE_FILE,
    MEDUSA,
    TARGET,
    TREE_SUFFIX,
    VOCABULARY_FILE,
    Bundle,
)
from specrun.runner.draft_tree import CHAIN, TreeShape
from specrun.runner.kv_cache import KVCache
from specrun.runner.proposers import Proposer
from specrun.runner.proposers.draft_model import DraftModel
from specrun.runner.proposers.eagle import Eagle
from specrun.runner.proposers.early_exit import EarlyExit
from specrun.runner.proposers.medusa import Medusa
from specrun.runner.session_ort import OrtSession, StatelessEngine

Array = np.ndarray[Any, Any]


class DraftSessions:
    """Makes proposers; those of the same draft share its engine and its cache."""

    def __init__(self, bundle: Bundle, target_cache: KVCache) -> None:
        self._bundle = bundle
        self._manifest = bundle.manifest
        self._target_cache = target_cache
        self._session = cache(self._load_session)
        self._stateless = cache(self._load_stateless)
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
            heads = self._stateless(kind, ENGINE_FILE)
            size = None if self._manifest.heads[kind].reduced_vocabulary else self._manifest.target.vocabulary_size
            return Medusa(lambda hidden: heads(hidden[None, columns])[0, :, :size], self._vocabulary(kind), shape)
        fuse = FUSE_FILE if self._bundle.model_file(kind, FUSE_FILE).is_file() else None
        fused = self._stateless(kind, fuse) if fuse else np.copy
        return Eagle(
            self._session(kind),
            lambda hidden: fused(hidden[:, columns]),
            self._vocabulary(kind),
            prefill_width,
            shape,
        )

    def _tapped_columns(self, kind: str) -> Array:
        """Which columns of the target's hidden_states this head reads."""
        size, taps = self._manifest.target.signature.hidden_size, self._manifest.target.signature.taps
        parts = [np.arange(size) + size * taps.index(tap) for tap in self._manifest.heads[kind].taps]
        return np.concatenate(parts)

    def _vocabulary(self, kind: str) -> Array | None:
        if not self._manifest.heads[kind].reduced_vocabulary:
            return None
        return np.asarray(np.load(self._bundle.model_file(kind, VOCABULARY_FILE), allow_pickle=False))

    def _load_session(self, kind: str) -> OrtSession:
        target, draft = self._manifest.target, self._manifest.draft
        if kind == DRAFT_MODEL:
            assert draft is not None
            return OrtSession(
                self._bundle.model_file(DRAFT, ENGINE_FILE),
                draft.signature,
                KVCache(draft.signature, draft.cache_dtype, self._manifest.draft_capacity),
                draft.cache_dtype,
                min(draft.vocabulary_size, target.vocabulary_size),
            )
        head = self._manifest.heads[kind]
        assert head.signature is not None
        if kind == EARLY_EXIT:
            engine, kv_cache = self._bundle.model_file(TARGET, EARLY_EXIT_FILE), self._target_cache
        else:
            engine = self._bundle.model_file(kind, ENGINE_FILE)
            kv_cache = KVCache(head.signature, target.cache_dtype, head.capacity)
        size = head.signature.vocab_size if head.reduced_vocabulary else target.vocabulary_size
        return OrtSession(engine, head.signature, kv_cache, target.cache_dtype, size)

    def _load_stateless(self, kind: str, file: str) -> StatelessEngine:
        return StatelessEngine(self._bundle.model_file(kind, file), self._manifest.target.cache_dtype)
