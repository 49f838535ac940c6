"""The engine backends by name, and the names of their files."""

from pathlib import Path

ORT = "ort"  # ONNX Runtime on the CPU
ORT_CUDA = "ort-cuda"  # ONNX Runtime on an NVIDIA GPU
TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt-rtx"
BACKENDS = (ORT, ORT_CUDA, TENSORRT, TENSORRT_RTX)
TENSORRT_BACKENDS = (TENSORRT, TENSORRT_RTX)
GPU_BACKENDS = (ORT_CUDA, TENSORRT, TENSORRT_RTX)

# Engines of a model: itself, the same with layers left out, and what fuses the states that an EAGLE-3 head reads.
MODEL, EARLY_EXIT_MODEL, FUSE = "model", "early_exit", "fuse"

# Rows that quantized engines for one sequence write into the KV cache at least (engines/one_sequence.py).
LEAST_ROWS = 2


def one_sequence_file(engine: Path) -> Path:
    """The file beside `engine` that holds the same model for calls of one sequence, where there is one."""
    return engine.with_name(f"{engine.stem}.one{engine.suffix}")


def engine_file(backend: str, engine: str = MODEL) -> str:
    """Name of the file that holds `engine`."""
    return f"{engine}.engine" if backend in TENSORRT_BACKENDS else f"{engine}.onnx"
