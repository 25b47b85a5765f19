"""Hostile JSON for hypothesis: a good document with something in it replaced, dropped, doubled, or bytes damaged."""

import copy
import json
import os
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("D3_FUZZ", "0"))  # the whole run: make fuzz
TEXT = st.text(st.characters(categories=None), max_size=8)  # lone surrogates and control characters too
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([-1, 0, 2**31, 2**63, 10**400, -(10**400), 1e308, -0.0])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, st.sampled_from(["NaN", "Infinity", "../x", "\0", "1e9"]))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5
)


def slice_of(cases: int) -> settings:
    """So many cases in CI, `D3_FUZZ` of them where it is set; shown as found, as a big document shrinks slowly."""
    return settings(max_examples=CASES or cases, phases=[Phase.explicit, Phase.generate])


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every place in a JSON value, the whole first."""
    found = [at]
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += paths(value[key], (*at, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, base: Any) -> Any:
    """`base` with one to three places replaced, dropped or doubled."""
    found = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(found)))
        if not path:
            return draw(JSON)
        at = found
        for key in path[:-1]:
            at = at[key]
        way = draw(st.sampled_from(["replace", "replace", "drop", "double"]))
        if way == "replace":
            at[path[-1]] = draw(JSON)
        elif way == "drop":
            del at[path[-1]]
        elif isinstance(at, list):
            at.insert(path[-1], at[path[-1]])
        else:
            at[draw(TEXT)] = at[path[-1]]
        if not found:
            return found
    return found


@st.composite
def damaged(draw: st.DrawFn, base: Any) -> bytes:
    """The bytes of a mutated document, or of the good one: a byte changed, a part cut out, or nested without end."""
    way = draw(st.sampled_from(["mutate", "mutate", "mutate", "flip", "cut", "nest"]))
    if way == "mutate":
        return json.dumps(draw(mutated(base))).encode()
    raw = json.dumps(base).encode()
    at = draw(st.integers(0, len(raw) - 1))
    if way == "flip":
        return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]
    if way == "cut":
        return raw[:at] + raw[draw(st.integers(at, len(raw))) :]
    return raw[:at] + b"[" * draw(st.sampled_from([50, 5000, 200_000])) + raw[at:]
