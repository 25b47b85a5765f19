import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3.errors import D3Error
from d3.statistics import clopper_pearson, compare_rates, null_bound


def test_published_values():
    assert clopper_pearson(0, 6, 0.95).high == pytest.approx(0.4593, abs=1e-4)
    assert clopper_pearson(6, 6, 0.95).low == pytest.approx(0.5407, abs=1e-4)
    assert null_bound(6, 0.95) == pytest.approx(0.3930, abs=1e-4)
    assert null_bound(58, 0.95) > 0.05 > null_bound(59, 0.95)
    assert compare_rates(6, 6, 0, 6) == pytest.approx(0.00216, abs=1e-5)
    assert compare_rates(4, 6, 0, 6) == pytest.approx(0.0606, abs=1e-4)


def test_no_boots_say_nothing():
    assert clopper_pearson(0, 0, 0.95).model_dump() == {"low": 0.0, "high": 1.0}
    assert null_bound(0, 0.95) == 1.0
    assert compare_rates(0, 0, 3, 6) is None


def test_unknown_test_is_refused():
    with pytest.raises(D3Error, match="barnard"):
        compare_rates(1, 2, 1, 2, "barnard")


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_interval_contains_the_rate(k_n, confidence):
    k, n = k_n
    interval = clopper_pearson(k, n, confidence)
    assert 0 <= interval.low <= k / n <= interval.high <= 1


@given(st.integers(1, 200))
def test_null_bound_is_inside_the_two_sided_interval(n):
    assert 0 < null_bound(n, 0.95) <= clopper_pearson(0, n, 0.95).high
