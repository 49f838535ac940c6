"""A model as published: a Hugging Face folder, a hub id, or a GGUF file. Opened first, loaded later."""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.engines.errors import SpecrunError, first_line
from specrun.engines.manifest import FileEntry
from specrun.export import builtin
from specrun.export.family import require_family

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class CheckpointError(SpecrunError):
    """A checkpoint is missing, incomplete or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read; no weights are in memory."""

    name: str
    directory: Path
    gguf: Path | None
    config: Any  # transformers.PretrainedConfig
    parameters: int

    @classmethod
    def open(cls, source: str, downloads: Path) -> "Checkpoint":
        """Find `source`: a built-in name, a folder, a GGUF file, or a hub id (in this order).

        `downloads`: where built-in models are kept. Raises CheckpointError, UnsupportedModelError (what
        cannot be exported exactly) or DownloadError.
        """
        path = builtin.fetch(source, downloads / source) if source in builtin.BUILTIN_MODELS else Path(source)
        if path.is_file():
            if path.suffix != ".gguf":
                raise CheckpointError(f"{path} is a file but not a .gguf; give the model's folder or a GGUF file")
            return cls._open(source if source in builtin.BUILTIN_MODELS else path.stem, path.parent, path)
        if path.is_dir():
            return cls._open(path.resolve().name, path, None)
        if HUB_ID.fullmatch(source):
            return cls._open(source.split("/")[1], _download(source), None)
        raise CheckpointError(
            f"{source} does not exist; expected a folder with {CONFIG_FILE}, a .gguf file, a hub id like "
            f"org/name, or one of {', '.join(builtin.BUILTIN_MODELS)}"
        )

    @classmethod
    def _open(cls, name: str, directory: Path, gguf: Path | None) -> "Checkpoint":
        config = _read_config(directory, gguf)
        require_family(config)
        parameters = _count_gguf(gguf) if gguf else _count_safetensors(directory)
        return cls(name, directory, gguf, config, parameters)

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    def files(self) -> list[Path]:
        """What the checkpoint consists of."""
        if self.gguf is not None:
            return [self.gguf]
        names = [
            CONFIG_FILE,
            "generation_config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "tokenizer.model",
        ]
        fixed = [self.directory / name for name in [*names, "chat_template.jinja"]]
        return [file for file in fixed if file.is_file()] + sorted(self.directory.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """SHA-256 over the content of all files."""
        digests = [f"{file.name} {FileEntry.of(file).sha256}" for file in self.files()]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def load(self, dtype: "torch.dtype") -> Any:
        """The transformers model in evaluation mode, weights as `dtype`.

        Raises CheckpointError where weights are missing or unreadable: transformers alone would put random
        numbers in their place.
        """
        from transformers import AutoModelForCausalLM, GgufConfig

        options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "trust_remote_code": False}
        if self.gguf is not None:
            options |= {"gguf_file": self.gguf.name, "quantization_config": GgufConfig(dequantize=True)}
        else:
            options |= {"use_safetensors": True}
        try:
            model, report = AutoModelForCausalLM.from_pretrained(self.directory, **options)
        except Exception as error:  # transformers, safetensors and gguf raise their own kinds for damaged files
            raise CheckpointError(f"the weights of {self.name} cannot be loaded: {first_line(error)}") from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise CheckpointError(
                f"the weights of {self.name} are incomplete: {len(missing)} missing, {missing[:3]}..."
            )
        if report["unexpected_keys"]:
            unused = sorted(report["unexpected_keys"])
            logger.warning("%s: %d weights are not used by %s: %s", self.name, len(unused), self.family, unused[:3])
        return model.eval()

    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, from generation_config.json, else from config.json."""
        generation = read_json(self.directory / "generation_config.json") if self.gguf is None else {}
        ids = generation.get("eos_token_id", self.config.eos_token_id)
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; download the model again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: got a JSON {type(data).__name__}, expected an object")
    return data


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    logger.info("downloading %s from the Hugging Face hub", hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client's errors have no common base besides Exception
        raise CheckpointError(
            f"{hub_id} is no folder here and cannot be had from the Hugging Face hub: {first_line(error)}"
        ) from error


def _read_config(directory: Path, gguf: Path | None) -> Any:
    from transformers import AutoConfig

    if gguf is None and not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG_FILE}; give a Hugging Face model folder or a .gguf file")
    options = {"gguf_file": gguf.name} if gguf else {}
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, **options)
    except Exception as error:  # ValueError, KeyError, OSError, struct.error ... depending on what is wrong
        source = gguf or directory / CONFIG_FILE
        raise CheckpointError(f"transformers cannot read {source}: {first_line(error)}") from error


def _count_safetensors(directory: Path) -> int:
    from safetensors import SafetensorError, safe_open

    shards = _shards(directory)
    total = 0
    for shard in shards:
        try:
            with safe_open(shard, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    total += prod(file.get_slice(key).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{shard} is damaged or truncated ({error}); download it again") from error
    return total


def _shards(directory: Path) -> list[Path]:
    index = read_json(directory / INDEX_FILE)
    names = sorted(set(index.get("weight_map", {}).values())) or ["model.safetensors"]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks the weights {', '.join(missing)}; expected safetensors "
            f"(convert pytorch_model.bin with transformers' save_pretrained) or a GGUF file"
        )
    return [directory / name for name in names]


def _count_gguf(path: Path) -> int:
    from transformers.integrations.gguf.reader import GgufHeader

    try:
        header = GgufHeader.from_file(str(path))
    except Exception as error:  # the reader raises struct.error, ValueError, IndexError or KeyError
        raise CheckpointError(f"{path} is damaged or truncated ({first_line(error)}); download it again") from error
    end = header.data_start + max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    if path.stat().st_size < end:
        raise CheckpointError(
            f"{path} is truncated: got {path.stat().st_size} bytes, expected {end}; download it again"
        )
    return sum(prod(tensor.shape) for tensor in header.tensors)
