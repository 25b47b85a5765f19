"""From a registration to what one boot is asked."""

import pytest
from omegaconf import OmegaConf

from conftest import Home, composed, grid
from d3.errors import D3Error
from d3.plan import Locations, boot_plan
from d3.record import BootPlan, canonical_json
from d3.registration import Registration
from d3.study import Pins, register

HERE = Locations(python="/here/python", model="/here/model")
PINS = Pins({"fake": "", "vllm_cpu": "l"}, {"fake-model": "f" * 64, "SmolLM2-135M-Instruct": "a" * 64})


@pytest.fixture
def study(home: Home) -> Registration:
    return register(grid("boots=2"), ("apc", "invariant"), PINS)


def first(study: Registration, attempt: int = 1) -> BootPlan:
    return boot_plan(study, study.order[0], attempt, HERE)


def test_a_plan_is_a_function_of_its_place_and_survives_json(study: Registration) -> None:
    plans = [boot_plan(study, slot, 1, HERE) for slot in study.order]
    assert plans == [boot_plan(study, slot, 1, HERE) for slot in study.order]
    assert [p.position for p in plans] == list(range(8))
    assert len({p.boot_id for p in plans} | {first(study, 2).boot_id}) == 9
    assert BootPlan.model_validate_json(canonical_json(plans[0])) == plans[0]


def test_each_factor_adds_its_own_words_to_the_command_line(study: Registration) -> None:
    for slot in study.order:
        plan = boot_plan(study, slot, 1, HERE)
        words = plan.launch.args
        assert words[:2] == ("--model", "/here/model")
        assert words[words.index("--apc") + 1] == plan.factors["apc"]
        assert words[words.index("--invariant") + 1] == plan.factors["invariant"]
        assert plan.launch.server[-1] == "{port}"


def test_requests_follow_the_protocol_prompt_by_prompt(study: Registration) -> None:
    requests = first(study).requests
    assert [r.index for r in requests] == list(range(16))
    assert (
        [r.phase for r in requests[:8]]
        == [r.phase for r in requests[8:]]
        == ["C1", "W1", "W2", "W3", "W4", "W5", "C2", "W6"]
    )
    assert [r.expect for r in requests[:8]] == ["cold", *["warm"] * 5, "cold", "warm"]
    salts = {(r.prompt, r.phase in {"C2", "W6"}): r.salt for r in requests}
    assert len(set(salts.values())) == 4
    assert all(r.salt == salts[r.prompt, r.phase in {"C2", "W6"}] for r in requests)


def test_every_cell_of_a_block_is_asked_the_same(study: Registration) -> None:
    for boot in (0, 1):
        assert len({boot_plan(study, s, 1, HERE).requests for s in study.order if s.boot == boot}) == 1


def test_the_seed_protocol_sends_no_salt(home: Home) -> None:
    requests = first(register([composed("protocol=seed")], (), PINS)).requests
    assert {r.salt for r in requests} == {None}
    assert [r.phase for r in requests][:6] == ["C1", "W1", "W2", "W3", "W4", "W5"]


def test_neighbours_and_a_warm_up_are_asked_for_when_configured(home: Home) -> None:
    plan = first(register([composed("concurrency=2", "warmup=true")], (), PINS))
    assert plan.warmup is not None
    assert plan.warmup.salt not in {r.salt for r in plan.requests}
    assert {len(r.neighbours) for r in plan.requests} == {2}
    assert first(register([composed()], (), PINS)).warmup is None


def test_a_plan_says_how_many_boots_share_its_device_only_where_the_study_does(home: Home) -> None:
    free, fixed = (first(register([composed(*words)], (), PINS)) for words in ((), ("at_once=4",)))
    assert (free.at_once, fixed.at_once) == (None, 4)
    assert '"at_once"' not in canonical_json(free)
    assert '"at_once":4' in canonical_json(fixed)


def test_a_way_to_start_is_registered_only_where_the_study_fixes_it(home: Home) -> None:
    free, fixed = (first(register([composed(*words)], (), PINS)) for words in ((), ("start=plain",)))
    assert (free.start, fixed.start) == (None, "plain")
    assert '"start":' not in canonical_json(free)
    assert '"start":"plain"' in canonical_json(fixed)
    assert BootPlan.model_validate_json(canonical_json(fixed)) == fixed


def test_top_level_settings_fill_the_places_in_words_and_environment(home: Home) -> None:
    study = register([composed("dtype=float32", "threads=1", "apc=off", "invariant=1", fake=False)], (), PINS)
    launch = first(study).launch
    assert {"--dtype=float32", "--no-enable-prefix-caching", "--enforce-eager", "--model=/here/model"} <= set(
        launch.args
    )
    assert launch.env["OMP_NUM_THREADS"] == "1"
    assert launch.env["D3_CPU_INVARIANT"] == "1"
    assert not [w for w in (*launch.args, *launch.env.values()) if "{" in w]


def test_a_level_that_the_engine_does_not_have_is_refused(home: Home) -> None:
    config = composed().copy()
    OmegaConf.set_struct(config, False)
    config.engine.factors.invariant.pop("0")
    with pytest.raises(D3Error, match="engine fake has no setting for invariant=0; its levels are: 1"):
        first(register([config], (), PINS))


def test_a_warmed_compile_cache_is_registered_and_has_a_folder_for_each_cell(home: Home) -> None:
    warmed = register(
        grid("boots=1", "compile_cache=warmed", "engine.distribution=vllm-cpu"), ("apc", "invariant"), PINS
    )
    here = HERE.model_copy(update={"caches": "/here/caches"})
    folders = [boot_plan(warmed, slot, 1, here).launch.compile_cache for slot in warmed.order]
    assert set(folders) == {f"/here/caches/base__apc-{a}_invariant-{i}" for a in ("on", "off") for i in (0, 1)}
    assert warmed.cells[0].settings["compile_cache"] == "warmed"


def test_without_one_the_study_is_the_same_as_before_there_was_the_key(home: Home) -> None:
    off = register(grid("boots=1", "compile_cache=off"), ("apc", "invariant"), PINS)
    assert "compile_cache" not in canonical_json(off)
    assert boot_plan(off, off.order[0], 1, HERE).launch.compile_cache is None
