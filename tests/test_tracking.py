"""MLflow: one parent per study, one child per attempt, the same on a second call, no trust in changed artifacts."""

import itertools
import json
import re
import shutil
import socket
import sqlite3
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import mlflow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

import build
from conftest import TESTS, Home
from d3.certificate import build as certificate_of
from d3.errors import D3Error
from d3.headline import answers, params_of, run_name
from d3.reach import tracking_uri
from d3.record import Boot, canonical_json, sha256
from d3.registration import Registration
from d3.store import LOG, boot_dir, load, save_boot, save_registration
from d3.sync import sync
from d3.tracking import Study, Tracking
from d3.view import description

STUDY = build.registration(boots=1)
BOOTS = build.boots(STUDY, {"on/0": {"short": build.CACHE}})


@pytest.fixture
def tracking(store: Path) -> Tracking:
    return Tracking()


def children(tracking: Tracking, study: Study) -> list[Run]:
    return list(
        tracking.client.search_runs(
            [study.experiment_id], f"tags.`mlflow.parentRunId` = '{study.run_id}'", max_results=100
        )
    )


def logged(tracking: Tracking, *boots: Boot, log: Path | None = None) -> Study:
    study = tracking.open_study(STUDY)
    for boot in boots:
        tracking.log_boot(study, boot, log)
    return study


def test_a_study_comes_back_out_of_the_store_as_it_went_in(tracking: Tracking) -> None:
    study = logged(tracking, *BOOTS)
    frame, boots = tracking.boots(study)
    assert boots == sorted(BOOTS, key=lambda b: b.record.boot_id)
    assert list(frame["boot_id"]) == [b.record.boot_id for b in boots]
    assert set(frame["status"]) == {"valid"}
    assert tracking.registration(study) == STUDY
    assert tracking.studies() == [study]


def test_a_child_run_says_what_was_varied_and_what_came_out(tracking: Tracking, tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("x" * 300_000 + "the end")
    study = logged(tracking, BOOTS[0], log=tmp_path / LOG)
    (run,) = children(tracking, study)
    assert run.info.run_name == "apc=on invariant=0 · boot 0"
    assert (run.data.params["apc"], run.data.params["invariant"]) == ("on", "0")
    assert run.data.params["engine.version"] == run.data.params["reported.version"] == "1.0"
    assert (run.data.params["answers.short"], run.data.params["answers.long"]) == ("ABBBBBAB", "AAAAAAAA")
    assert run.data.metrics["divergence/prompts_that_differ.text"] == 1.0
    assert next(iter(run.data.metrics)) == "divergence/prompts_that_differ.text"  # what MLflow charts by default
    assert run.data.params["model.digest"] == BOOTS[0].record.model_digest
    assert run.data.params["prompt.long.tokens"] == "240"
    assert run.data.metrics["divergence/first_differs.short.text"] == 1.0
    assert run.data.metrics["divergence/distinct.short.text"] == 2.0
    assert run.data.metrics["divergence/token.short"] == 3.0
    assert run.data.metrics["divergence/max_dlogprob.short"] == pytest.approx(0.01)
    assert run.data.metrics["divergence/first_differs.long.text"] == 0.0
    assert run.data.metrics["prefix_cache/cached_tokens.long.W1"] == 224.0
    names = {f.path for f in tracking.client.list_artifacts(run.info.run_id)}
    assert names == {"boot.json", "responses.jsonl", "hashes.txt", "engine.log"}
    (tmp_path / "down").mkdir()
    kept = Path(tracking.client.download_artifacts(run.info.run_id, LOG, str(tmp_path / "down")))
    assert (kept.stat().st_size, kept.read_text()[-7:]) == (200_000, "the end")


def test_a_child_run_begins_and_ends_when_the_boot_did(tracking: Tracking) -> None:
    study = logged(tracking, BOOTS[0])
    (run,) = children(tracking, study)
    began = datetime.fromisoformat(BOOTS[0].record.started_at).timestamp() * 1000
    assert (run.info.start_time, run.info.end_time - run.info.start_time) == (began, 3500)


def test_logging_a_boot_leaves_nothing_of_its_run_in_memory(tracking: Tracking) -> None:
    """MLflow's client keeps an object of 8 KiB for each run whose files it was asked to log."""
    study = logged(tracking)
    before = len(_artifact_repos_cache)
    for boot in BOOTS:
        tracking.log_boot(study, boot, None)
    assert len(_artifact_repos_cache) == before


def test_run_names_say_what_is_not_as_usual() -> None:
    study = build.registration(boots=1, strata=({"dtype": "float32"},))
    record = build.boots(study)[0].record
    assert run_name(record) == "apc=on invariant=0 · boot 0 · dtype=float32"
    again = record.model_copy(update={"stratum": "base", "attempt": 2, "status": "void"})
    assert run_name(again) == "apc=on invariant=0 · boot 0 · attempt 2 · void"


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (build.AGREE, "AAAAAAAA"),
        (build.CACHE, "ABBBBBAB"),
        (build.SCATTERED, "ABCABCAB"),
        ("axxxxxax", "A1A2A2A2A2A2A1A2"),  # one text throughout, of two log-probabilities
        ("abxbbbab", "A1B1A2B1B1B1A1B1"),
    ],
)
def test_answers_are_one_letter_per_request(script: str, shown: str) -> None:
    moved = build.response("a", logprobs=(-0.5, -0.5, -0.5, -0.5))
    record = build.boot(STUDY, "on/0", 0, {"short": script}, letters={"x": moved}).record
    assert params_of(record)["answers.short"] == answers(record.requests) == shown


@given(st.text("abcxyz", min_size=1, max_size=8))
def test_answers_are_alike_exactly_where_text_and_logprobs_are(script: str) -> None:
    twins = {"x": "a", "y": "b", "z": "c"}
    letters = {k: build.response(v, logprobs=(-1.0, -1.0, -1.0, -1.0)) for k, v in twins.items()}
    requests = build.boot(STUDY, "on/0", 0, {"short": script}, letters=letters).record.requests
    signs = re.findall(r"[A-Z]\d*", answers(requests))
    assert len(signs) == len(script)
    for one, other in itertools.combinations(range(len(script)), 2):
        same_text = requests[one].text_sha256 == requests[other].text_sha256
        assert (signs[one] == signs[other]) == (script[one] == script[other])
        assert (signs[one][0] == signs[other][0]) == same_text


def test_the_prompts_are_an_input_of_the_study_and_of_every_boot(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = logged(tracking, BOOTS[0])
    (child,) = children(tracking, study)
    for run in (tracking.client.get_run(study.run_id), child):
        (found,) = run.inputs.dataset_inputs
        assert found.dataset.name == "test prompts"
        assert [(t.key, t.value) for t in found.tags] == [("mlflow.data.context", "prompts")]
        assert json.loads(found.dataset.profile) == {"num_rows": 2}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri())
    mlflow.set_tracking_uri(tracking_uri())  # an earlier call's would go before the environment's
    rows = json.loads(Path(mlflow.data.get_source(found.dataset).load()).read_text())
    assert [(r["id"], r["messages"]) for r in rows] == [
        ("short", "user: A short prompt."), ("long", "user: A long prompt."),
    ]  # fmt: skip
    assert rows[0]["sha256"] == sha256('[{"content":"A short prompt.","role":"user"}]')
    assert found.dataset.digest == sha256(canonical_json(rows))[:12]


def certified(
    tracking: Tracking, registration: Registration, *boots: Boot, report: str = "# Q?\n\n**It is so.**\n"
) -> Study:
    study = tracking.open_study(registration)
    runs = {b.record.boot_id: tracking.log_boot(study, b, None) for b in boots}
    certificate = certificate_of(registration, boots, build.CONTEXT.model_copy(update={"runs": runs}))
    tracking.annotate(study, certificate, report, [], tracking.boots(study)[0])
    return study


def test_a_certificate_puts_the_reading_on_the_parent_and_its_children(tracking: Tracking) -> None:
    strata = ({"dtype": "bfloat16"}, {"dtype": "float=32"})
    study = build.registration(boots=1, strata=strata)
    moved = build.boots(study, {"on/0": {"short": build.CACHE}}, stratum="dtype=bfloat16")
    found = certified(tracking, study, *moved, *build.boots(study, stratum="dtype=float=32"))
    parent = tracking.client.get_run(found.run_id).data
    assert parent.tags["d3.reading"] == "dtype=bfloat16: closed_by_flag; dtype=float=32: none"
    assert parent.tags["mlflow.note.content"].startswith("**It is so.**")
    assert parent.metrics["first_differs/dtype-bfloat16/on-0.short.text"] == 1.0
    assert parent.metrics["first_differs/dtype-float-32/on-0.short.text"] == 0.0
    by_stratum = {r.data.tags["d3.stratum"]: r.data.tags for r in children(tracking, found)}
    assert by_stratum["dtype=bfloat16"]["d3.reading"] == "closed_by_flag"
    assert by_stratum["dtype=float=32"]["d3.reading"] == "none"
    assert not any("d3.counted" in t for t in by_stratum.values())  # to count is the rule


def test_a_boot_that_does_not_count_says_why(tracking: Tracking) -> None:
    lost = build.failed(STUDY, "on/0", 0)
    study = certified(tracking, STUDY, lost, *BOOTS[1:])
    tags = next(r.data.tags for r in children(tracking, study) if r.data.tags["d3.status"] == "failed")
    assert tags["d3.counted"] == "no, failed: boot: Error: no"


def test_a_boot_that_counts_after_all_says_so(tracking: Tracking) -> None:
    study = certified(tracking, STUDY, build.failed(STUDY, "on/0", 0), *BOOTS[1:])
    (run,) = [r for r in children(tracking, study) if "d3.counted" in r.data.tags]
    logged = tracking.boots(study)[0]
    certificate = certificate_of(STUDY, BOOTS, build.CONTEXT)
    entry = next(b for b in certificate.boots if b.counted).model_copy(update={"run": run.info.run_id})
    tracking.annotate(study, certificate.model_copy(update={"boots": (entry,)}), "# Q?\n", [], logged)
    assert tracking.client.get_run(run.info.run_id).data.tags["d3.counted"] == "yes"


def test_a_second_certificate_writes_only_tags_that_changed(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = certified(tracking, STUDY, *BOOTS)
    frame, boots = tracking.boots(study)
    written = []
    monkeypatch.setattr(tracking.client, "set_tag", lambda *words: written.append(words))
    runs = dict(zip(frame["boot_id"], frame["run_id"], strict=True))
    certificate = certificate_of(STUDY, boots, build.CONTEXT.model_copy(update={"runs": runs}))
    tracking.annotate(study, certificate, "# Q?\n", [], frame)
    assert written == []
    tracking.annotate(study, certificate, "# Q?\n", [], frame.assign(reading="none"))
    assert {key for _, key, _ in written} == {"d3.reading"}
    assert len(written) == len(boots)


def test_a_study_of_an_earlier_version_can_be_certified(tracking: Tracking) -> None:
    """Its runs have none of the newer tags, inputs, names and parameters."""
    study = tracking.open_study(STUDY)
    for run in (*children(tracking, logged(tracking, *BOOTS)), tracking.client.get_run(study.run_id)):
        with sqlite3.connect(tracking_uri().removeprefix("sqlite:///")) as store:
            for table in ("params", "metrics", "latest_metrics"):
                store.execute(f"delete from {table} where run_uuid = ?", (run.info.run_id,))  # noqa: S608
            store.execute("delete from inputs where destination_id = ?", (run.info.run_id,))
        if run.data.tags["d3.kind"] == "boot":
            tracking.client.delete_tag(run.info.run_id, "d3.study")
    assert tracking.client.get_run(study.run_id).inputs.dataset_inputs == []
    frame, boots = tracking.boots(study)
    assert len(frame) == len(boots) == 4
    certified(tracking, STUDY, *BOOTS)  # nothing is sent again
    assert {r.data.tags["d3.reading"] for r in children(tracking, study)} == {"closed_by_flag"}


def test_a_report_that_is_too_long_for_a_description_is_cut_between_sections() -> None:
    report = "# Q?\n\n**Yes.**\n\n## One\n\n" + "x" * 3000 + "\n\n## Two\n\n" + "y" * 3000 + "\n"
    note = description(report, "certificate/c.json")
    assert (
        note == "**Yes.**\n\n## One\n\n" + "x" * 3000 + "\n\nThe whole report is the artifact `certificate/c.json`.\n"
    )
    for long in ("z" * 9000, "a\n" + "z" * 9000, "z" * 9000 + "\n## x"):
        assert 40 < len(description(long, "c.md")) <= 5000


def test_names_and_values_that_are_too_long_for_mlflow_are_cut(tracking: Tracking) -> None:
    name, reason = "x" * 400, "no " * 4000
    study = build.registration(boots=1, strata=({"attention": name},))
    record = build.failed(study, "on/0", 0).record.model_copy(update={"reason": reason, "model": "m" * 9000})
    found = tracking.open_study(study.model_copy(update={"study": name}))
    tracking.log_boot(found, Boot(record=record, responses={}), None)
    (run,) = children(tracking, found)
    assert len(run.info.run_name) == len(tracking.client.get_run(found.run_id).info.run_name) == 250
    assert (len(run.data.params["model"]), len(run.data.tags["d3.reason"])) == (500, 500)


def test_a_study_is_a_saved_view_of_its_boots_with_the_answers_as_columns(tracking: Tracking) -> None:
    study = logged(tracking, BOOTS[0])
    tags = tracking.client.get_experiment(study.experiment_id).tags
    view = json.loads(tags[f"mlflow.sharedViewState.{study.registration_id[:12]}"])
    state = json.loads(view["state"])
    assert view["name"] == f"test {study.registration_id[:12]}"
    found = tracking.client.search_runs([study.experiment_id], state["searchFilter"], order_by=[state["orderByKey"]])
    assert [r.info.run_id for r in found] == [r.info.run_id for r in children(tracking, study)]
    named = [c.split("`")[1] for c in state["selectedColumns"] if c.startswith("params.")]
    assert named == ["apc", "invariant", "answers.short", "answers.long"]
    assert set(named) <= set(found[0].data.params)


def test_logging_a_boot_again_changes_nothing(tracking: Tracking) -> None:
    study = logged(tracking, BOOTS[0])
    before = children(tracking, study)
    assert tracking.log_boot(study, BOOTS[0], None) == before[0].info.run_id
    assert [r.to_dictionary() for r in children(tracking, study)] == [r.to_dictionary() for r in before]


def test_a_run_that_was_half_written_is_replaced(tracking: Tracking) -> None:
    study = logged(tracking, BOOTS[0])
    (half,) = children(tracking, study)
    tracking.client.update_run(half.info.run_id, status="RUNNING")
    again = tracking.log_boot(study, BOOTS[0], None)
    assert [r.info.run_id for r in children(tracking, study)] == [again] != [half.info.run_id]


def test_run_states_tell_how_boots_ended(tracking: Tracking) -> None:
    failed = build.failed(STUDY, "on/0", 0)
    states = {"failed": "FAILED", "stopped": "KILLED", "skipped": "FINISHED", "void": "FINISHED", "valid": "FINISHED"}
    for attempt, (status, state) in enumerate(states.items()):
        record = failed.record.model_copy(update={"status": status, "attempt": attempt, "boot_id": f"x/{status}"})
        study = logged(tracking, Boot(record=record, responses={}))
        run = next(r for r in children(tracking, study) if r.data.tags["d3.status"] == status)
        assert run.info.status == state


def test_many_prompts_fit_though_mlflow_takes_a_hundred_parameters_at_a_time(tracking: Tracking) -> None:
    many = build.registration(boots=1, prompts=[f"p{i}" for i in range(130)])
    study = tracking.open_study(many)
    tracking.log_boot(study, build.boots(many)[0], None)
    (run,) = children(tracking, study)
    assert len([p for p in run.data.params if p.startswith("prompt.")]) == 260  # token count and digest of each
    assert len(run.data.metrics) > 1000


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("boot.json", lambda t: t.replace('"position":0', '"position":1'), "boot.json does not have the digest"),
        ("boot.json", lambda t: t[:50], "boot.json: file: Invalid JSON"),
        (
            "responses.jsonl",
            lambda t: t.replace("one two", "two one"),
            "responses.jsonl does not hold the record's responses",
        ),
        ("responses.jsonl", lambda t: t.splitlines()[0] + "\n", "responses.jsonl does not hold the record's responses"),
        ("responses.jsonl", lambda t: t + "rubbish\n", "not JSON"),
        ("boot.json", None, "gives no boot.json"),
    ],
)
def test_a_changed_artifact_is_refused_by_name(tracking: Tracking, home: Home, name: str, damage, said: str) -> None:
    study = logged(tracking, BOOTS[0])
    (path,) = (home.runs / "artifacts").glob(f"*/artifacts/{name}")
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage(path.read_text()))
    with pytest.raises(D3Error) as error:
        tracking.boots(study)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_changed_registration_is_refused(tracking: Tracking, home: Home) -> None:
    study = tracking.open_study(STUDY)
    (path,) = (home.runs / "artifacts").glob("*/artifacts/registration.json")
    path.write_text(path.read_text().replace('"seed":1', '"seed":2'))
    with pytest.raises(D3Error, match="holds a registration of another id; its store was changed"):
        tracking.registration(study)


def test_a_study_has_one_parent_which_is_reopened(tracking: Tracking) -> None:
    study = tracking.open_study(STUDY)
    tracking.close_study(study, "KILLED")
    assert tracking.client.get_run(study.run_id).info.status == "KILLED"
    assert tracking.open_study(STUDY) == study
    assert tracking.client.get_run(study.run_id).info.status == "RUNNING"
    assert tracking.open_study(build.registration(boots=2)).run_id != study.run_id


def test_the_run_that_mlflow_run_opened_becomes_the_parent_once(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted = tracking.client.create_run("0").info.run_id  # `mlflow run` opens it in its own experiment
    monkeypatch.setenv("MLFLOW_RUN_ID", adopted)
    study = tracking.open_study(STUDY)
    assert (study.run_id, study.experiment_id) == (adopted, "0")
    assert Tracking().open_study(STUDY) == study
    tracking.log_boot(study, BOOTS[0], None)
    assert [r.info.experiment_id for r in children(tracking, study)] == ["0"]
    assert tracking.boots(study)[1] == [BOOTS[0]]
    monkeypatch.setenv("MLFLOW_RUN_ID", adopted)  # another command in the same shell
    assert tracking.open_study(build.registration(boots=2)).run_id != adopted


def test_a_new_store_is_filled_from_the_files_and_keeps_the_time_of_registration(
    home: Home, store: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = save_registration(STUDY)
    for boot in BOOTS:
        save_boot(boot, boot_dir(boot.record))
    assert sync() == sync() == 4
    study = Tracking().studies()[0]
    assert study.registered_at == at
    shutil.copy(empty_store, home.folder / "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home.folder}/other.db")
    assert sync() == 4
    other = Tracking()
    assert other.studies()[0].registered_at == at
    assert len(children(other, other.studies()[0])) == 4


def test_the_readmes_query_shows_the_answers_of_a_recorded_study_by_cell(
    store: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = TESTS / "data" / "recorded" / "flag_unavailable"
    study = load(Registration, recorded / "registration.json")
    shutil.copytree(recorded, home.runs / "studies" / study.id()[:12])
    assert sync() == 8
    (block,) = re.findall(r"^```python\n(.*?)^```$", (TESTS.parent / "README.md").read_text(), re.M | re.S)
    monkeypatch.chdir(home.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri())  # the block sets it for the whole process
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102
    assert names["by_cell"].size().to_dict() == {
        (study.study, "off", "0", "AAAAAAAA"): 2,
        (study.study, "on", "0", "ABBBBBAB"): 2,
    }


@pytest.mark.parametrize("folder", ["with space", "quo'te", "per%20cent", "ha#sh", "what?"])
def test_the_default_store_works_under_folders_of_any_name(
    home: Home, empty_store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = home.folder / folder
    runs.mkdir()
    shutil.copy(empty_store, runs / "mlflow.db")
    monkeypatch.setenv("D3_RUNS", str(runs))
    tracking = Tracking()
    study = logged(tracking, BOOTS[0])
    assert tracking.boots(study)[1] == [BOOTS[0]]
    assert list((runs / "artifacts").glob("*/artifacts/boot.json"))
    assert MlflowClient(tracking_uri()).get_run(study.run_id)


def test_a_store_that_is_down_is_one_line_within_seconds(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(D3Error, match="MLflow at http://127.* does not answer: .*python -m d3.sync") as error:
            Tracking()
    assert time.monotonic() - began < 15
    assert "\n" not in str(error.value)


def test_a_store_that_takes_the_call_and_says_nothing_is_given_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{mute.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(D3Error, match="does not answer: timed out; start it"):
            Tracking()
    assert time.monotonic() - began < 10


def test_a_runs_folder_that_cannot_be_is_one_line(home: Home) -> None:
    home.runs.write_text("a file")
    with pytest.raises(D3Error, match="does not answer: .*File exists"):
        Tracking()


def test_a_store_of_another_schema_is_one_line_with_its_remedy(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("update alembic_version set version_num = 'ffffffffffff'")
        connection.commit()
    with pytest.raises(D3Error, match="does not answer: Detected out-of-date database schema") as error:
        Tracking()
    assert "it is of another MLflow version: copy it, then mlflow db upgrade" in error.value.remedy
    assert "\n" not in str(error.value)


def test_a_password_in_the_stores_address_is_not_shown(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2hunter2@127.0.0.1:9/x")
    with pytest.raises(D3Error, match=r"MLflow at http://\[secret\]@127.0.0.1:9/x does not answer") as error:
        Tracking()
    assert "hunter2" not in str(error.value)


def test_a_store_that_is_no_store_is_one_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.runs.mkdir()
    (home.runs / "mlflow.db").write_text("this is no database")
    with pytest.raises(D3Error, match="MLflow at sqlite.* does not answer: ") as error:
        Tracking()
    assert "\n" not in str(error.value)
