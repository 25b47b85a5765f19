"""The server transport against a pretend server: answers, the cache, and every way to fail."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from d3.engine import EngineFailure
from d3.server import ServerEngine, cache_config
from planned import plan, requests

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start servers; all of them are stopped at the end."""
    monkeypatch.setattr("d3.server.ENDING_S", 0.5)
    engines: list[ServerEngine] = []

    def start(*arguments: str, **launch: object) -> ServerEngine:
        engines.append(ServerEngine(plan(*arguments, **launch), tmp_path / "log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


def failure(engine: ServerEngine):
    with pytest.raises(EngineFailure) as error:
        engine.start()
        engine.ask(plan().requests[-1])
    return error.value.failure


def test_a_server_says_what_it_is_and_its_answers_depend_on_its_cache(serving) -> None:
    engine = serving("on", "0")
    facts = engine.start()
    assert (facts.version, facts.block_size, facts.prefix_caching) == ("1.0", 16, True)
    assert facts.cache_config == {"block_size": "16", "enable_prefix_caching": "True"}
    long = [engine.ask(r) for r in plan().requests if r.prompt == "long"]
    hit = (long[0].prompt_tokens - 1) // 16 * 16
    assert [a.cached_tokens for a in long] == [0, hit, 0, hit]
    cold, warm, cold_again, warm_again = (a.response for a in long)
    assert cold == cold_again != warm == warm_again
    assert cold.gaps == (2.0, 1.5, 1.0, 0.0625)
    assert len({a.prompt_sha256 for a in long}) == 1


def test_neighbours_are_sent_beside_a_request_and_counted(serving) -> None:
    engine = serving()
    engine.start()
    assert engine.ask(requests(neighbours=3)[0]).running == 4


@pytest.mark.parametrize(
    ("do", "stage", "kind", "line"),
    [
        ("die_in_boot", "boot", "engine_error", "ValueError: no available memory for the cache blocks"),
        ("die_with_flag", "request", "engine_error", "TypeError: 'function' object is not subscriptable"),
        ("die_quietly", "request", "engine_error", "the engine process ended with code 3"),
        ("http_500", "request", "engine_error", 'HTTP 500: {"error": "out of luck"}'),
        ("http_429", "request", "environment", 'HTTP 429: {"error": "too many requests"}'),
        ("half_json", "request", "bad_answer", "the answer broke off: RemoteProtocolError: peer closed connection"),
        ("not_json", "request", "bad_answer", "the answer is no JSON: "),
        ("no_choices", "request", "bad_answer", "the answer lacks what was asked: IndexError: list index out of range"),
        ("null_choice", "request", "bad_answer", "the answer lacks what was asked: AttributeError: 'NoneType' object"),
    ],
)
def test_a_failing_server_says_at_which_stage_and_in_its_own_words(
    serving, do: str, stage: str, kind: str, line: str
) -> None:
    found = failure(serving("on", "1", do))
    assert (found.stage, found.kind, found.line[: len(line)]) == (stage, kind, line)
    assert "\n" not in found.line


@pytest.mark.parametrize(("do", "stage"), [("hang_in_boot", "boot"), ("hang_in_request", "request")])
def test_a_hanging_server_is_given_up_at_its_deadline(serving, do: str, stage: str) -> None:
    limit = {f"{stage}_timeout_s": 0.6}
    found = failure(serving("on", "0", do, **limit))
    assert (found.stage, found.kind) == (stage, "timeout")


def test_log_probabilities_may_be_missing_or_nan(serving) -> None:
    for do, seen in (("no_logprobs", "()"), ("nan_logprobs", "(-0.125, nan, -0.5, -0.75)")):
        engine = serving("on", "0", do)
        engine.start()
        assert str(engine.ask(plan().requests[0]).response.logprobs) == seen


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_another_server_on_the_port_is_never_taken_for_ours(serving, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = HTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=stranger.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr("d3.server.free_port", lambda: stranger.server_port)
    try:
        engine = serving("on", "0", "hang_in_boot")
        found = failure(engine)
        assert (found.stage, found.kind) == ("boot", "environment")
        assert f"another process answers on port {stranger.server_port}" in found.line
    finally:
        stranger.shutdown()
        stranger.server_close()


def test_a_port_in_use_is_not_called_the_engines_fault(serving, monkeypatch: pytest.MonkeyPatch) -> None:
    first = serving()
    first.start()
    monkeypatch.setattr("d3.server.free_port", lambda: first.port)
    monkeypatch.setattr(ServerEngine, "_healthy", lambda _self: False)
    found = failure(serving("on", "1"))
    assert (found.stage, found.kind) == ("boot", "environment")
    assert found.line.startswith("OSError: [Errno 98] Address already in use")


def test_stopping_ends_the_server_and_what_it_left_elsewhere(serving) -> None:
    engine = serving("on", "0", "orphan")
    engine.start()
    family = psutil.Process(engine.child._process.pid).children()
    left = engine.stop()
    assert [word.split()[0] for word in left] == ["process", "shared"]
    assert f"shared memory d3-fake-{engine.child._process.pid}" in left
    assert not [p for p in family if p.is_running()]


def test_only_the_cache_line_of_a_metrics_page_is_read() -> None:
    page = (
        'vllm:other{block_size="1"} 2\nvllm:cache_config_info{block_size="32",enable_prefix_caching="False",x="1"} 1\n'
    )
    assert cache_config(page) == {"block_size": "32", "enable_prefix_caching": "False"}
    assert cache_config("llama:nothing 1") == {}
