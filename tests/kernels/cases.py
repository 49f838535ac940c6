"""Random cases for the accept step, every corner among them, and what the NumPy reference makes of them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specrun.engines.errors import RequestError
from specrun.runner.filters import LogitsError
from specrun.runner.processors import Processing, Processor
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.types import ROOT, Proposal

Array = np.ndarray[Any, Any]

KINDS = [
    *("random", "random", "narrow nucleus", "ties", "constant", "masked logits", "greedy", "greedy ties", "NaN"),
    *("infinite", "extreme", "low temperature", "nothing left", "processors", "processors"),
]
VOCABULARIES = [1, 2, 5, 31, 32, 33, 100, 257, 1000, 1023, 1025, 2049, 4097]


@dataclass(frozen=True)
class Case:
    """Requests of one call."""

    logits: Array  # float32 [requests, rows, stride], exact in `dtype`
    dtype: str
    columns: int
    choosers: list[Chooser]
    positions: list[int]
    proposals: list[Proposal]

    def row(self, request: int, row: int) -> Array:
        return np.asarray(self.logits[request, row, : self.columns])

    def path(self, request: int, row: int) -> list[int]:
        """Tokens from the first node to the one that `row` follows."""
        proposal, path = self.proposals[request], []
        while row > 0:
            path.append(proposal.tokens[row - 1])
            row = proposal.parents[row - 1] + 1
        return path[::-1]

    def choice(self, request: int, row: int) -> int:
        """The reference's; -1 if there is none."""
        path = self.path(request, row)
        try:
            return self.choosers[request].choose(self.row(request, row), self.positions[request] + len(path), path)
        except LogitsError:
            return -1


def make_case(index: int) -> Case:
    """Case number `index`, always the same."""
    rng = np.random.default_rng([2026, index])
    kind = KINDS[index % len(KINDS)]
    columns = int(rng.choice(VOCABULARIES))
    requests, nodes = int(rng.integers(1, 4)), int(rng.integers(0, 9))
    stride = columns + int(rng.choice([0, 0, 3, 64]))
    logits = rng.standard_normal((requests, nodes + 1, stride)) * rng.choice([0.3, 2, 4, 12])
    dtype = str(rng.choice(["float32", "float32", "float16", "bfloat16"]))
    logits = rounded(_shaped(logits, kind, columns, rng).astype(np.float32), dtype)
    choosers = [_chooser(kind, columns, rng) for _ in range(requests)]
    positions = [int(rng.integers(0, 2 ** int(rng.integers(1, 41)))) for _ in range(requests)]
    case = Case(logits, dtype, columns, choosers, positions, [Proposal((), ())] * requests)
    for request in range(requests):
        # Not every request has as many nodes as the call has room for.
        count = nodes if rng.random() < 0.7 else int(rng.integers(0, nodes + 1))
        case.proposals[request] = _propose(case, request, count, bool(rng.random() < 0.5), rng)
    return case


def rounded(logits: Array, dtype: str) -> Array:
    """What is left of float32 logits in another type, as float32."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return logits.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (logits.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return logits


def as_stored(logits: Array, dtype: str) -> Array:
    """The same numbers as they lie in memory."""
    if dtype == "bfloat16":
        return (logits.view(np.uint32) >> 16).astype(np.uint16)
    return logits.astype(dtype)


def _shaped(logits: Array, kind: str, columns: int, rng: np.random.Generator) -> Array:
    if kind in ("ties", "greedy ties"):
        logits = np.round(logits * 2) / 2
    elif kind == "constant":
        logits[:] = rng.choice([-3.5, 0.0, -0.0, 1.25])
    elif kind == "masked logits":
        kept = rng.integers(0, columns)
        logits[(rng.random(logits.shape) < 0.95) & (np.arange(logits.shape[-1]) != kept)] = -np.inf
    elif kind == "NaN":
        logits[rng.random(logits.shape) < 0.5 / columns] = np.nan * rng.choice([-1, 1])
    elif kind == "infinite":
        logits[rng.random(logits.shape) < 0.5 / columns] = np.inf
        logits[rng.random(logits.shape) < 0.2] = -np.inf
    elif kind == "extreme":
        logits *= 1000
    elif kind == "nothing left":
        logits[:, rng.integers(0, logits.shape[1])] = -np.inf
    return logits


def _chooser(kind: str, columns: int, rng: np.random.Generator) -> Chooser:
    sampling = Sampling(
        temperature=0.0 if kind.startswith("greedy") else float(rng.choice([0, 0.3, 0.7, 1, 1, 1.5, 5])),
        top_k=int(rng.choice([0, 0, 0, 1, 2, 5, 40, columns, columns + 7])),
        top_p=float(rng.choice([1, 1, 0.95, 0.9, 0.5, 0.1, 1e-9])),
        min_p=float(rng.choice([0, 0, 0.01, 0.1, 0.9])),
        seed=int(rng.integers(0, 2**63)) * 2 + 1,
    )
    if kind == "narrow nucleus":
        sampling = Sampling(temperature=2.0, top_p=0.1, seed=sampling.seed)
    if kind == "low temperature":
        sampling = Sampling(float(rng.choice([1e-3, 1e-6, 1e-30, 1e-45])), sampling.top_k, sampling.top_p, 0, 5)
    return Chooser(sampling, _processor(columns, rng) if kind == "processors" else None)


def _processor(columns: int, rng: np.random.Generator) -> Processor:
    def some(share: float) -> list[int]:
        return [int(token) for token in np.flatnonzero(rng.random(columns) < share)]

    def processing() -> Processing:
        return Processing(
            logit_bias={token: float(rng.uniform(-100, 100)) for token in some(0.05)},
            repetition_penalty=float(rng.choice([1, 1, 1.3, 0.8])),
            frequency_penalty=float(rng.choice([0, 0, 0.7, -0.5])),
            presence_penalty=float(rng.choice([0, 0, 1.5])),
            min_tokens=int(rng.choice([0, 5])),
            allowed_token_ids=frozenset(some(0.7)) if rng.random() < 0.3 else None,
            forbidden_token_ids=frozenset(some(0.1)),
        )

    while True:
        try:
            processor = Processor(processing(), some(0.1), columns, frozenset(some(0.02)), None)
            break
        except RequestError:  # nothing would be allowed
            continue
    for token in some(3 / columns)[:6]:
        processor.commit(token)
    return processor


def _propose(case: Case, request: int, count: int, chain: bool, rng: np.random.Generator) -> Proposal:
    """Nodes that are the target's choice in two of three cases."""
    proposal = Proposal((), ())
    for node in range(count):
        parent = node - 1 if chain else int(rng.integers(ROOT, node))
        case.proposals[request] = proposal
        token = case.choice(request, parent + 1)
        if token < 0 or rng.random() < 0.3:
            token = int(rng.integers(0, case.columns + 2))  # also ids that the target never chooses
        if token in proposal.children(parent):
            break
        proposal = Proposal((*proposal.tokens, token), (*proposal.parents, parent))
    return proposal


def make_draft_case(index: int) -> tuple[Case, Array | None, int]:
    """Rows of a draft, one a request: the case, the token of each column (None: the first ones), and the size of the
    target's vocabulary."""
    rng = np.random.default_rng([2027, index])
    case = make_case(index)
    if rng.random() < 0.5:
        return single_rows(case, case.columns), None, case.columns
    vocabulary_size = case.columns + int(rng.integers(0, 500))
    ids = np.sort(rng.choice(vocabulary_size, case.columns, replace=False)).astype(np.int64)
    return single_rows(case, vocabulary_size), ids, vocabulary_size


def single_rows(case: Case, vocabulary_size: int) -> Case:
    """The first row of each request, with processors that fit a vocabulary of this size."""
    rng = np.random.default_rng(vocabulary_size)
    choosers = [
        Chooser(chooser.sampling, _processor(vocabulary_size, rng) if chooser.processor is not None else None)
        for chooser in case.choosers
    ]
    none = [Proposal((), ())] * len(choosers)
    return Case(case.logits[:, :1], case.dtype, case.columns, choosers, case.positions, none)


def make_rejection_case(index: int) -> tuple[Case, list[Array]]:
    """Chains for the rejection rule, and the draft's logits of each request, float32 [nodes, columns]."""
    rng = np.random.default_rng([2028, index])
    kind = ["random", "disjoint", "same", "ties", "masked logits", "extreme", "NaN", "processors"][index % 8]
    columns = int(rng.choice([count for count in VOCABULARIES if count > 1]))
    requests, nodes = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    logits = rng.standard_normal((requests, nodes + 1, columns)) * rng.choice([0.3, 2, 4])
    logits = _shaped(logits, kind, columns, rng).astype(np.float32)
    drafts = logits[:, :nodes] + (rng.standard_normal((requests, nodes, columns)) * rng.choice([0.3, 1, 3])).astype(
        "f4"
    )
    if kind == "disjoint":
        logits[..., ::2] = -np.inf
        drafts[..., 1::2] = -np.inf
    elif kind == "same":
        drafts = logits[:, :nodes]
    drafts = np.nan_to_num(drafts, nan=0.0, neginf=-np.inf)
    choosers = []
    for _ in range(requests):
        chooser = _chooser(kind, columns, rng)
        sampling = replace(chooser.sampling, temperature=chooser.sampling.temperature or 1.0, accept="rejection")
        choosers.append(Chooser(sampling, chooser.processor))
    positions = [int(rng.integers(0, 1000)) for _ in range(requests)]
    case = Case(logits, "float32", columns, choosers, positions, [])
    for request, chooser in enumerate(choosers):
        case.proposals.append(_draw(chooser, drafts[request], positions[request], sampled=rng.random() < 0.8))
    return case, list(drafts)


def _draw(chooser: Chooser, drafts: Array, position: int, sampled: bool) -> Proposal:
    tokens: list[int] = []
    probs: list[Array] = []
    for row in drafts:
        guesses = chooser.best(row, position + len(tokens), 1, path=tokens)
        if not len(guesses.tokens):
            break
        tokens.append(int(guesses.tokens[0]))
        assert guesses.probs is not None
        probs.append(guesses.probs)
    if tokens and not sampled:
        tokens[-1] += int(drafts.shape[-1]) * (position % 2)  # a padding id, which the target never chooses
    chain = Proposal.chain(tokens)
    return Proposal(chain.tokens, chain.parents, tuple(probs)) if sampled and tokens else chain
