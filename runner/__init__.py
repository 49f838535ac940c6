"""Bundle -> tokens. Needs NumPy, onnxruntime, tokenizers, jinja2 and click; never torch, transformers or onnx."""
