"""The arithmetic of the sampling specification: elementary functions that give the same bits wherever they run.

Additions, multiplications, divisions, roundings and conversions of IEEE 754 single precision, none of them fused,
have one correct result each, so functions made of nothing else agree between NumPy and CUDA (`engines/accept.cu`,
compiled without fused multiply-add). Library logarithms and exponentials do not.

Probability mass is an unsigned integer, 2**MASS_BITS for the best token of a row: sums of integers depend on no
order, so they are the same however the work is divided. The vocabulary may have up to 2**20 tokens.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MASS_BITS = 44
LOG2_E = np.float32(1.44269504)
LN_2 = np.float32(0.693147182)
SMALLEST_EXPONENT = np.float32(-60.0)  # 2**-60 of the best token's mass rounds down to nothing

# 2**f = 1 + f * (E[0] + f * (E[1] + ...)), |f| <= 1/2; minimax, relative error 8.7e-8.
EXP2 = tuple(map(np.float32, (0.693146944, 0.240222320, 0.0555077940, 0.00967199914, 0.00132546027)))
# 2 * atanh(s) = s * (A[0] + z * (A[1] + ...)), z = s * s <= 0.0295; minimax, relative error below 1e-9.
ATANH = tuple(map(np.float32, (2.0, 0.666666806, 0.399867445, 0.296739578)))
SQRT_HALF_BITS = np.int32(0x3F3504F3)


def mass(difference: Array) -> Array:
    """exp(difference) in units of 2**-MASS_BITS, rounded down: float32, at most 0 -> int64."""
    exponent = difference * LOG2_E
    counts = exponent > SMALLEST_EXPONENT
    if not counts.all():
        exponent = np.where(counts, exponent, SMALLEST_EXPONENT)
    whole = np.rint(exponent)
    exponent -= whole
    power = exponent * EXP2[4]
    for coefficient in EXP2[3::-1]:
        power += coefficient
        power *= exponent
    power += np.float32(1)
    # Multiplying by a power of two is adding to the exponent field.
    shift = whole.astype(np.int32)
    shift += MASS_BITS
    shift <<= 23
    scaled = power.view(np.int32)
    scaled += shift
    return np.asarray(power.astype(np.int64))


def log(x: Array) -> Array:
    """The natural logarithm of positive normal float32 numbers, within 1e-7 or one unit in the last place."""
    offset = x.view(np.int32) - SQRT_HALF_BITS
    exponent = (offset >> 23).astype(np.float32)
    mantissa = ((offset & 0x7FFFFF) + SQRT_HALF_BITS).view(np.float32)  # in [sqrt(1/2), sqrt(2))
    return np.asarray(twice_atanh((mantissa - np.float32(1)) / (mantissa + np.float32(1))) + exponent * LN_2)


def twice_atanh(s: Array) -> Array:
    """2 * atanh(s), float32, |s| <= 0.1716."""
    square = s * s
    series = square * ATANH[3]
    for coefficient in ATANH[2:0:-1]:
        series += coefficient
        series *= square
    series += ATANH[0]
    series *= s
    return series
