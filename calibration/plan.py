"""How each product is quantized to 8 bits: smoothing, scale, and which products stay out of it.

Weights have one scale per column. Activations have one static scale per tensor, so that a row's result does not depend
on the other rows of a call. Where a normalization feeds nothing but products, the channels that carry outliers are
scaled down in its weights and up in the products' (SmoothQuant: Xiao et al., arXiv 2211.10438); how far, and where the
range of the activation is cut, is searched for each activation by the error of its products. Products whose error stays
large keep their activations and get 8-bit weights only.

onnxruntime.quantization and nvidia-modelopt have SmoothQuant with one strength for a whole model, through
neural-compressor or PyTorch; the search per activation on exported graphs had to be written.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specrun.calibration.products import Activation, Graph

Array = np.ndarray[Any, Any]

LARGEST = 127
STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RANGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the largest magnitude
NORMALIZATIONS = ("RMSNormalization", "LayerNormalization")
# Squared error of a product's output over its square, the mean over rows. On SmolLM2-135M 62 of 121 activations stay
# below; with 1e-3 it is 72, perplexity rises by 2 % instead of 0.8 %, and calls get hardly faster.
MAX_ERROR = 6e-4
MAX_COLUMNS = 4096  # of a product's weights that the search looks at


@dataclass(frozen=True)
class ActivationPlan:
    """What becomes of one activation and the products that read it."""

    strength: float  # of the smoothing; 0: none
    factors: Array  # float32 [channels]: the activation is divided by them, the weights' rows are multiplied
    scale: float  # of the quantized activation
    error: float  # the largest of its products
    layers: tuple[str, ...]  # that the products are of

    @property
    def quantized(self) -> bool:
        """Whether the products compute in 8 bits; otherwise only their weights are quantized."""
        return self.error <= MAX_ERROR


Plan = dict[str, ActivationPlan]  # by the activation's name


def make_plan(graph: Graph, activations: dict[str, Activation], progress: Callable[[int], None]) -> Plan:
    """Search for each activation. `progress` gets the number of activations that are done."""
    weights: dict[str, list[Array]] = {name: [] for name in activations}
    layers: dict[str, list[str]] = {name: [] for name in activations}
    for product in graph.products():
        weights[product.activation].append(_some_columns(graph.weights(product.weights)))
        layers[product.activation].append(product.layer)
    plan = {}
    for done, (name, activation) in enumerate(activations.items(), start=1):
        smoothable = _can_be_smoothed(graph, name, len(weights[name]))
        found = _search(activation, weights[name], STRENGTHS if smoothable else (0.0,))
        plan[name] = replace(found, layers=tuple(layers[name]))
        progress(done)
    return plan


def quantize_columns(weights: Array, dtype: Any = np.float32) -> tuple[Array, Array]:
    """int8 [channels, columns] and scales of type `dtype` [columns]."""
    weights = weights.astype(np.float32)
    scales = np.abs(weights).max(0) / np.float32(LARGEST)
    scales[scales == 0] = 1
    scales = np.maximum(scales, np.finfo(dtype).tiny).astype(dtype)
    return _rounded(weights / scales.astype(np.float32)).astype(np.int8), scales


def _can_be_smoothed(graph: Graph, name: str, products: int) -> bool:
    producer = graph.producer(name)
    if producer is None or producer.op_type not in NORMALIZATIONS or graph.consumers(name) != products:
        return False
    return all(graph.has_weights(weight) and graph.consumers(weight) == 1 for weight in producer.input[1:])


def _search(activation: Activation, weights: list[Array], strengths: tuple[float, ...]) -> ActivationPlan:
    exact = [activation.rows @ each for each in weights]
    best: tuple[float, ActivationPlan] | None = None
    for strength in strengths:
        factors = _factors(activation.maxima, weights, strength)
        rows = activation.rows / factors
        scale = _range(rows)
        quantized = _rounded(rows / scale) * scale
        errors = []
        for each, wanted in zip(weights, exact, strict=True):
            levels, scales = quantize_columns(each * factors[:, None])
            got = quantized @ (levels * scales)
            errors.append(_relative_error(got, wanted))
        mean = float(np.mean(errors))
        if best is None or mean < best[0]:
            best = mean, ActivationPlan(strength, factors, scale, max(errors), ())
    assert best is not None
    return best[1]


def _relative_error(got: Array, wanted: Array) -> float:
    """Squared error over square, the mean over rows: in a sum over all of them a few rows with huge values would hide
    that all others are lost."""
    size = np.maximum((wanted**2).sum(-1), 1e-30)
    return float((((got - wanted) ** 2).sum(-1) / size).mean())


def _factors(maxima: Array, weights: list[Array], strength: float) -> Array:
    if not strength:
        return np.ones(len(maxima), np.float32)
    rows = np.max([np.abs(each).max(1) for each in weights], axis=0)
    factors = np.maximum(maxima, 1e-5) ** strength / np.maximum(rows, 1e-5) ** (1 - strength)
    return np.asarray(factors / np.exp(np.log(factors).mean()), np.float32)


def _range(rows: Array) -> float:
    """The scale with the least squared error: cutting off a few large values makes the others finer."""
    largest = float(np.abs(rows).max()) or 1.0
    scales = [largest * share / LARGEST for share in RANGES]
    return min(scales, key=lambda scale: float(((_rounded(rows / scale) * scale - rows) ** 2).sum()))


def _rounded(values: Array) -> Array:
    return np.asarray(np.clip(np.rint(values), -LARGEST, LARGEST), np.float32)


def _some_columns(weights: Array) -> Array:
    return weights[:, :: -(-weights.shape[1] // MAX_COLUMNS)].astype(np.float32)
