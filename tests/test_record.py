"""Hashes stand for exactly what they compare, and canonical JSON for exactly one value."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import build
from d3.record import Answer, BootRecord, Response, canonical_json, hash_logprobs, hash_tokens, plain, sha256

TOKENS = st.lists(st.integers(0, 200_000), max_size=8)
LOGPROBS = st.lists(st.floats(width=64) | st.none(), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def bits(x: float | None) -> bytes:
    return b"null" if x is None else b"nan" if math.isnan(x) else struct.pack("d", x)


@given(TOKENS, TOKENS)
def test_token_hashes_are_equal_exactly_for_equal_tokens(one: list[int], other: list[int]) -> None:
    assert (hash_tokens(one) == hash_tokens(other)) == (one == other)


@given(LOGPROBS, LOGPROBS)
def test_log_probability_hashes_are_equal_exactly_for_equal_bits(
    one: list[float | None], other: list[float | None]
) -> None:
    assert (hash_logprobs(one) == hash_logprobs(other)) == ([bits(x) for x in one] == [bits(x) for x in other])


def test_near_misses_of_the_hashes_are_told_apart() -> None:
    assert hash_tokens([1, 23]) != hash_tokens([12, 3])
    assert hash_logprobs([0.1]) != hash_logprobs([math.nextafter(0.1, 1)])
    assert hash_logprobs([0.0]) != hash_logprobs([-0.0])
    assert hash_logprobs([None]) != hash_logprobs([]) != hash_logprobs([math.nan])
    assert hash_logprobs([math.nan]) == hash_logprobs([-math.nan])


@given(st.text(st.characters(categories=None), max_size=20), st.text(st.characters(categories=None), max_size=20))
def test_text_hashes_are_over_utf8_bytes_and_take_lone_surrogates(one: str, other: str) -> None:
    assert (sha256(one) == sha256(other)) == (one == other)
    assert sha256(one) == sha256(one.encode("utf-8", "surrogatepass"))


def test_known_hashes_stay_what_they_are() -> None:
    assert sha256("abc").startswith("ba7816bf8f01cfea")
    assert hash_tokens([1, 2]) == sha256("1,2")
    assert hash_logprobs([-0.5, None, math.nan]) == sha256("-0x1.0000000000000p-1,null,nan")


@given(JSON)
def test_canonical_json_is_json_of_the_same_value_whatever_the_order_of_keys(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert "\n" not in text
    assert canonical_json(json.loads(text)) == text


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_keys_does_not_show(value: dict[str, int]) -> None:
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


def test_what_json_cannot_say_is_said_in_words_that_float_reads() -> None:
    assert canonical_json({"b": [math.nan, math.inf], "a": -math.inf}) == '{"a":"-inf","b":["nan","inf"]}'
    response = build.response("a", logprobs=(math.nan, -math.inf, None, -0.5))
    again = Response.model_validate(json.loads(canonical_json(response)))
    assert again.hashes() == response.hashes()
    assert plain((1, 2)) == [1, 2]


@pytest.mark.parametrize(
    "change",
    [{"text": "x"}, {"token_ids": (1,)}, {"logprobs": (-0.1, -0.2, -0.3, -0.5)}],
    ids=["text", "tokens", "logprobs"],
)
def test_a_responses_key_follows_each_endpoint_and_only_them(change: dict[str, object]) -> None:
    base, other = build.response("a"), build.response("a", **change)
    assert base.key() != other.key()
    assert sum(base.hashes()[e] != other.hashes()[e] for e in base.hashes()) == 1
    assert build.response("a", gaps=(9.0, 9.0, 9.0, 9.0)).key() == base.key()


def test_a_record_survives_json_and_refuses_what_it_does_not_know() -> None:
    study = build.registration(boots=1)
    record = build.boots(study)[0].record
    text = canonical_json(record)
    assert BootRecord.model_validate_json(text) == record
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        BootRecord.model_validate_json(text[:-1] + ',"colour":"red"}')
    with pytest.raises(ValidationError, match="frozen"):
        record.status = "void"  # type: ignore[misc]
    assert record.requests[0].endpoint_hash("tokens") == record.requests[0].tokens_sha256


def test_an_answer_must_say_how_many_tokens_its_prompt_had() -> None:
    with pytest.raises(ValidationError, match="prompt_tokens"):
        Answer.model_validate(
            {"response": build.response("a"), "prompt_sha256": "", "cached_tokens": 0, "finish_reason": ""}
        )
