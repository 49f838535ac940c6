"""The sampling arithmetic against double precision, and its corners."""

import numpy as np
import pytest

from specrun.runner import noise
from specrun.runner.arithmetic import MASS_BITS, log, mass, twice_atanh


def test_mass_is_the_exponential() -> None:
    differences = -np.random.default_rng(0).uniform(0, 30, 200_000).astype(np.float32)
    exact = np.exp(differences.astype(np.float64)) * 2.0**MASS_BITS
    got = mass(differences)
    assert got.dtype == np.int64
    assert np.all(np.abs(got - exact) < exact * 2e-6 + 1)  # the argument itself is rounded to single precision
    near = differences > -1
    assert np.all(np.abs(got - exact)[near] < exact[near] * 2.5e-7)


@pytest.mark.parametrize(
    ("difference", "wanted"), [(0.0, 2**MASS_BITS), (-30.6, 0), (-1e30, 0), (-np.inf, 0), (-np.log(2), 2**43)]
)
def test_mass_at_its_ends(difference: float, wanted: int) -> None:
    assert mass(np.array([difference], np.float32))[0] == pytest.approx(wanted, rel=2e-7)


def test_mass_does_not_change_its_argument() -> None:
    differences = np.array([-1.0, -2.0], np.float32)
    mass(differences)
    assert differences.tolist() == [-1.0, -2.0]


def test_logarithm() -> None:
    x = np.exp(np.random.default_rng(0).uniform(-80, 80, 200_000)).astype(np.float32)
    exact = np.log(x.astype(np.float64))
    assert np.all(np.abs(log(x) - exact) < 1.3e-7 * np.maximum(1, np.abs(exact)))
    assert log(np.ones(1, np.float32))[0] == 0


def test_twice_atanh() -> None:
    s = np.linspace(-0.1716, 0.1716, 100_001).astype(np.float32)
    exact = 2 * np.arctanh(s.astype(np.float64))
    assert np.all(np.abs(twice_atanh(s) - exact) <= 1.3e-7 * np.abs(exact))


def test_gumbel_is_within_single_precision_everywhere() -> None:
    """Both ends, and the seam between the two ways to compute it."""
    ends = np.arange(3000, dtype=np.uint32)
    seam = np.arange(noise.NEAR_ONE - 3000, noise.NEAR_ONE + 3000, dtype=np.uint32)
    anywhere = np.random.default_rng(0).integers(0, 2**32, 200_000).astype(np.uint32)
    words = np.concatenate([ends, ~ends, seam, anywhere])
    # log1p of the distance to 1: exact at the upper end, where log of the uniform itself would not be.
    exact = -np.log(-np.log1p(-(2.0**32 - (words.astype(np.float64) + 0.5)) / 2**32))
    got = noise.gumbel(words)
    assert got.dtype == np.float32
    assert np.all(np.abs(got - exact) < 4e-7 * np.maximum(1, np.abs(exact)))
