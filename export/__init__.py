"""Hugging Face model -> one ONNX graph with the contract of `specrun.engines.signature`."""
