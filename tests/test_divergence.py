import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build import response
from d3.divergence import diverge, flip


def test_first_token_that_differs_with_both_gaps():
    d = diverge(response("a"), response("b", gaps=(2.0, 1.5, 1.0, 0.25)), 0.25)
    assert (d.position, d.first_token, d.later_token) == (3, ord("a"), ord("b"))
    assert (d.first_gap, d.later_gap, d.flip) == (0.125, 0.25, "tie")
    assert d.max_dlogprob == pytest.approx(0.01)
    assert d.logprob_position == 2


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (0.25, 0.25, "tie"),
        (0.0, 0.26, "confident"),
        (3.0, 0.1, "confident"),
        (None, 0.1, "unknown"),
        (None, 3.0, "confident"),
        (None, None, "unknown"),
    ],
)
def test_flip(first, later, expected):
    assert flip(first, later, 0.25) == expected


def test_logprobs_alone():
    d = diverge(response("a"), response("a", logprobs=(-0.1, -0.25, -0.3, -0.4)), 0.25)
    assert (d.position, d.flip, d.logprob_position) == (None, "none", 1)
    assert d.max_dlogprob == pytest.approx(0.05)


def test_one_response_is_cut_shorter():
    short = response("a", token_ids=(1, 2), logprobs=(-0.1, -0.2), gaps=(2.0, 1.5))
    d = diverge(short, response("a"), 0.25)
    assert (d.position, d.first_token, d.later_token, d.first_gap, d.later_gap) == (2, None, 3, None, 1.0)
    assert (d.first_tokens, d.later_tokens, d.flip) == (2, 4, "confident")


def test_no_token_ids():
    d = diverge(response("a", token_ids=()), response("b", token_ids=()), 0.25)
    assert (d.position, d.flip, d.max_dlogprob, d.first_tokens) == (None, "none", None, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_missing_numbers_are_passed_over(bad):
    d = diverge(response("a"), response("b", logprobs=(bad, -0.2, bad, -0.4), gaps=(1.0, 1.0, 1.0, bad)), 0.25)
    assert (d.max_dlogprob, d.later_gap, d.flip) == (0.0, None, "unknown")


tokens = st.lists(st.integers(0, 3), max_size=6).map(tuple)


@given(tokens, tokens)
def test_position_is_the_end_of_the_common_prefix(a, b):
    d = diverge(response("a", token_ids=a), response("b", token_ids=b), 0.25)
    common = len(a) if d.position is None else d.position
    assert a[:common] == b[:common]
    assert (d.position is None) == (a == b)
    if d.position is not None:
        assert a[common : common + 1] != b[common : common + 1]
