"""Two certificates that asked for different numbers of tokens are compared over what both asked for."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3.alike import alike, asked, cut, cut_boot
from d3.compare import main, read_side
from d3.comparison import Side, compare

RESULTS = Path(__file__).parent.parent / "results"
OLD, NEW = RESULTS / "h200_vllm_0_24.json", RESULTS / "h200_vllm_0_33.json"


@cache
def side(path: Path) -> Side:
    return read_side(path)


def test_the_same_number_of_tokens_changes_nothing() -> None:
    found = alike(side(NEW), side(NEW))
    assert (found.old, found.new, found.words) == (side(NEW), side(NEW), "")


def test_an_upgrade_is_judged_over_the_first_32_tokens_of_48() -> None:
    assert (asked(side(OLD)), asked(side(NEW))) == ({32}, {48})
    found = alike(side(OLD), side(NEW))
    longest = {path: max(len(r.token_ids) for b in s.boots for r in b.responses.values())
               for path, s in (("old", found.old), ("new", found.new))}  # fmt: skip
    assert longest == {"old": 32, "new": 32}
    rows = compare(found.old, found.new).only(["tokens"]).rows
    # Uncut, seven prompts of the default backend part only after the 32nd token, where the old side had no token.
    assert {(r.stratum, r.cell, r.prompt) for r in rows if r.change == "appeared"} == {
        ("attention=default", "on/1", "bakery-260"),
        ("attention=TRITON_ATTN", "on/0", "bees-24"),
        ("attention=TRITON_ATTN", "on/0", "bakery-260"),
    }
    uncut = compare(side(OLD), side(NEW)).only(["tokens"]).rows
    assert sum(r.change == "appeared" for r in uncut) == 10


@given(st.integers(1, 60))
def test_a_cut_response_is_a_prefix_and_its_record_names_it(tokens: int) -> None:
    whole = side(NEW).boots[0]
    boot = cut_boot(whole, tokens)
    for before, after in zip(whole.record.requests, boot.record.requests, strict=True):
        long, short = whole.responses[before.response], boot.responses[after.response]
        assert short.token_ids == long.token_ids[:tokens]
        assert short.logprobs == long.logprobs[:tokens]
        assert after.n_tokens == len(short.token_ids) == min(tokens, before.n_tokens)
        assert after.tokens_sha256 == short.hashes()["tokens"]
        if tokens >= before.n_tokens:
            assert (after.tokens_sha256, after.logprobs_sha256) == (before.tokens_sha256, before.logprobs_sha256)


def test_cutting_to_all_tokens_gives_the_same_verdicts() -> None:
    again = cut(side(NEW), 48)
    for before, after in zip(side(NEW).certificate.strata, again.certificate.strata, strict=True):
        assert before.verdict("tokens") == after.verdict("tokens")
        assert before.verdict("logprobs") == after.verdict("logprobs")


def test_the_command_says_so_and_refuses_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(OLD), str(NEW), "--endpoint", "text"]) == 2
    assert capsys.readouterr().err.startswith("error: bytes cannot be compared: requests asked for 32 and 48 tokens")
    assert main([str(OLD), str(NEW), "--gate", "--out", str(tmp_path / "upgrade.md")]) == 1
    assert "over the first 32 of every response, bytes not at all" in capsys.readouterr().out
    committed = (RESULTS / "h200_upgrade_0_24_to_0_33.md").read_text()
    assert (tmp_path / "upgrade.md").read_text().partition("\n")[2] == committed.partition("\n")[2]
