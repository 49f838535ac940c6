"""The tensors of the Triton model: the only place that knows their names, types and meaning.

Names as the front ends of TensorRT-LLM and vLLM have them, where they have one.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["STRING", "INT32", "UINT64", "FP32", "BOOL"]


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: Kind
    many: bool  # any number of values; otherwise one
    meaning: str

    @property
    def dims(self) -> int:
        return -1 if self.many else 1


INPUTS = (
    Tensor("text_input", "STRING", False, "the prompt; or input_ids"),
    Tensor("input_ids", "INT32", True, "the prompt as token ids; or text_input"),
    Tensor("stream", "BOOL", False, "a response for each token; false: one response"),
    Tensor("max_tokens", "INT32", False, "16 if not given"),
    Tensor("min_length", "INT32", False, "tokens before a stop token may come"),
    Tensor("temperature", "FP32", False, "1 if not given; 0: greedy"),
    Tensor("top_k", "INT32", False, "0: off"),
    Tensor("top_p", "FP32", False, "1: off"),
    Tensor("min_p", "FP32", False, "0: off"),
    Tensor("random_seed", "UINT64", False, "drawn if not given"),
    Tensor("repetition_penalty", "FP32", False, "1: off"),
    Tensor("presence_penalty", "FP32", False, "0: off"),
    Tensor("frequency_penalty", "FP32", False, "0: off"),
    Tensor("stop_words", "STRING", True, "strings that end the output before them"),
    Tensor("end_id", "INT32", True, "token ids that end the output, beside the model's own"),
    Tensor("json_schema", "STRING", False, "the output follows it"),
    Tensor("proposer", "STRING", False, "one that the bundle has, or none: plain decoding"),
    Tensor("num_speculative_tokens", "INT32", False, "positions ahead, fixed"),
)

OUTPUTS = (
    Tensor("text_output", "STRING", False, "the text that the tokens made certain"),
    Tensor("output_ids", "INT32", True, "token ids"),
    Tensor("finish_reason", "STRING", False, "stop or length; empty before the last response"),
    Tensor("statistics", "STRING", False, "JSON: what speculation did; empty before the last response"),
)
