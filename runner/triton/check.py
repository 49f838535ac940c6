"""Checks of a running Triton server, over HTTP: streaming, and that speculation changes nothing."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from specrun.engines.errors import SpecrunError
from specrun.runner.triton.repository import MODEL

PROMPTS = (
    "Once upon a time there was a lighthouse keeper who",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "one two three four one two three four one two",
    "안녕하세요 🙂",
)
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "random_seed": 7})
MAX_TOKENS = 32


class TritonCheckError(SpecrunError):
    """A server does not answer, or not as it should."""


@dataclass(frozen=True)
class Check:
    """One comparison. `problem`: empty where all is well."""

    name: str
    problem: str


def probe(url: str) -> None:
    """Run one token through the model: Triton calls a model ready whose process has died. Raises TritonCheckError."""
    with _client(url, timeout=30) as client:
        _whole(client, {"text_input": "a", "max_tokens": 1, "temperature": 0.0, "proposer": "none"})


def check_server(url: str) -> Iterator[Check]:
    """Every prompt, greedy and sampled: plain against speculative, whole against streamed. Raises TritonCheckError."""
    with _client(url, timeout=600) as client:
        for number, prompt in enumerate(PROMPTS, start=1):
            for sampling in SAMPLINGS:
                body = {"text_input": prompt, "max_tokens": MAX_TOKENS, **sampling}
                label = f"prompt {number}, temperature {sampling['temperature']:g}"
                plain = _whole(client, body | {"proposer": "none"})
                whole = _whole(client, body)
                pieces = _streamed(client, body)
                yield Check(f"{label}: speculative as plain", _difference(plain, whole))
                yield Check(f"{label}: streamed as whole", _stream_problem(whole, pieces))


@contextmanager
def _client(url: str, timeout: float) -> Iterator[httpx.Client]:
    """Raises TritonCheckError where the server does not answer."""
    try:
        with httpx.Client(base_url=url if "://" in url else f"http://{url}", timeout=timeout) as client:
            yield client
    except httpx.HTTPError as error:
        raise TritonCheckError(f"{url} does not answer: {error or type(error).__name__}") from error


def _whole(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(f"/v2/models/{MODEL}/generate", json=body)
    if reply.status_code != 200:
        raise TritonCheckError(f"the server answered {reply.status_code}: {reply.text[:300]}")
    found: dict[str, Any] = reply.json()
    return found


def _streamed(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    pieces = []
    with client.stream("POST", f"/v2/models/{MODEL}/generate_stream", json=body | {"stream": True}) as reply:
        if reply.status_code != 200:
            raise TritonCheckError(f"the server answered {reply.status_code}: {reply.read()[:300]!r}")
        for line in reply.iter_lines():
            if line.startswith("data: "):
                pieces.append(json.loads(line.removeprefix("data: ")))
    return pieces


def _ids(piece: dict[str, Any]) -> list[int]:
    """Triton writes a single value as a number, not as a list."""
    found = piece["output_ids"]
    return found if isinstance(found, list) else [found]


def _difference(plain: dict[str, Any], other: dict[str, Any]) -> str:
    if _ids(plain) == _ids(other) and plain["text_output"] == other["text_output"]:
        return ""
    at = next(
        (at for at, pair in enumerate(zip(_ids(plain), _ids(other), strict=False)) if pair[0] != pair[1]), "the end"
    )
    return f"they differ from token {at} on"


def _stream_problem(whole: dict[str, Any], pieces: Sequence[dict[str, Any]]) -> str:
    failed = next((piece["error"] for piece in pieces if "error" in piece), None)
    if failed is not None:
        return str(failed)
    if "".join(piece["text_output"] for piece in pieces) != whole["text_output"]:
        return "the text of the pieces is another one"
    if [token for piece in pieces for token in _ids(piece)] != _ids(whole):
        return "the tokens of the pieces are others"
    if len(pieces) < min(2, len(_ids(whole))):
        return f"it came in {len(pieces)} piece for {len(_ids(whole))} tokens"
    return "" if pieces[-1]["finish_reason"] else "the last piece has no finish_reason"
