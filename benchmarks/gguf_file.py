"""Rewrites a GGUF file in another type: `python -m benchmarks.gguf_file SOURCE TARGET f32|q8_0|q4_0`.

Runs in llama-cpp-python's environment. Quantized tensors can be the source: to f32 nothing is lost.
"""

import sys

import llama_cpp

TYPES = {
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def rewrite(source: str, target: str, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status} for {source}")


if __name__ == "__main__":
    rewrite(*sys.argv[1:])
