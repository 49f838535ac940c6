"""Draft heads as published: found, recognized by their layout, checked, loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch

from specrun.engines.errors import first_line
from specrun.engines.manifest import EAGLE, EAGLE3, MEDUSA, FileEntry
from specrun.export.checkpoint import CONFIG_FILE, Checkpoint, CheckpointError, read_json
from specrun.export.eagle import EagleHead
from specrun.export.eagle_layout import TargetShape, read_eagle, read_speculators
from specrun.export.medusa import MedusaHeads, read_medusa

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")

Weights = dict[str, torch.Tensor]


def target_shape(checkpoint: Checkpoint) -> TargetShape:
    """What heads need of a target. Loads its weights."""
    model = checkpoint.load(torch.float32)
    return TargetShape(
        name=checkpoint.name,
        num_layers=model.config.num_hidden_layers,
        hidden_size=model.get_output_embeddings().weight.shape[1],
        embed_tokens=model.get_input_embeddings().weight.detach(),
        lm_head=model.get_output_embeddings().weight.detach(),
    )


@dataclass(frozen=True)
class Head:
    """A head ready to be traced."""

    kind: str  # MEDUSA, EAGLE or EAGLE3
    module: MedusaHeads | EagleHead
    taps: tuple[int, ...]
    vocabulary: torch.Tensor | None  # int64: the target's id of each logit, ascending; None: all of them
    parameters: int  # in the checkpoint's files, maps left out


@dataclass(frozen=True)
class HeadCheckpoint:
    """A directory with a head. Its weights are not in memory."""

    directory: Path
    kind: str

    @classmethod
    def recognize(cls, directory: Path) -> "HeadCheckpoint | None":
        """The head in `directory`; None if it holds something else. Raises CheckpointError."""
        if not directory.is_dir():
            return None
        config = read_json(directory / CONFIG_FILE)
        if "speculators_model_type" in config:
            kinds = {"eagle": EAGLE, "eagle3": EAGLE3}
            if (kind := kinds.get(config["speculators_model_type"])) is None:
                raise CheckpointError(
                    f"{directory} is a speculators checkpoint of the kind {config['speculators_model_type']!r}; "
                    f"expected {' or '.join(kinds)}"
                )
            return cls(directory, kind)
        if "medusa_num_heads" in config or any((directory / name).is_file() for name in WEIGHT_FILES[2:]):
            return cls(directory, MEDUSA)
        names = _weight_names(directory)
        if "fc.weight" in names:
            return cls(directory, EAGLE3 if any(name.startswith("midlayer.") for name in names) else EAGLE)
        return None

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def fingerprint(self) -> str:
        files = [file for name in (CONFIG_FILE, *WEIGHT_FILES) if (file := self.directory / name).is_file()]
        return " ".join(FileEntry.of(file).sha256 for file in files)

    def load(self, target: TargetShape) -> Head:
        """The head in fp32. Raises CheckpointError where it does not fit `target` or is not what its layout says."""
        config, weights = read_json(self.directory / CONFIG_FILE), _load_weights(self.directory)
        parameters = sum(value.numel() for name, value in weights.items() if name not in ("d2t", "t2d"))
        if self.kind == MEDUSA:
            heads, vocabulary = read_medusa(self.name, config, weights, target)
            return Head(MEDUSA, heads.eval(), (target.num_layers,), vocabulary, parameters)
        read = read_speculators if "speculators_model_type" in config else read_eagle
        head, vocabulary = read(self.name, config, weights, target)
        return Head(self.kind, head.eval(), head.shape.taps, vocabulary, parameters)


def _weight_file(directory: Path) -> Path:
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory} has no weights; expected one of {', '.join(WEIGHT_FILES)}")


def _weight_names(directory: Path) -> set[str]:
    """Names of the tensors; empty where there is no single file of them (a sharded language model, for example)."""
    try:
        file = _weight_file(directory)
    except CheckpointError:
        return set()
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, "pt") as opened:
                return set(opened.keys())
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged or truncated ({error}); download it again") from error
    return set(_load_weights(directory))


def _load_weights(directory: Path) -> Weights:
    """All tensors, floating ones as fp32. Pickles are read as weights only: no code in them is run."""
    from safetensors.torch import load_file

    file = _weight_file(directory)
    try:
        if file.suffix == ".safetensors":
            weights = load_file(file)
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors, pickle and zip errors
        raise CheckpointError(f"the weights in {file} cannot be loaded: {first_line(error)}") from error
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{file} is not a dictionary of tensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
