"""Manipulation checks: each one fails when, and only when, what it watches did not hold."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3.checks import evaluate, expected_hit
from d3.record import Check, EngineFacts, RequestRecord
from planned import plan

GOOD = EngineFacts(version="1.0", block_size=16, prefix_caching=True, attention_backend="A", invariant_mode="off")


def request(phase: str, cached: int | None, tokens: int = 100, **changed: Any) -> RequestRecord:
    base: dict[str, Any] = {
        "index": 0, "prompt": "long", "phase": phase, "expect": "cold" if phase[0] == "C" else "warm",
        "salt": None, "prompt_tokens": tokens, "prompt_sha256": "", "cached_tokens": cached,
        "expected_cached": expected_hit(tokens, 16),
        "finish_reason": "length", "n_tokens": 4, "text_sha256": "", "tokens_sha256": "", "logprobs_sha256": "",
        "response": "", "latency_s": 0.1, "running": 1,
    }  # fmt: skip
    return RequestRecord.model_validate(base | changed)


WARM = [request("C1", 0), request("W1", 96), request("C2", 0), request("W2", 96)]


def check(name: str, facts: EngineFacts = GOOD, requests: list[RequestRecord] = WARM, **where: str) -> Check:
    found = [c for c in evaluate(plan(**where), facts, requests, {}) if c.name == name]
    assert len(found) == 1
    return found[0]


def facts(**changed: Any) -> EngineFacts:
    return GOOD.model_copy(update=changed)


@pytest.mark.parametrize(("asked", "seen", "held"), [("1", "off", True), ("1", "on", False), ("0", "on", True)])
def test_a_compile_cache_is_off_unless_it_was_registered(asked: str, seen: str, held: bool) -> None:
    launch = plan().launch.model_copy(update={"env": {"VLLM_DISABLE_COMPILE_CACHE": asked}})
    made = plan().model_copy(update={"launch": launch})
    found = [c.held for c in evaluate(made, facts(environment={"compile_cache": seen}), WARM, {})
             if c.name == "compile_cache"]  # fmt: skip
    assert found == [held]
    assert not [c for c in evaluate(plan(), GOOD, WARM, {}) if c.name == "compile_cache"]


@pytest.mark.parametrize(
    ("registered", "start", "held"),
    [
        (None, "standby", True),
        (None, "fork", False),
        ("standby", "plain", False),
        ("plain", "plain", True),
        ("fork", "fork", True),
    ],
)
def test_a_boot_starts_as_registered(registered: Any, start: Any, held: bool) -> None:
    asked = plan().model_copy(update={"start": registered})
    found = [c for c in evaluate(asked, GOOD, WARM, {}, start) if c.name == "start"]
    assert [c.held for c in found] == [held]


@given(st.integers(1, 5000), st.sampled_from([16, 32, 128]))
def test_the_expected_hit_is_the_full_blocks_before_the_last_token(tokens: int, block: int) -> None:
    hit = expected_hit(tokens, block)
    assert hit is not None
    assert hit % block == 0
    assert hit < tokens <= hit + block


def test_an_unknown_block_size_expects_nothing() -> None:
    assert expected_hit(100, None) is None
    assert (expected_hit(32, 32), expected_hit(33, 32)) == (0, 32)


def test_a_good_boot_passes_all_of_them() -> None:
    found = evaluate(plan(), GOOD, WARM, {})
    assert [c.name for c in found] == ["pin", "backend", "cache_setting", "flag", "serial", "cache"]
    assert all(c.held for c in found)
    assert [c.prompt for c in found] == [None] * 5 + ["long"]


@pytest.mark.parametrize(("version", "held"), [("1.0", True), ("1.0+cpu", True), ("1.0.1", False), (None, False)])
def test_the_version_must_be_the_registered_one(version: str | None, held: bool) -> None:
    found = check("pin", facts(version=version))
    assert found.held is held
    assert found.evidence == f"asked for version 1.0, the engine reports {version or 'nothing'}"


@pytest.mark.parametrize(
    ("apc", "says", "held"),
    [("on", True, True), ("on", False, False), ("off", True, False), ("off", False, True), ("on", None, True)],
)
def test_the_engines_own_word_on_the_cache_must_fit(apc: str, says: bool | None, held: bool) -> None:
    assert check("cache_setting", facts(prefix_caching=says), apc=apc).held is held


@pytest.mark.parametrize(
    ("invariant", "mode", "held"),
    [
        ("0", "off", True),
        ("1", "off", False),
        ("1", "the fake's mode", True),
        ("0", "the fake's mode", False),
        ("1", None, True),
    ],
)
def test_the_invariant_mode_in_force_must_be_the_one_asked_for(invariant: str, mode: str | None, held: bool) -> None:
    assert check("flag", facts(invariant_mode=mode), invariant=invariant).held is held


def test_the_backend_must_be_the_registered_one_when_one_is() -> None:
    asked = plan().model_copy(update={"backend_asked": "B"})
    assert [c.held for c in evaluate(asked, GOOD, WARM, {}) if c.name == "backend"] == [False]
    assert [c.held for c in evaluate(asked, facts(attention_backend="B"), WARM, {}) if c.name == "backend"] == [True]


@pytest.mark.parametrize(("running", "held"), [(1, True), (2, False), (None, True)])
def test_requests_must_have_run_one_at_a_time(running: int | None, held: bool) -> None:
    assert check("serial", requests=[*WARM, request("W3", 96, running=running)]).held is held


@pytest.mark.parametrize(
    ("requests", "evidence"),
    [
        ([request("C1", 16), request("W1", 96)], "C1 16/0, W1 96/96"),
        ([request("C1", 0), request("W1", 0)], "C1 0/0, W1 0/96"),
        ([request("C1", 0), request("W1", 80)], "W1 80/96"),
        ([request("C1", 0), request("W1", None)], "the engine reports no cached tokens"),
        ([request("C1", 0), request("W1", 96, tokens=101)], "prompt lengths differ: [100, 101]"),
        ([request("C1", 0, tokens=16), request("W1", 0, tokens=16)], "the prompt is too short to hit a block"),
        (
            [request("C1", 0, expected_cached=None), request("W1", 96, expected_cached=None)],
            "the block size is unknown",
        ),
    ],
)
def test_a_cache_that_did_not_do_as_the_phase_says_makes_the_prompt_void(
    requests: list[RequestRecord], evidence: str
) -> None:
    found = check("cache", requests=requests)
    assert not found.held
    assert evidence in found.evidence


def test_with_the_cache_off_nothing_may_ever_be_cached() -> None:
    off = facts(prefix_caching=False)
    assert check("cache", off, [request("C1", 0), request("W1", 0)], apc="off").held
    assert not check("cache", off, [request("C1", 0), request("W1", 96)], apc="off").held


def test_prompts_are_judged_one_by_one() -> None:
    found = evaluate(plan(), GOOD, [*WARM, request("C1", 16, prompt="short"), request("W1", 96, prompt="short")], {})
    assert {c.prompt: c.held for c in found if c.name == "cache"} == {"long": True, "short": False}


@pytest.mark.parametrize(
    ("machine", "held", "evidence"),
    [
        ({"boots_at_once": "4"}, True, "4 boots side by side, registered 4"),
        ({"boots_at_once": "1"}, False, "1 boots side by side, registered 4"),
        ({"boots_at_once": "40"}, False, "40 boots side by side, registered 4"),
        ({}, False, "an unknown number of boots side by side, registered 4"),
    ],
)
def test_as_many_boots_as_registered_must_have_shared_the_device(
    machine: dict[str, str], held: bool, evidence: str
) -> None:
    asked = plan().model_copy(update={"at_once": 4})
    found = [c for c in evaluate(asked, GOOD, WARM, machine) if c.name == "at_once"]
    assert [(c.held, c.evidence, c.prompt) for c in found] == [(held, evidence, None)]
    assert [c for c in evaluate(plan(), GOOD, WARM, machine) if c.name == "at_once"] == []
