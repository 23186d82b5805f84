"""Student t, chi-square and normal distribution from the standard library alone, for intervals and p-values.

Incomplete beta and gamma functions by continued fraction and series (Abramowitz and Stegun 26.5.8, 6.5.29, 6.5.31);
quantiles by bisection. Accurate to about 1e-10, which the tests check against published tables.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

_TINY = 1e-300
_NORMAL = NormalDist()


def normal_quantile(probability: float) -> float:
    return _NORMAL.inv_cdf(probability)


def normal_two_sided(z: float) -> float:
    """P(|Z| >= |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


def t_cdf(t: float, df: float) -> float:
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) with `df` degrees of freedom."""
    return _incomplete_beta(df / 2, 0.5, df / (df + t * t))


@lru_cache
def t_quantile(probability: float, df: float) -> float:
    return _bisect(lambda t: t_cdf(t, df), probability, -1e6, 1e6)


def chi_square_cdf(x: float, df: float) -> float:
    return _incomplete_gamma(df / 2, x / 2) if x > 0 else 0.0


def chi_square_quantile(probability: float, df: float) -> float:
    return _bisect(lambda x: chi_square_cdf(x, df), probability, 0.0, 100 * df + 1000)


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the increasing `function` reaches `target`, to full double precision."""
    if not 0 < target < 1:
        raise ValueError(f"probability={target} must be between 0 and 1, both excluded")
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 500):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + step * d)
            c = _away_from_zero(1 + step / c)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def _incomplete_gamma(a: float, x: float) -> float:
    """Regularised lower P(a, x)."""
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        denominator = a
        while abs(term) > abs(total) * 1e-16:
            denominator += 1
            term *= x / denominator
            total += term
        return front * total
    b = x + 1 - a
    c, d = 1 / _TINY, 1 / b
    fraction = d
    for i in range(1, 2000):
        numerator = -i * (i - a)
        b += 2
        d = 1 / _away_from_zero(numerator * d + b)
        c = _away_from_zero(b + numerator / c)
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 - front * fraction


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
