from itertools import product

import pytest

from build import READINGS
from d3.readings import evaluate, first_held

CLOSED = {"on/0": "diverges", "off/0": "agrees", "on/1": "agrees", "off/1": "agrees", "flag": "works"}


def verdict(**changed):
    states = {**CLOSED, **{k.replace("_", "/"): v for k, v in changed.items()}}
    return first_held(evaluate(READINGS, states))


@pytest.mark.parametrize(
    ("changed", "reading", "disposition"),
    [
        ({}, "closed_by_flag", "KNOWN"),
        ({"on_1": "diverges"}, "open_gap", "OPEN GAP"),
        ({"on_0": "agrees"}, "none", "NO DIVERGENCE"),
        ({"off_0": "diverges"}, "boot_state", "BOOT STATE"),
        ({"off_0": "scattered"}, "boot_state", "BOOT STATE"),
        ({"on_0": "boot_state"}, "boot_state", "BOOT STATE"),
        ({"off_1": "void"}, "void", "INCONCLUSIVE"),
        ({"off_0": "diverges", "off_1": "void"}, "void", "INCONCLUSIVE"),
        ({"on_1": "unavailable", "flag": "unavailable"}, "flag_unavailable", "OPEN (flag unavailable)"),
        ({"on_1": "diverges", "flag": "inert"}, "flag_inert", "OPEN (flag inert)"),
        ({"on_1": "agrees", "flag": "unknown"}, "closed_by_flag", "KNOWN"),
        ({"on_0": "scattered"}, "unexplained", "UNEXPLAINED"),
        ({"on_1": "scattered"}, "unexplained", "UNEXPLAINED"),
        ({"on_0": "agrees", "on_1": "diverges"}, "unexplained", "UNEXPLAINED"),
        ({"on_1": "absent", "off_1": "absent", "flag": "absent"}, "unexplained", "UNEXPLAINED"),
    ],
)
def test_verdict(changed, reading, disposition):
    found = verdict(**changed)
    assert (found.name, found.disposition) == (reading, disposition)


def test_every_reading_says_why():
    found = {e.name: e for e in evaluate(READINGS, {**CLOSED, "on/1": "diverges"})}
    assert set(found) == {r.name for r in READINGS}
    assert found["closed_by_flag"].why == "on/1 is diverges, needed agrees"
    assert found["open_gap"].why == "on/0 is diverges, off/0 is agrees, on/1 is diverges"
    assert found["flag_inert"].why == "flag is works, needed inert"


def test_what_is_not_there_is_absent():
    assert first_held(evaluate(READINGS, {"on/0": "agrees"})).name == "none"
    assert first_held(evaluate(READINGS, {"on/0": "diverges"})).name == "unexplained"


def test_order_of_keys_changes_nothing():
    turned = [r.model_copy(update={"any_of": tuple(dict(reversed(c.items())) for c in r.any_of)}) for r in READINGS]
    assert evaluate(turned, CLOSED) == evaluate(READINGS, CLOSED)


def test_no_state_that_differs_ever_reads_as_none_or_closed():
    states = ("void", "agrees", "diverges", "boot_state", "scattered")
    for on0, off0, on1, off1 in product(states, repeat=4):
        found = verdict(on_0=on0, off_0=off0, on_1=on1, off_1=off1).name
        if found == "none":
            assert {on0, off0, on1, off1} == {"agrees"}
        if found == "closed_by_flag":
            assert (on0, off0, on1, off1) == ("diverges", "agrees", "agrees", "agrees")
