"""An endpoint that D3 did not start: asked as it is, and nothing said of boots."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from conftest import TESTS, Home, composed
from d3 import boot as booting
from d3.analysis import analyse
from d3.callbacks import UNSEEN, pins
from d3.errors import D3Error
from d3.job import locations
from d3.limits import ATTACHED, limits
from d3.plan import boot_plan
from d3.preflight import preflight
from d3.record import Boot, canonical_json
from d3.registration import Registration
from d3.server import free_port
from d3.study import register

WORDS = (f"hydra.searchpath=[file://{TESTS}/conf]", "prompts=fake", "engine=attach", "boots=1", "study.name=attached")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A pretend engine that somebody else started."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-S", str(TESTS / "fake_engine.py"), "--port", str(port)])
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        assert server.poll() is None  # nobody ended it
    finally:
        server.kill()
        server.wait()


def visit(folder: Path, url: str, *overrides: str) -> tuple[Registration, Boot]:
    config = composed(*WORDS, f"engine.url={url}", *overrides, fake=False)
    preflight([config])
    study = register([config], (), pins([config]))
    return study, booting.run(boot_plan(study, study.order[0], 1, locations(config)), folder)


def test_a_visit_is_counted_and_says_that_it_is_no_boot(endpoint: str, home: Home) -> None:
    study, boot = visit(home.folder / "boot", endpoint)
    assert (boot.record.status, boot.record.reason, boot.record.coldness) == ("valid", "", "none")
    assert boot.record.engine.command == ("attached to", endpoint)
    assert (boot.record.model_digest, boot.record.engine.facts.version) == (UNSEEN, "1.0")
    assert ATTACHED in limits(study, [boot])
    assert not [line for line in limits(study, [boot]) if line.startswith("1 boot")]
    cell = analyse(study, [boot]).strata[0].cells[0]
    assert cell.states[0].state == "diverges"


def test_salts_that_were_sent_before_are_not_cold_and_another_seed_has_others(endpoint: str, home: Home) -> None:
    visit(home.folder / "boot", endpoint, "seed=2")
    again = visit(home.folder / "boot", endpoint, "seed=2")[1].record
    assert again.status == "void"
    assert "C1 64/0" in again.reason or "C1 32/0" in again.reason
    assert visit(home.folder / "boot", endpoint, "seed=3")[1].record.status == "valid"


def test_a_first_request_of_a_visit_is_not_the_first_after_a_boot(endpoint: str, home: Home) -> None:
    from d3.classify import _kind

    boot = visit(home.folder / "boot", endpoint, "seed=4")[1]
    requests = [r for r in boot.record.requests if r.prompt == "short"]
    changed = [requests[0].model_copy(update={"text_sha256": "0" * 64}), *requests[1:]]
    assert _kind(boot.record, changed, "text") == "unknown"
    assert _kind(boot.record.model_copy(update={"coldness": "L1"}), changed, "text") == "boot"


def test_a_key_is_sent_and_never_recorded(endpoint: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = httpx.Client.send

    def send(self: httpx.Client, request: httpx.Request, **words: object) -> httpx.Response:
        seen.append(request.headers.get("Authorization", ""))
        return real(self, request, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(httpx.Client, "send", send)
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    study, boot = visit(home.folder / "boot", endpoint, "engine.key_env=MY_KEY", "seed=5")
    assert boot.record.status == "valid"
    assert set(seen) == {"Bearer s3cret-key"}
    assert "s3cret-key" not in canonical_json(boot) + canonical_json(study)
    monkeypatch.delenv("MY_KEY")
    record = visit(home.folder / "boot", endpoint, "engine.key_env=MY_KEY", "seed=6")[1].record
    assert record.reason == "launch: the environment has no MY_KEY, which engine.key_env names"


def test_an_endpoint_that_is_not_there_is_no_fault_of_an_engine(home: Home) -> None:
    record = visit(home.folder / "boot", f"http://127.0.0.1:{free_port()}")[1].record
    assert record.failure is not None
    assert (record.status, record.failure.kind) == ("failed", "environment")
    assert record.reason.startswith("boot: nothing ready answers at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("engine.url=null", "engine.url names no endpoint"),
        ("engine.url=ftp://x", "engine.url=ftp://x is no http address"),
        ("engine.url='http://me:pass@x/'", "engine.url holds a name, a password or a query"),
        ("apc=off", "D3 did not start this endpoint, so it can switch neither its cache nor its batch-invariant mode"),
        ("invariant=1", "D3 did not start this endpoint, so it can switch neither its cache nor"),
        ("boots=2", "boots=2: an endpoint that D3 did not start is not booted again; say boots=1"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused_in_one_line(override: str, line: str, home: Home) -> None:
    with pytest.raises(D3Error) as error:
        visit(home.folder, "http://127.0.0.1:1", override)
    assert str(error.value).startswith(line)
