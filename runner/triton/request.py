"""From the tensors of a Triton request to a request of ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.engines.errors import RequestError
from specrun.runner.grammar import Grammar
from specrun.runner.processors import Processing
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.triton.tensors import INPUTS, Tensor

Array = np.ndarray[Any, Any]

DEFAULT_MAX_TOKENS = 16
# What Triton itself puts into a request's parameters.
OWN_PARAMETERS = ("triton_", "sequence_", "priority", "timeout", "binary_data_output", "headers_")


@dataclass(frozen=True)
class Asked:
    """A request, and how it is to be answered."""

    request: Request
    stream: bool


def read_request(tensor: Callable[[str], Array | None], parameters: Mapping[str, Any], runner: Runner) -> Asked:
    """`tensor`: the input of a name, or None. Raises RequestError."""
    for name in parameters:
        if not name.startswith(OWN_PARAMETERS):
            raise RequestError(
                f"got the parameter {name!r}, which is not supported; inputs: {', '.join(each.name for each in INPUTS)}"
            )
    given = {each.name: _values(each, array) for each in INPUTS if (array := tensor(each.name)) is not None}

    def one(name: str, default: Any = None) -> Any:
        return given[name][0] if name in given else default

    if ("text_input" in given) == ("input_ids" in given):
        raise RequestError("got both text_input and input_ids, or neither; expected one of them")
    prompt = tuple(given["input_ids"]) if "input_ids" in given else runner.encode(one("text_input"))
    schema = one("json_schema")
    request = Request(
        prompt_ids=prompt,
        max_tokens=one("max_tokens", DEFAULT_MAX_TOKENS),
        sampling=Sampling(
            temperature=one("temperature", 1.0),
            top_k=one("top_k", 0),
            top_p=one("top_p", 1.0),
            min_p=one("min_p", 0.0),
            seed=one("random_seed"),
        ).with_seed(),
        processing=Processing(
            repetition_penalty=one("repetition_penalty", 1.0),
            presence_penalty=one("presence_penalty", 0.0),
            frequency_penalty=one("frequency_penalty", 0.0),
            min_tokens=one("min_length", 0),
            grammar=None if schema is None else Grammar("json_schema", schema),
        ),
        stop=tuple(given.get("stop_words", ())),
        stop_token_ids=frozenset(given.get("end_id", ())),
        proposer=one("proposer"),
        k=one("num_speculative_tokens"),
    )
    return Asked(request, bool(one("stream", False)))


def _values(tensor: Tensor, array: Array) -> list[Any]:
    """Python values. Raises RequestError."""
    values = array.reshape(-1).tolist()
    if not values or (not tensor.many and len(values) != 1):
        raise RequestError(f"got {len(values)} values of {tensor.name}, expected {'some' if tensor.many else 'one'}")
    if tensor.kind == "STRING":
        try:
            return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
        except UnicodeDecodeError as error:
            raise RequestError(f"{tensor.name} is not UTF-8: {error}") from error
    if tensor.kind == "FP32":
        # The number that the client wrote, not the nearest single-precision one: 0.7, not 0.699999988.
        return [float(np.format_float_positional(np.float32(value), unique=True)) for value in values]
    return values
