"""The engine backends by name, and the names of their files."""

ORT = "ort"  # ONNX Runtime on the CPU
ORT_CUDA = "ort-cuda"  # ONNX Runtime on an NVIDIA GPU
TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt-rtx"
BACKENDS = (ORT, ORT_CUDA, TENSORRT, TENSORRT_RTX)
TENSORRT_BACKENDS = (TENSORRT, TENSORRT_RTX)
GPU_BACKENDS = (ORT_CUDA, TENSORRT, TENSORRT_RTX)

# Engines of a model: itself, the same with layers left out, and what fuses the states that an EAGLE-3 head reads.
MODEL, EARLY_EXIT_MODEL, FUSE = "model", "early_exit", "fuse"


def engine_file(backend: str, engine: str = MODEL) -> str:
    """Name of the file that holds `engine`."""
    return f"{engine}.engine" if backend in TENSORRT_BACKENDS else f"{engine}.onnx"
