"""Activation ranges -> INT8 graph. Nothing here yet: fp32 and fp16 are the precisions that exist."""
