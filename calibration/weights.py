"""Weight-only quantization for ONNX Runtime: every product with constant weights becomes a MatMulNBits.

The quantizer is ONNX Runtime's own (`onnxruntime.quantization.matmul_nbits_quantizer`), round to nearest, one scale per
block of weights. The product is computed in integers: the kernel quantizes its other factor as well, but by row and
block, so a row's result does not depend on the other rows of a call, and outliers spoil their own block only.
"""

import logging

from specrun.calibration.products import Graph

INTEGER_PRODUCTS = 4  # MatMulNBits' accuracy_level; the others compute in fp32, ten times slower at 8 bits


def quantize_weights(graph: Graph, bits: int, block: int) -> None:
    """Give the products of `graph` weights of `bits` bits (8 or 4), `block` weights to a scale."""
    # Importing the quantizer sets up the root logger, at a level that lets every library talk: put it back.
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    root.setLevel(level)
    root.handlers[:] = handlers
    config = nbits.DefaultWeightOnlyQuantConfig(
        block_size=block, is_symmetric=True, accuracy_level=INTEGER_PRODUCTS, bits=bits
    )
    quantizer = nbits.MatMulNBitsQuantizer(graph.model, algo_config=config)
    quantizer.process()
    graph.model = quantizer.model.model
