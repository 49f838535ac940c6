"""What the model's config.pbtxt says besides Triton's own settings: its `parameters`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from specrun.engines.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """Of one instance of the model."""

    bundle: Path  # absolute, or relative to the folder of the model's version
    slots: int | None = None  # requests that run at the same time; None: what the service takes
    queue: int = 64  # that may wait beside those
    prefix_cache: int = 1024  # MiB for KV rows of requests that have ended
    timeout: float = 600.0  # seconds that a request may take

    @classmethod
    def of(cls, arguments: dict[str, str]) -> "Settings":
        """`arguments`: as Triton gives them to a model. Raises RequestError."""
        given = {
            name: value["string_value"] for name, value in json.loads(arguments["model_config"])["parameters"].items()
        }
        known = [field.name for field in fields(cls)]
        if not given.keys() <= set(known) or "bundle" not in given:
            raise RequestError(
                f"config.pbtxt has the parameters {', '.join(sorted(given))}; expected bundle and, if wanted, "
                f"{', '.join(name for name in known if name != 'bundle')}"
            )
        folder = Path(arguments["model_repository"]) / arguments["model_version"]
        try:
            return cls(
                bundle=folder / given["bundle"],
                slots=int(given["slots"]) if "slots" in given else None,
                queue=int(given.get("queue", cls.queue)),
                prefix_cache=int(given.get("prefix_cache", cls.prefix_cache)),
                timeout=float(given.get("timeout", cls.timeout)),
            )
        except ValueError as error:
            raise RequestError(f"config.pbtxt: a parameter is no number: {error}") from error
