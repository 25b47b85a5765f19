"""The worker transport against a pretend worker: answers, and every way in which a worker can fail to give one."""

import threading
import time
from pathlib import Path

import pytest

from d3.engine import EngineFailure, WorkerEngine, environment, last_words, turn
from d3.record import hash_tokens
from planned import plan, wrapper

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def asked(tmp_path: Path):
    """A worker's facts and first answer, or its failure."""

    def ask(do: str = "", **launch: object) -> tuple[object, ...]:
        engine = WorkerEngine(plan(do=do, transport="worker", python=wrapper(tmp_path), **launch), tmp_path / "log")
        try:
            return engine.start(), engine.ask(plan().requests[0])
        finally:
            engine.stop()

    return ask


def failure(ask, *arguments: object, **launch: object):
    with pytest.raises(EngineFailure) as error:
        ask(*arguments, **launch)
    return error.value.failure


def test_a_worker_says_what_it_is_and_answers(asked) -> None:
    facts, answer = asked()
    assert (facts.version, facts.block_size, facts.prefix_caching, facts.invariant_mode) == ("1.0", 16, True, "off")
    assert len(answer.response.token_ids) == 4
    assert answer.response.text == " ".join(map(str, answer.response.token_ids))
    assert answer.cached_tokens == 0
    assert answer.prompt_sha256 != hash_tokens(())


@pytest.mark.parametrize(
    ("do", "stage", "kind", "line"),
    [
        ("die_in_boot", "boot", "engine_error", "ValueError: no available memory for the cache blocks"),
        ("die_quietly", "request", "engine_error", "the engine process ended with code 3"),
        ("raise", "boot", "engine_error", "RuntimeError: the engine core failed"),
        ("noise", "boot", "bad_answer", "the engine's reply is no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("a_number", "boot", "bad_answer", "the engine's reply has no op: 42"),
        ("no_op", "boot", "bad_answer", "the engine's reply has no op: {}"),
        ("bad_facts", "boot", "bad_answer", "the engine's speed: Extra inputs are not permitted"),
    ],
)
def test_a_failing_worker_says_at_which_stage_and_in_its_own_words(
    asked, do: str, stage: str, kind: str, line: str
) -> None:
    found = failure(asked, do)
    assert (found.stage, found.kind, found.line) == (stage, kind, line)


@pytest.mark.parametrize(("do", "stage"), [("hang_in_boot", "boot"), ("hang_in_request", "request")])
def test_a_hanging_worker_is_given_up_at_its_deadline(asked, do: str, stage: str) -> None:
    limit = {f"{stage}_timeout_s": 0.5}
    found = failure(asked, do, **limit)
    assert (found.stage, found.kind) == (stage, "timeout")


def test_a_worker_that_dies_behind_an_open_pipe_is_noticed_at_once(asked) -> None:
    began = time.monotonic()
    found = failure(asked, "die_but_leave_the_pipe_open")
    assert (found.kind, found.line) == ("engine_error", "SystemError: core dumped")
    assert time.monotonic() - began < 10


def test_a_killed_worker_is_the_machines_fault_not_the_engines(tmp_path: Path) -> None:
    engine = WorkerEngine(plan(do="hang_in_request", transport="worker", python=wrapper(tmp_path)), tmp_path / "log")
    engine.start()
    engine.child._process.kill()
    with pytest.raises(EngineFailure, match="killed by signal 9, as the kernel does when memory runs out") as error:
        engine.ask(plan().requests[0])
    assert error.value.failure.kind == "environment"
    engine.stop()


def test_a_python_that_is_not_there_is_an_environment_failure(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="cannot start /no/such/python: No such file or directory") as error:
        WorkerEngine(plan(transport="worker", python="/no/such/python"), tmp_path / "log")
    assert (error.value.failure.stage, error.value.failure.kind) == ("launch", "environment")


def test_the_childs_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("SECRET", "x")
    found = environment(plan(env={"OMP_NUM_THREADS": "2"}))
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "PATH" in found
    assert not {"VLLM_BATCH_INVARIANT", "SECRET"} & set(found)
    assert found["VLLM_DISABLE_COMPILE_CACHE"] == "1"
    assert environment(plan(env={"VLLM_DISABLE_COMPILE_CACHE": "0"}))["VLLM_DISABLE_COMPILE_CACHE"] == "0"


def test_engines_on_one_gpu_start_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3_CACHE", str(tmp_path))
    monkeypatch.setattr("d3.engine.machine", lambda: {"gpu": "one"})
    inside: list[int] = []
    most: list[int] = []

    def start() -> None:
        with turn() as waited:
            assert waited
            inside.append(1)
            time.sleep(0.02)
            most.append(len(inside))
            inside.pop()

    monkeypatch.setenv("D3_AT_ONCE", "3")
    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
    monkeypatch.setenv("D3_AT_ONCE", "1")
    with turn() as waited:
        assert not waited


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "x\nTypeError: 'function' object is not subscriptable\n  at here\n",
            "TypeError: 'function' object is not subscriptable",
        ),
        (
            "(EngineCore pid=1) ERROR 11-29 [core.py:1] torch.OutOfMemoryError: no room\n",
            "torch.OutOfMemoryError: no room",
        ),
        ("ValueError: first\nRuntimeError: See root cause above.\n", "ValueError: first"),
        ("api_server.py: error: unrecognized arguments: --apx\n", "error: unrecognized arguments: --apx"),
        ("WARNING 11-30 [launcher.py:1] ... error like `OSError: [Errno 24] Too many open files`.\n", "nothing"),
        ("all is well\n", "nothing"),
    ],
)
def test_the_last_error_line_of_a_log_is_quoted(tmp_path: Path, log: str, line: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log", "nothing") == line


def test_without_a_log_the_fallback_is_said(tmp_path: Path) -> None:
    assert last_words(tmp_path / "log", "nothing") == "nothing"
