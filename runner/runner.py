"""A loaded bundle: text in, text out."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.backend import GPU_BACKENDS
from specrun.engines.errors import RequestError
from specrun.engines.manifest import (
    CHAT_TEMPLATE_FILE,
    DRAFT,
    EARLY_EXIT,
    MEDUSA,
    NGRAM,
    NGRAM_FIRST,
    TARGET,
    TOKENIZER_FILE,
    TREE_SUFFIX,
    Bundle,
    BundleError,
    ModelEntry,
)
from specrun.engines.pair import require_pair
from specrun.engines.vocabulary import Vocabulary, load_tokenizer
from specrun.runner import chat
from specrun.runner.call_costs import CallCosts
from specrun.runner.draft_sessions import DraftSessions
from specrun.runner.draft_tree import TreeShape
from specrun.runner.grammar import GrammarCompiler
from specrun.runner.loader import Loader, open_loader
from specrun.runner.logprobs import MAX_TOP, TokenLogprobs
from specrun.runner.loop import Limits, Observer, decode
from specrun.runner.pace import DraftCost, Pace, Reach, RequestPace
from specrun.runner.processors import Processing, Processor
from specrun.runner.proposers import Proposer
from specrun.runner.proposers.ngram import NGramLookup
from specrun.runner.proposers.ngram_first import NGramFirst
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.session import Session
from specrun.runner.statistics import Statistics
from specrun.runner.text import TextStream
from specrun.runner.types import FinishReason, Source, Token

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

NO_PROPOSER = "none"


@dataclass(frozen=True)
class Request:
    """One generation. None stands for the bundle's own setting."""

    prompt_ids: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    processing: Processing = field(default_factory=Processing)
    logprobs: int | None = None  # how many of the likeliest tokens to report beside each emitted one; None: nothing
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # beside the model's own
    prediction: tuple[int, ...] = ()  # the client's guess of the output
    proposer: str | None = None  # "none" for plain decoding
    k: int | None = None  # positions ahead
    nodes: int | None = None  # of a proposed tree
    p_min: float | None = None  # what a draft finds less likely is not proposed
    cache_prompt: bool = True  # a server may keep its KV rows, and take those of an earlier request

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"got max-tokens {self.max_tokens}, expected 1 or more")
        if self.k is not None and self.k < 1:
            raise RequestError(f"got k = {self.k}, expected 1 or more (for plain decoding: --proposer {NO_PROPOSER})")
        if self.nodes is not None and self.nodes < 1:
            raise RequestError(f"got {self.nodes} tree nodes, expected 1 or more")
        if self.p_min is not None and not 0 <= self.p_min < 1:
            raise RequestError(f"got p-min {self.p_min}, expected a probability below 1 (0: propose everything)")
        if self.processing.min_tokens > self.max_tokens:
            raise RequestError(
                f"got min-tokens {self.processing.min_tokens}, expected at most max-tokens, which is {self.max_tokens}"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP:
            raise RequestError(f"got {self.logprobs} log-probabilities per token, expected 0 to {MAX_TOP}")
        if "" in self.stop:
            raise RequestError("got an empty stop string, expected at least one character")
        if not self.prompt_ids:
            raise RequestError("got an empty prompt, expected at least one token")

    def plain(self) -> "Request":
        """The same without speculation."""
        return replace(self, proposer=NO_PROPOSER)


@dataclass(frozen=True)
class Event:
    """One more token, and the text that it made certain (often less or more than the token itself)."""

    token: Token
    text: str
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None  # where the request asked for them


@dataclass(frozen=True)
class Completion:
    """A finished generation. `ids` end with the stop token or the token that completed a stop string;
    `text` ends before either."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    statistics: Statistics
    logprobs: tuple[TokenLogprobs, ...] | None  # of each of `ids`, where the request asked for them

    def to_json(self) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else [asdict(each) for each in self.logprobs]
        return {
            "ids": list(self.ids),
            "text": self.text,
            "tok_s": self.statistics.tok_s,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            **({} if logprobs is None else {"logprobs": logprobs}),
            "statistics": self.statistics.to_json(),
        }


class Runner:
    """A bundle with its engines loaded. Serves one request at a time."""

    def __init__(self, bundle: Bundle, loader: Loader | None = None, pace: Pace | None = None) -> None:
        """Load what `bundle` holds. Raises BundleError, VocabularyMismatchError, UnfitError or an engine's error."""
        manifest = bundle.manifest
        self.bundle = bundle
        self.tokenizer = load_tokenizer(bundle.model_file(TARGET, TOKENIZER_FILE))
        vocabulary = self._vocabulary(self.tokenizer, manifest.target)
        self._chat_template = self._read_chat_template()
        target = manifest.target
        if manifest.draft is not None:
            draft_tokenizer = load_tokenizer(bundle.model_file(DRAFT, TOKENIZER_FILE))
            share = manifest.draft.parameters / target.parameters
            require_pair(vocabulary, self._vocabulary(draft_tokenizer, manifest.draft), share)
        costs = CallCosts()
        self._pace = pace or (None if manifest.backend in GPU_BACKENDS else Pace(costs))
        self._load(open_loader(bundle, costs) if loader is None else loader)
        self._grammars = GrammarCompiler(self.tokenizer, target.vocabulary_size, self._stop_token_ids)

    def beside(self, loader: Loader) -> "Runner":
        """Another runner of the same bundle, with sessions of its own from `loader`."""
        other = copy.copy(self)
        other._load(loader)
        return other

    def _load(self, loader: Loader) -> None:
        bundle, target = self.bundle, self.bundle.manifest.target
        cache = loader.cache(TARGET, target.signature, target.cache_dtype, bundle.manifest.capacity)
        self._target = loader.target(
            bundle.engine(TARGET), target.signature, cache, target.cache_dtype, target.vocabulary_size
        )
        self._drafts = DraftSessions(bundle, loader, cache)

    @classmethod
    def open(cls, path: Path) -> "Runner":
        """Check and load the bundle at `path`."""
        return cls(Bundle.open(path))

    @property
    def target(self) -> Session:
        """The session that verifies, to measure it. Its state is the last request's."""
        return self._target

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of the proposers that this bundle can run.

        Quantized targets get no trees: a tree's rows lie in other places of the cache than plain decoding's, sums come
        out differently in the last bit, and that is enough for an activation to fall on the next level.
        """
        quantized = self.bundle.manifest.quantized
        drafts = [name for name in self._drafts.proposers if not (quantized and name.endswith(TREE_SUFFIX))]
        return (NGRAM, *drafts, *(NGRAM_FIRST + name for name in drafts))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt that is to be continued."""
        return tuple(self.tokenizer.encode(prompt).ids)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of text, nothing put in front."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, message: str) -> tuple[int, ...]:
        """Token ids of a conversation in which the user says `message`. Raises RequestError."""
        if self._chat_template is None:
            raise RequestError(f"{self.bundle.path} has no chat template; prompt it without --chat")
        return self.encode_messages([{"role": "user", "content": message}])

    def encode_messages(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, roles and contents, ready for the answer. Raises RequestError."""
        if self._chat_template is None:
            raise RequestError(f"{self.bundle.path} has no chat template; use completions, not chat")
        text = chat.render(self._chat_template, messages, self.bundle.manifest.target.special_tokens)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)  # the template writes its own

    def chooser(self, request: Request) -> Chooser:
        """What chooses the tokens of `request`, before the first one. Raises RequestError or GrammarError."""
        processing = request.processing
        if processing.changes_nothing:
            return Chooser(request.sampling)
        size = self.bundle.manifest.target.vocabulary_size
        processing.require_ids(size)
        grammar = None if processing.grammar is None else self._grammars.start(processing.grammar)
        stop = self._stop_token_ids | request.stop_token_ids
        processor = Processor(processing, request.prompt_ids, size, stop, grammar)
        return Chooser(request.sampling, processor)

    def stream(
        self,
        request: Request,
        statistics: Statistics | None = None,
        observe: Observer | None = None,
        reused: int = 0,
    ) -> Iterator[Event]:
        """Generate, yielding each token as it is decided. The last event carries the finish reason.

        `statistics` is filled in while it runs. `reused`: as in `decode`.
        Raises RequestError, GrammarError or LogitsError.
        """
        self.check(request)
        statistics = statistics or Statistics()
        chooser = self.chooser(replace(request, sampling=request.sampling.with_seed()))
        name = self._proposer_name(request)
        limits = self._limits(request, name)
        with self._paced(name, limits, request, reused) as pace:
            yield from self._stream(request, statistics, observe, chooser, name, limits, pace, reused)

    def _stream(
        self,
        request: Request,
        statistics: Statistics,
        observe: Observer | None,
        chooser: Chooser,
        name: str,
        limits: Limits,
        pace: RequestPace | None,
        reused: int,
    ) -> Iterator[Event]:
        proposer = self._proposer(name, request, pace)
        logprobs: TokenLogprobs | None = None
        looked_at = request.logprobs is not None or observe is not None

        def look(position: int, logits: Array, token: int) -> None:
            nonlocal logprobs
            if request.logprobs is not None:
                logprobs = TokenLogprobs.of(logits, token, request.logprobs)
            if observe is not None:
                observe(position, logits, token)

        tokens = decode(
            self._target,
            proposer,
            list(request.prompt_ids),
            chooser,
            limits,
            statistics,
            look if looked_at else None,
            pace,
            reused,
        )
        text = TextStream(self.tokenizer, request.stop, request.processing.min_tokens)
        for token in tokens:
            with statistics.timed("text"):
                delta = text.push(token.id)
                if token.finish_reason is not None:
                    delta += text.finish()
            finish = "stop" if text.stopped else token.finish_reason
            yield Event(token, delta, finish, logprobs)
            if finish is not None:
                return

    def generate(self, request: Request, observe: Observer | None = None) -> Completion:
        """Generate the whole completion. Raises RequestError."""
        request = replace(request, sampling=request.sampling.with_seed())
        statistics = Statistics()
        events = list(self.stream(request, statistics, observe))
        logprobs = tuple(event.logprobs for event in events if event.logprobs is not None)
        finish_reason, seed = events[-1].finish_reason, request.sampling.seed
        assert finish_reason is not None
        assert seed is not None
        return Completion(
            ids=tuple(event.token.id for event in events),
            text="".join(event.text for event in events),
            finish_reason=finish_reason,
            seed=seed,
            statistics=statistics,
            logprobs=None if request.logprobs is None else logprobs,
        )

    def check(self, request: Request) -> None:
        """Whether it can be served, before it is. Raises RequestError."""
        self._require_room(request)
        name = self._proposer_name(request)
        self._require_proposer(name)
        if request.prediction and name not in (NO_PROPOSER,) and not name.startswith(NGRAM):
            raise RequestError(f"got a prediction with the proposer {name!r}, which looks nothing up")
        self._limits(request, name)
        size = self.bundle.manifest.target.vocabulary_size
        strange = [token for token in request.stop_token_ids if not 0 <= token < size]
        if strange:
            raise RequestError(f"got stop token id {strange[0]}, expected 0 to {size - 1}")
        request.processing.require_ids(self.bundle.manifest.target.vocabulary_size)

    @property
    def _stop_token_ids(self) -> frozenset[int]:
        return frozenset(self.bundle.manifest.target.stop_token_ids)

    def _proposer_name(self, request: Request) -> str:
        """The one asked for, or the bundle's; the rejection rule judges chains only."""
        default = self.bundle.manifest.proposer
        if not request.sampling.rejects:
            return request.proposer or default
        name = request.proposer or default.removesuffix(TREE_SUFFIX)
        if request.proposer is None and name != default:
            logger.info("the rejection rule judges chains: %s proposes instead of %s", name, default)
        if name.endswith(TREE_SUFFIX):
            raise RequestError(f"got proposer {name!r} with the rejection rule, which judges chains, not trees")
        return name

    def _limits(self, request: Request, proposer: str) -> Limits:
        manifest = self.bundle.manifest
        k, widest = manifest.positions(proposer) if request.k is None else request.k, self._target.max_tokens - 1
        for name, count in (("k =", k), ("nodes =", request.nodes or 0)):
            if count > widest:
                raise RequestError(
                    f"got {name} {count}, the engines of this bundle verify at most {widest} proposed tokens at once; "
                    f"build with a larger --nodes"
                )
        return Limits(
            max_tokens=request.max_tokens,
            stop_token_ids=self._stop_token_ids | request.stop_token_ids,
            k=k,
            prefill_width=manifest.widths[-1],
        )

    @contextmanager
    def _paced(self, name: str, limits: Limits, request: Request, reused: int) -> Iterator[RequestPace | None]:
        """What decides how far rounds speculate; nothing does where the request says who proposes or how far, or gives
        up that speculation leaves the output alone."""
        chosen = request.proposer is not None or request.k is not None
        if self._pace is None or chosen or request.sampling.rejects:
            yield None
            return
        draft = "" if name == NGRAM else name.removeprefix(NGRAM_FIRST)
        lookup = limits.k if name.startswith(NGRAM) else 0
        reach = Reach(lookup, self.bundle.manifest.positions(draft) if draft else 0)
        has: dict[Source, bool] = {"lookup": bool(lookup), "draft": bool(draft)}
        sources = [source for source, there in has.items() if there]
        kind = draft.removesuffix(TREE_SUFFIX)
        nodes = self.bundle.manifest.nodes if request.nodes is None else request.nodes
        breadth = TreeShape.of(nodes).breadth if draft.endswith(TREE_SUFFIX) else 1
        cost = DraftCost(kind, kind != MEDUSA, breadth, kind not in (MEDUSA, EARLY_EXIT)) if draft else None
        with self._pace.request(sources, reach, cost, len(request.prompt_ids), limits.max_tokens, reused) as pace:
            yield pace

    def _proposer(self, name: str, request: Request, pace: RequestPace | None) -> Proposer | None:
        manifest = self.bundle.manifest
        if name == NO_PROPOSER:
            return None
        if name == NGRAM:
            return NGramLookup(request.prediction)
        if name in self.proposers:
            draft = name.removeprefix(NGRAM_FIRST)
            nodes = manifest.nodes if request.nodes is None else request.nodes
            p_min = manifest.p_min if request.p_min is None else request.p_min
            proposer = self._drafts.proposer(draft, nodes, p_min)
            if draft == name:
                return proposer
            if pace is not None:
                return NGramFirst(proposer, lambda: pace.next, NGramLookup(request.prediction))
            fixed = Reach(
                manifest.positions(name) if request.k is None else request.k,
                manifest.positions(draft) if request.k is None else request.k,
            )
            return NGramFirst(proposer, lambda: fixed, NGramLookup(request.prediction))
        raise AssertionError(f"no proposer {name!r}")

    def _require_proposer(self, name: str) -> None:
        if name not in (NO_PROPOSER, *self.proposers):
            raise RequestError(
                f"got proposer {name!r}, this bundle has {', '.join(self.proposers)} and {NO_PROPOSER} (plain decoding)"
            )

    def _require_room(self, request: Request) -> None:
        capacity = self._target.capacity
        if len(request.prompt_ids) >= capacity:
            raise RequestError(
                f"got a prompt of {len(request.prompt_ids)} tokens, the bundle's capacity is {capacity} for prompt and "
                f"output together; shorten it or build with a larger --capacity"
            )
        columns = self.bundle.manifest.target.signature.vocab_size
        if not all(0 <= token_id < columns for token_id in request.prompt_ids):
            raise RequestError(f"got a prompt with token ids outside 0 .. {columns - 1}")

    def _read_chat_template(self) -> str | None:
        file = self.bundle.model_file(TARGET, CHAT_TEMPLATE_FILE)
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def _vocabulary(self, tokenizer: Any, model: ModelEntry) -> Vocabulary:
        vocabulary = Vocabulary.of(tokenizer)
        if vocabulary.digest() != model.vocabulary_sha256:
            raise BundleError(f"the tokenizer of {model.name} is not the one it was built with; rebuild the bundle")
        return vocabulary
