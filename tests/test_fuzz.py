"""What comes from outside is hostile: a clear error or a right result, never a traceback.

A slice runs with the fast tests, 100,000 of each with `make fuzz`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import build
from conftest import composed
from d3 import certificate
from d3.boot import _request_record, _usable
from d3.certificate import Certificate
from d3.config import Config
from d3.engine import EngineFailure, WorkerEngine
from d3.errors import D3Error
from d3.headline import headline, params_of
from d3.plan import Locations, Planner
from d3.record import Answer, Boot, BootRecord, EngineFacts, RequestPlan, canonical_json
from d3.server import ServerEngine, cache_config
from d3.store import hashes_text, parse_responses, parsed, responses_text
from d3.study import Pins, register
from d3.verify import verify
from fuzz import SCALARS, damaged, mutated, slice_of
from planned import plan

STUDY = build.registration(("on/0", "off/0"), boots=1)
BOOTS = build.boots(STUDY, {"on/0": {"long": build.CACHE}})
MADE = certificate.build(STUDY, BOOTS, build.CONTEXT)
RECORD = json.loads(canonical_json(BOOTS[0].record))
RESPONSES = [json.loads(line) for line in responses_text(BOOTS[0]).splitlines()]
ASKED = plan().requests[0]
REPLY = {
    "choices": [
        {
            "message": {"role": "assistant", "content": "one two"},
            "logprobs": {
                "content": [
                    {"token": "one", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]},
                    {"token": "two", "logprob": -0.25, "top_logprobs": [{"logprob": -0.25}, {"logprob": -2.5}]},
                ]
            },
            "token_ids": [11, 12],
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 33, "prompt_tokens_details": {"cached_tokens": 32}},
    "prompt_token_ids": [1, 2, 3],
}
ANSWER = {
    "op": "answer", "text": "one two", "token_ids": [11, 12], "logprobs": [-0.5, -0.25], "gaps": [1.0, 2.25],
    "prompt_tokens": 33, "prompt_sha256": "0" * 64, "cached_tokens": 32, "finish_reason": "length", "running": 1,
}  # fmt: skip
IMPORTED = {"op": "imported", "began": 1.0, "import_s": 1.0}
FACTS = {"op": "facts", "import_s": 1.0, "facts": json.loads(EngineFacts(version="1.0").model_dump_json())}


def recorded(answer: Answer, asked: RequestPlan) -> None:
    """Whatever was taken for an answer can be recorded, written, and read back as it was."""
    try:
        _usable(answer, asked)
    except EngineFailure as error:
        assert error.failure.line.isprintable()
        return
    request = _request_record(asked, answer, EngineFacts(block_size=16), 0.1)
    record = BOOTS[0].record.model_copy(update={"requests": (request,)})
    boot = Boot(record=record, responses={answer.response.key(): answer.response})
    assert parse_responses(responses_text(boot), "x").keys() == boot.responses.keys()
    assert hashes_text(record)
    canonical_json(record).encode("utf-8", "surrogatepass")


def failed(error: pytest.ExceptionInfo[EngineFailure] | EngineFailure) -> None:
    line = error.failure.line  # type: ignore[union-attr]
    assert line.isprintable()
    assert len(line) <= 500


class Silent:
    """A server engine without a server: what it makes of an answer's bytes."""

    log = Path("/nonexistent")

    @staticmethod
    def ended_within(_seconds: float) -> bool:
        return False


def served(raw: bytes) -> ServerEngine:
    engine = ServerEngine.__new__(ServerEngine)
    engine.plan, engine.child = plan(), Silent()  # type: ignore[assignment]
    engine.log = Silent.log
    engine._sent = lambda _path, _body: (200, raw)  # type: ignore[method-assign]
    return engine


@slice_of(300)
@given(damaged(REPLY))
@example(json.dumps(REPLY).encode())
@example(json.dumps(REPLY).replace("-1.5", "1" * 400).encode())
def test_any_answer_of_a_server_is_an_answer_or_a_failure(raw: bytes) -> None:
    try:
        answer = served(raw).ask(ASKED)
    except EngineFailure as error:
        return failed(error)
    recorded(answer, ASKED)
    return None


@slice_of(150)
@given(st.text(max_size=60) | st.builds(lambda k, v: f'vllm:cache_config_info{{{k}="{v}"}} 1', st.text(), st.text()))
@example('vllm:cache_config_info{block_size="²"} 1')
@example("[" * 100_000)
def test_any_page_of_a_server_is_facts_or_none(page: str) -> None:
    engine = served(b"")
    engine._get = lambda _path: page  # type: ignore[method-assign]
    engine.log = Path("/dev/null")
    facts = engine._facts()
    assert facts.block_size is None or facts.block_size >= 0
    assert facts.cache_config == cache_config(page)
    assert facts.version is None or isinstance(facts.version, str)


class Said:
    """A child that says these lines, one after the other."""

    log = Path("/nonexistent")

    def __init__(self, *lines: bytes) -> None:
        self.lines = [line.decode("utf-8", "replace") for line in lines]

    def send(self, _line: str) -> None: ...

    def remember(self) -> None: ...

    def receive(self, _timeout_s: float, watch: bool = False) -> str:
        return self.lines.pop(0)


@slice_of(300)
@given(
    damaged(IMPORTED).map(lambda raw: (raw, json.dumps(FACTS).encode()))
    | damaged(FACTS).map(lambda raw: (json.dumps(IMPORTED).encode(), raw))
    | damaged(ANSWER).map(lambda raw: (raw,))
)
@example((b'{"op": "error", "line": "one\\ntwo \\u001b[2J' + b"x" * 900 + b'"}',))
def test_any_reply_of_a_worker_is_an_answer_or_a_failure(lines: tuple[bytes, ...]) -> None:
    engine = WorkerEngine(plan(transport="worker"), Path("/nonexistent"), child=Said(*lines))  # type: ignore[arg-type]
    try:
        if len(lines) == 1:
            recorded(engine.ask(ASKED), ASKED)
        else:
            facts = engine.start()
            canonical_json(BOOTS[0].record.engine.model_copy(update={"facts": facts})).encode("utf-8", "surrogatepass")
            assert canonical_json(engine.phases)
    except EngineFailure as error:
        failed(error)


@slice_of(150)
@given(damaged(RECORD), damaged(RESPONSES[0]))
def test_any_record_is_read_and_certified_or_refused_in_one_line(record: bytes, response: bytes) -> None:
    try:
        found = parsed(BootRecord, record, "boot.json")
        lines = [response.decode("utf-8", "replace"), *map(json.dumps, RESPONSES[1:])]
        responses = parse_responses("\n".join(lines), "responses.jsonl")
        boot = Boot(record=found, responses=responses)
        made = certificate.build(STUDY, [boot, BOOTS[1]], build.CONTEXT)
    except D3Error as error:
        assert "\n" not in str(error).strip()
        return
    assert len(made.boots) in {1, 2}
    assert headline(boot) is not None
    assert params_of(found)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate.write(MADE, BOOTS, tmp_path_factory.mktemp("fuzz") / "c.json")


@slice_of(100)
@given(damaged(json.loads(certificate.render(MADE))))
def test_no_changed_certificate_holds_and_none_is_a_traceback(certified: Path, raw: bytes) -> None:
    path = certified.with_name("d.json")
    if not path.with_suffix("").exists():
        shutil.copytree(certified.with_suffix(""), path.with_suffix(""))
    path.write_bytes(raw)
    try:
        problems = verify(path)
    except D3Error:
        return
    assert problems or raw == certified.read_bytes()
    assert all(isinstance(problem, str) for problem in problems)


def test_the_certificate_of_these_cases_holds(certified: Path) -> None:
    assert verify(certified) == []
    assert Certificate.model_validate_json(certified.read_bytes()).digest == MADE.digest


COMPOSED = composed(fake=False)
BASE: Any = OmegaConf.to_container(OmegaConf.masked_copy(COMPOSED, [str(k) for k in COMPOSED if k != "hydra"]))


@slice_of(40)
@given(
    mutated({k: v for k, v in BASE.items() if k != "readings"})
    | st.builds(lambda key, value: {**BASE, key: value}, st.sampled_from(sorted(BASE)), SCALARS)
)
def test_any_configuration_is_a_registration_or_an_error_of_one_line(settings: Any) -> None:
    """Whatever a file or an override may say of any key: what Hydra composes, D3 registers or refuses."""
    if not isinstance(settings, dict) or not all(isinstance(k, str) for k in settings):
        return
    try:
        given_ = OmegaConf.create({"readings": BASE["readings"], **settings})
        cfg: Any = OmegaConf.merge(OmegaConf.structured(Config), given_)  # as Hydra composes it
        engine, model = str(OmegaConf.select(cfg, "engine.name")), str(OmegaConf.select(cfg, "model.name"))
        study = register([cfg], (), Pins({engine: ""}, {model: "0" * 64}))
        planner = Planner(study)
        made = planner.plan(study.order[0], 1, Locations(python="p", model="m"))
    except (D3Error, OmegaConfBaseException, OverflowError):  # of all these, the command line prints one line
        return
    assert len(study.id()) == 64
    canonical_json(made).encode()
