"""The bundle: the directory that a build leaves and a deployment loads, and its manifest.

BUNDLE/
  manifest.json                    what is inside, with the hash of every other file
  target/model.onnx, model.onnx.data, tokenizer.json [, chat_template.jinja]
  target/early_exit.onnx           the same with layers left out, on the same weights
  draft/ ...                       as target/, where the bundle has a draft model
  medusa/model.onnx [, model.onnx.data, vocabulary.npy]
  eagle/, eagle3/                  as medusa/, and fuse.onnx where the head reads several of the target's states
  */model.engine ...               instead of .onnx and .onnx.data where the backend is TensorRT or TensorRT-RTX
  */*.layers.json                  what each engine is made of
  quantization.html                what a quantized target lost
  kernels/accept.sm89.cubin ...    the accept step, compiled for each GPU architecture that the bundle is built for
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from specrun.engines.backend import BACKENDS, MODEL, engine_file
from specrun.engines.context import Context
from specrun.engines.errors import SpecrunError, UnfitError
from specrun.engines.schema import SchemaError, from_json, to_json
from specrun.engines.signature import Signature

FORMAT_VERSION = 10
MANIFEST = "manifest.json"
TARGET, DRAFT = "target", "draft"
ENGINE_FILE, TOKENIZER_FILE, CHAT_TEMPLATE_FILE = "model.onnx", "tokenizer.json", "chat_template.jinja"

VOCABULARY_FILE = "vocabulary.npy"

# Proposers, as vLLM names them. The same with TREE_SUFFIX proposes trees, with NGRAM_FIRST only where a lookup finds
# nothing.
NGRAM, DRAFT_MODEL, MEDUSA, EAGLE, EAGLE3, EARLY_EXIT = (
    "ngram",
    "draft_model",
    "medusa",
    "eagle",
    "eagle3",
    "early_exit",
)
TREE_SUFFIX = "_tree"
NGRAM_FIRST = "ngram+"

KERNELS = "kernels"
QUANTIZATION_REPORT = "quantization.html"

HASH_CHUNK_BYTES = 1 << 22


class BundleError(SpecrunError):
    """A bundle is missing, incomplete, edited, or of another format version."""


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        state = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                state.update(chunk)
        return cls(bytes=path.stat().st_size, sha256=state.hexdigest())


@dataclass(frozen=True)
class ModelEntry:
    """One model of a bundle: identity, graph and vocabulary."""

    name: str
    family: str  # transformers' model_type
    parameters: int
    context: Context
    signature: Signature
    cache_dtype: str  # NumPy name of the element type of the KV cache
    vocabulary_size: int  # logits beyond it are padding and are never chosen
    vocabulary_sha256: str
    special_tokens: dict[str, str]  # by role ("bos_token", ...), for chat templates
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class HeadEntry:
    """A draft that lives on the target's hidden states: Medusa heads, an EAGLE head, or the target's own early exit."""

    name: str
    parameters: int  # of its own; an early exit has none
    taps: tuple[int, ...]  # the target's hidden states that it reads, as in Signature.taps
    signature: Signature | None  # of graphs with a KV cache
    positions: int  # how many it guesses at once; 0: one after the other, without end
    capacity: int  # tokens that its KV cache can hold
    reduced_vocabulary: bool  # its logits are of the token ids in VOCABULARY_FILE


@dataclass(frozen=True)
class Quality:
    """What quantization cost a target, measured on held-out text."""

    tokens: int
    agreement: float  # share of the greedy choices that are those of the unquantized model
    reference_perplexity: float  # of the unquantized model
    perplexity: float

    @property
    def perplexity_change(self) -> float:
        """0.01: one percent worse."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True)
class Acceptance:
    """Tokens per round that a draft promises, estimated from its first guesses on held-out text."""

    reference: float  # before quantization of draft and target
    quantized: float

    @property
    def change(self) -> float:
        """-0.01: one percent less."""
        return self.quantized / self.reference - 1


@dataclass(frozen=True)
class Manifest:
    """Everything that a runner must know before it loads a weight."""

    format_version: int
    backend: str  # one of engines/backend.py
    precision: str  # one of engines/precision.py
    quality: Quality | None  # of a quantized target
    acceptance: dict[str, Acceptance]  # by draft, of a quantized target
    capacity: int  # tokens that the target's KV cache can hold
    draft_capacity: int  # the same of the draft; 0 without a draft
    k: int  # default number of drafted tokens per round
    widths: tuple[int, ...]  # tokens per call: plain decoding, verification of a chain, of a tree, prefill chunk
    engine_widths: tuple[int, ...]  # those that engines with static shapes have profiles for, ascending
    slots: int  # sequences that one call of an engine with static shapes can serve
    nodes: int  # default size of a proposed tree
    p_min: float  # default probability below which a draft's guesses are not proposed
    proposer: str  # default proposer
    gpus: tuple[str, ...]  # architectures that it is built for: "sm89"
    target: ModelEntry
    draft: ModelEntry | None
    heads: dict[str, HeadEntry]  # by proposer
    files: dict[str, FileEntry]  # by path relative to the bundle
    versions: dict[str, str]  # of the packages that built it
    inputs: str  # fingerprint of sources and options, so that an unchanged build is not repeated
    command: str  # that builds it again, the GPUs left out

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Batch and width of the calls that engines with static shapes and a KV cache are for."""
        return call_shapes(self.engine_widths, self.slots, self.quantized)

    @property
    def quantized(self) -> bool:
        """Whether the target's activations are quantized, so that the least rounding may change a choice."""
        return self.quality is not None

    def positions(self, proposer: str) -> int:
        """Default number of positions ahead that `proposer` guesses. N-gram lookup, whose guesses cost nothing, goes as
        far as a verification is wide."""
        return max(self.k, self.nodes) if proposer.startswith(NGRAM) else self.k


def call_shapes(widths: tuple[int, ...], slots: int, quantized: bool) -> tuple[tuple[int, int], ...]:
    """Batch and width of the calls that engines with static shapes are built for. `widths` ascending: the last one
    reads prompts, of one sequence at a time; the others read one or all. Where quantized, all only: a call of another
    shape may round differently, which is enough for an activation to fall on the next level."""
    *decoding, prefill = widths
    batches = sorted({slots} if quantized else {1, slots})
    return (*((batch, width) for width in decoding for batch in batches), (1, prefill))


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: checked, nothing loaded yet."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> "Bundle":
        """Read and check a bundle: schema, format version, and the size and hash of every file.

        Raises BundleError or SchemaError.
        """
        bundle = cls(path, read_manifest(path))
        for name, expected in bundle.manifest.files.items():
            require_unchanged(path / name, expected)
        return bundle

    def model_file(self, model: str, name: str) -> Path:
        """Path of a file of the target, the draft or a head."""
        return self.path / model / name

    def engine(self, model: str, engine: str = MODEL) -> Path:
        """Path of an engine of the target, the draft or a head."""
        return self.model_file(model, engine_file(self.manifest.backend, engine))

    def require_gpu(self, gpu: str) -> None:
        """Whether it is built for the architecture `gpu`, such as sm89. Raises UnfitError."""
        if gpu not in self.manifest.gpus:
            raise UnfitError(
                f"this GPU is {gpu}, {self.path} was built for {', '.join(self.manifest.gpus) or 'none'}; rebuild it "
                f"with: {self.manifest.command} --gpu {gpu}"
            )


def read_manifest(path: Path) -> Manifest:
    """The manifest of the bundle at `path`, without looking at the other files."""
    file = path / MANIFEST
    if not path.is_dir():
        raise BundleError(f"{path} is not a directory; expected a bundle, as `specrun build` leaves it")
    if not file.is_file():
        raise BundleError(f"{path} has no {MANIFEST}; expected a bundle, as `specrun build` leaves it")
    try:
        data = json.loads(file.read_bytes())
    except ValueError as error:
        raise BundleError(f"{file} is not JSON ({error}); rebuild the bundle") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{file}: got format_version {version!r}, expected {FORMAT_VERSION}; rebuild the bundle with this version"
        )
    manifest = from_json(Manifest, data, str(file))
    if manifest.backend not in BACKENDS:
        raise SchemaError(f"{file}: got backend {manifest.backend!r}, expected one of {', '.join(BACKENDS)}")
    for kind, head in manifest.heads.items():
        if kind not in (MEDUSA, EAGLE, EAGLE3, EARLY_EXIT) or not set(head.taps) <= set(manifest.target.signature.taps):
            raise SchemaError(
                f"{file}: the head {kind} is unknown or reads other states than the target puts out; rebuild the bundle"
            )
    if (manifest.draft is None) != (manifest.draft_capacity == 0):
        raise SchemaError(f"{file}: draft and draft_capacity contradict each other; rebuild the bundle")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest into the (not yet published) bundle at `path`."""
    (path / MANIFEST).write_text(json.dumps(to_json(manifest), indent=2) + "\n", encoding="utf-8")


def require_unchanged(file: Path, expected: FileEntry) -> None:
    if not file.is_file():
        raise BundleError(f"{file} is missing; rebuild the bundle or copy it again")
    size = file.stat().st_size
    if size != expected.bytes:
        raise BundleError(f"{file}: got {size} bytes, expected {expected.bytes}; rebuild the bundle or copy it again")
    if FileEntry.of(file) != expected:
        raise BundleError(f"{file}: its SHA-256 is not the one in {MANIFEST}; it was edited or damaged, rebuild it")


def file_entries(path: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `path`, by relative path."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)
    return {file.relative_to(path).as_posix(): FileEntry.of(file) for file in files}
