"""Activation ranges -> INT8 graph. So far: the text that builds measure with."""
