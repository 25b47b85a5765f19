"""What D3 protects: loopback, a key per boot, secrets that are stored nowhere, paths that do not leave their folder."""

import json
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from conftest import FAKE, TESTS, Home, composed
from d3 import certify, job
from d3 import server as serving
from d3.boot import run
from d3.model import model_digest
from d3.reach import tracking_uri
from d3.redact import STRUCK, secret_values, struck, without_password
from d3.server import HOST, ServerEngine
from d3.store import save_registration
from d3.study import Pins, register
from planned import plan

CONF = TESTS.parent / "conf"
ENGINES = sorted(p.stem for p in (CONF / "engine").glob("*.yaml"))
SECRET = "hunter2-hunter2-hunter2"


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_told_to_bind_to_loopback(name: str) -> None:
    engine = composed(f"engine={name}", fake=False).engine
    server = list(engine.server)
    if engine.transport == "attach":  # D3 starts nothing
        assert server == []
        return
    for word, value in (("--host", "{host}"), ("--port", "{port}")):
        assert server[server.index(word) + 1] == value
    assert HOST == "127.0.0.1"


@pytest.mark.usefixtures("nothing_left")
def test_a_server_listens_on_loopback_alone(tmp_path: Path) -> None:
    engine = ServerEngine(plan(), tmp_path / "log")
    try:
        engine.start()
        process = psutil.Process(engine.child._process.pid)
        listening = [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening == [HOST]
    finally:
        engine.stop()


@pytest.mark.usefixtures("nothing_left")
def test_each_boot_has_a_key_of_its_own_that_every_request_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(serving, "launched", lambda command, env, *_, **__: launched.append((command, env)))
    engines = [ServerEngine(plan(), tmp_path / "log") for _ in range(2)]
    keys = [engine.hidden[0] for engine in engines]
    assert len(set(keys)) == 2
    assert all(len(key) > 40 for key in keys)
    for engine, key, (command, env) in zip(engines, keys, launched, strict=True):
        assert engine.http.headers["Authorization"] == f"Bearer {key}"
        assert env["VLLM_API_KEY"] == env["LLAMA_API_KEY"] == key
        assert not [word for word in command if key in word]  # any user of the machine can read a command line
        engine.http.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_key_that_the_engine_tells_is_struck_out_of_its_log_and_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3.server.secrets.token_urlsafe", lambda _n: SECRET)
    record = run(plan(do="tell_key"), tmp_path).record
    assert record.reason == f"boot: ValueError: my key is {STRUCK}"
    assert SECRET not in record.model_dump_json()
    assert (tmp_path / "engine.log").read_text() == f"ValueError: my key is {STRUCK}\n"


@pytest.mark.usefixtures("nothing_left")
def test_secrets_are_stored_nowhere(
    home: Home, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the environment, in the name of the prompts' file, and in a line of the engine's log."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("PROXY", f"http://me:{SECRET}-too@example.org")
    Path(f"{home.switch}.says").write_text(f"INFO token={SECRET} proxy=http://me:{SECRET}-too@example.org\n")
    prompts = tmp_path / "conf/prompts"
    prompts.mkdir(parents=True)
    text = yaml.safe_load((TESTS / "conf/prompts/fake.yaml").read_text())
    (prompts / f"{SECRET}.yaml").write_text(yaml.safe_dump(text))
    where = f"hydra.searchpath=[file://{TESTS}/conf,file://{tmp_path}/conf]"
    own = [word for word in FAKE[1:] if not word.startswith("prompts=")]
    cfg = composed(where, *own, "boots=1", f"prompts={SECRET}", fake=False).copy()
    study = register([cfg], (), Pins({"fake": ""}, {"fake-model": model_digest(str(home.model))}))
    save_registration(study)
    cfg.registration = study.id()
    assert job.run(cfg) == "valid"
    assert certify.main(["--out", str(home.folder / "out/c.json")]) == 0
    client = MlflowClient(tracking_uri())
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len(runs) == 2
    told = [json.dumps(run.to_dictionary()) for run in runs] + [*capsys.readouterr()]
    files = [p for folder in (home.runs, home.folder / "out") for p in folder.rglob("*") if p.is_file()]
    assert len([p for p in files if p.name == "engine.log"]) == 2  # beside the record, and in MLflow
    told += [p.read_bytes().decode(errors="replace") for p in files]
    assert not [text for text in told if SECRET in text]
    assert (
        (next(home.runs.rglob("engine.log"))).read_text().startswith(f"INFO token={STRUCK} proxy=http://me:{STRUCK}@")
    )


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"A_TOKEN": "12345678"}, ("12345678",)),
        ({"aws_secret_access_key": "abcdefgh"}, ("abcdefgh",)),
        ({"DB_PASSWORD": "short", "PATH": "/usr/bin:/bin"}, ()),
        ({"TOKENIZERS_PARALLELISM": "false"}, ()),
        ({"SIGNING_KEY": "-----BEGIN\nlonglonglong\n-----END"}, ("-----BEGIN\nlonglonglong\n-----END", "longlonglong",
                                                               "-----BEGIN", "-----END")),
        ({"URL": "postgres://me:pass-pass@db/x"}, ("pass-pass",)),
        ({"URL": "http://[half"}, ()),
    ],
)  # fmt: skip
def test_what_looks_secret(environ: dict[str, str], found: tuple[str, ...]) -> None:
    assert secret_values(environ) == found


@given(st.text(min_size=8).filter(lambda t: t.strip() == t), st.text(), st.text())
def test_no_text_keeps_a_secret(secret: str, before: str, after: str) -> None:
    hidden = secret_values({"X_TOKEN": secret})
    assert secret not in struck(before + secret + after, hidden).replace(STRUCK, "")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:pw@host/x", f"http://{STRUCK}@host/x"),
        ("http://host/x does not answer: a:b @ c", "http://host/x does not answer: a:b @ c"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_no_shell_no_unsafe_yaml_no_pickle_in_the_package() -> None:
    unsafe = (
        "shell=True",
        "os.system(",
        "os.popen(",
        "yaml.load(",
        "yaml.unsafe_load",
        "pickle.load",
        "eval(",
        "exec(",
    )
    paths = [*(TESTS.parent / "d3").rglob("*.py"), *(TESTS.parent / "hydra_plugins").rglob("*.py")]
    assert len(paths) > 50
    assert not [(p.name, word) for p in paths for word in unsafe if word in p.read_text()]


def test_the_interface_of_make_ui_is_on_loopback() -> None:
    (line,) = [x for x in (TESTS.parent / "Makefile").read_text().splitlines() if "mlflow server" in x]
    assert "--host 127.0.0.1" in line
