"""What the model's config.pbtxt says besides Triton's own settings: its `parameters`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from specrun.engines.errors import RequestError
from specrun.runner.serving.service import CPU_SLOTS


@dataclass(frozen=True)
class Settings:
    """Of one instance of the model."""

    bundle: Path  # absolute, or relative to the folder of the model's version
    slots: int = CPU_SLOTS  # requests that run at the same time
    queue: int = 64  # that may wait beside those
    prefix_cache: int = 1024  # MiB for KV rows of requests that have ended
    timeout: float = 600.0  # seconds that a request may take

    @classmethod
    def of(cls, arguments: dict[str, str]) -> "Settings":
        """`arguments`: as Triton gives them to a model. Raises RequestError."""
        given = {
            name: value["string_value"] for name, value in json.loads(arguments["model_config"])["parameters"].items()
        }
        kinds = {field.name: field.type for field in fields(cls)}
        strange = sorted(set(given) - set(kinds))
        if strange or "bundle" not in given:
            raise RequestError(
                f"config.pbtxt has the parameters {', '.join(sorted(given))}; expected bundle and, if wanted, "
                f"{', '.join(name for name in kinds if name != 'bundle')}"
            )
        folder = Path(arguments["model_repository"]) / arguments["model_version"]
        try:
            numbers = {
                name: float(value) if name == "timeout" else int(value)
                for name, value in given.items()
                if name != "bundle"
            }
        except ValueError as error:
            raise RequestError(f"config.pbtxt: a parameter is no number: {error}") from error
        return cls(folder / given["bundle"], **numbers)  # type: ignore[arg-type] # each has the type of its field
