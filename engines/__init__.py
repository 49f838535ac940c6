"""ONNX graph -> engine; the bundle and its manifest.

Also the home of what every stage shares: the graph contract (`signature`) and the base of all errors
(`errors`). They live here because the runner may import this package and must not import `export`.
"""
