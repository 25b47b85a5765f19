"""The few statistics D3 needs, from SciPy. The boot is the unit, so n is a number of boots.

Every number is rounded to six significant digits, so that another SciPy on another machine recomputes the same one.
"""

from functools import cache

import numpy as np
from scipy import stats

from d3.errors import D3Error
from d3.record import Frozen


class Interval(Frozen):
    """A two-sided interval on a rate, both ends between 0 and 1."""

    low: float
    high: float


def rounded(x: float) -> float:
    """Six significant digits."""
    return float(f"{x:.6g}")


@cache
def clopper_pearson(k: int, n: int, confidence: float) -> Interval:
    """The exact two-sided interval on k of n (Clopper and Pearson, Biometrika 26, 1934); of no boots, 0 to 1."""
    if n == 0:
        return Interval(low=0.0, high=1.0)
    exact = stats.binomtest(k, n).proportion_ci(confidence, method="exact")
    return Interval(low=rounded(exact.low), high=rounded(exact.high))


def null_bound(n: int, confidence: float) -> float:
    """The highest rate that 0 of n boots leaves room for, one-sided: (1 - bound)^n = 1 - confidence."""
    return rounded(1.0 - (1.0 - confidence) ** (1.0 / n)) if n else 1.0


@cache
def compare_rates(k_a: int, n_a: int, k_b: int, n_b: int, test: str = "fisher") -> float | None:
    """The two-sided p-value that two rates are the same, by the registered test; None where a side has no boots."""
    if test != "fisher":
        raise D3Error(f"the registered test {test} is not known", "say test=fisher")
    if not (n_a and n_b):
        return None
    return rounded(float(stats.fisher_exact(np.array([[k_a, n_a - k_a], [k_b, n_b - k_b]])).pvalue))
