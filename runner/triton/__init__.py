"""specrun as a model of Triton Inference Server. Inside a server `model.py` runs; the rest writes and checks it."""
