"""Cost and forecast: sums that agree with the clock, and no amount without a price or a measurement."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import build
from conftest import Home, grid
from d3.certificate import build as certified
from d3.certificate import load, write
from d3.certify import named_price
from d3.errors import D3Error
from d3.price import Price, cost, forecast, words
from d3.record import Boot, BootRecord
from d3.registration import STUDY_FACTORS
from d3.report.markdown import markdown
from d3.store import root
from d3.study import Pins, register
from d3.verify import verify

STUDY = build.registration(boots=2)
BOOTS = build.boots(STUDY)
NONE = Price(name="none", usd_per_hour=None, per="boot", gpu=None, dated="", source="")
L4 = Price(name="l4", usd_per_hour=3.6, per="boot", gpu="L4", dated="2026-05-07", source="a page")
SHARED = L4.model_copy(update={"per": "machine"})
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(record: BootRecord, start_s: float, total_s: float) -> BootRecord:
    timings = record.timings.model_copy(update={"total_s": total_s, "requests_s": total_s / 2})
    return record.model_copy(
        update={"started_at": (START + timedelta(seconds=start_s)).isoformat(), "timings": timings}
    )


def played(*spans: tuple[float, float]) -> list[BootRecord]:
    return [at(BOOTS[i % len(BOOTS)].record, *span) for i, span in enumerate(spans)]


def test_boots_side_by_side_share_a_machine_or_have_one_each() -> None:
    records = played((0, 100), (50, 100), (400, 50))
    each, one = cost(L4, records), cost(SHARED, records)
    assert (each.boot_s, each.wall_s, each.usd, each.usd_per_boot) == (250, 200, 0.25, 0.0833)
    assert (one.billed_s, one.usd) == (200, 0.2)
    assert cost(NONE, records).usd is None
    assert words(L4, each) == ("3 boots took 250 s in all, 200 s on the clock: $0.25 ($0.0833 a boot) at $3.6 per hour "
                               "and boot, price l4 of 2026-05-07, a page.")  # fmt: skip


def test_a_boot_that_was_skipped_costs_nothing_and_one_that_failed_does() -> None:
    records = played((0, 10), (20, 10))
    assert cost(L4, [records[0], records[1].model_copy(update={"status": "skipped"})]).boots == 1
    assert cost(L4, [records[0], records[1].model_copy(update={"status": "failed"})]).boots == 2


def test_seconds_on_a_gpu_are_those_of_boots_that_found_one() -> None:
    one, other = played((0, 10), (20, 30))
    other = other.model_copy(update={"environment": other.environment | {"gpu": "NVIDIA L4"}})
    assert cost(L4, [one, other]).gpu_s == 30 + (10 if "gpu" in one.environment else 0)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)), min_size=1, max_size=20))
def test_the_clock_counts_every_second_once(spans: list[tuple[int, int]]) -> None:
    found = cost(L4, played(*spans))
    seconds = {s for start, length in spans for s in range(start, start + length)}
    assert found.wall_s == len(seconds)
    assert found.wall_s <= found.boot_s == sum(length for _, length in spans)


def test_nothing_measured_forecasts_nothing() -> None:
    found = forecast(STUDY, [], [], L4, 1)
    assert (found.boots, found.basis, found.boot_s, found.wall_s, found.usd) == (8, 0, None, None, None)


def test_a_forecast_is_the_median_boot_of_what_is_left() -> None:
    # Half of a boot's 20 s is its start; the other half grows with the tokens asked for.
    earlier = played((0, 20))
    earlier = earlier * 3
    tokens = sum(r.n_tokens for r in earlier[0].requests)
    asked = STUDY.cells[0].settings["max_tokens"] * len(STUDY.prompts) * len(STUDY.protocol.phases)
    each = 10 + 10 * asked / tokens
    found = forecast(STUDY, [], earlier, L4, 2)
    assert found.boot_s == pytest.approx(8 * each)
    assert found.wall_s == pytest.approx(4 * each)
    assert found.usd == pytest.approx(8 * each * 3.6 / 3600)
    assert forecast(STUDY, [BOOTS[0].record], earlier, SHARED, 2).usd == pytest.approx(7 * each / 2 * 3.6 / 3600)


def with_price(boots: list[Boot], price: Price | None, folder: Path) -> Path:
    context = build.CONTEXT.model_copy(update={"price": price})
    return write(certified(STUDY, boots, context), boots, folder / "c.json")


def test_the_certificate_carries_the_cost_and_verify_recomputes_it(tmp_path: Path) -> None:
    path = with_price(BOOTS, L4, tmp_path)
    found = load(path)
    assert found.cost == cost(L4, [b.record for b in BOOTS])
    assert verify(path) == []
    assert f"Cost: {words(L4, found.cost)}" in markdown(found)  # type: ignore[arg-type]
    path.write_text(path.read_text().replace('"usd_per_hour": 3.6', '"usd_per_hour": 1.8'))
    assert [p for p in verify(path) if p.startswith("cost")]


def test_without_a_price_the_certificate_is_as_it_was(tmp_path: Path) -> None:
    text = with_price(BOOTS, None, tmp_path).read_text()
    assert '"cost":' not in text
    assert '"price":' not in text
    assert "Cost:" not in markdown(load(with_price(BOOTS, NONE, tmp_path)))


def test_prices_of_this_repository_have_a_date_and_a_source() -> None:
    names = [p.stem for p in (root() / "conf/price").glob("*.yaml")]
    assert {"none", "modal_l4"} <= set(names)
    for price in map(named_price, names):
        assert price.usd_per_hour is None or (datetime.fromisoformat(price.dated) and price.source)
    with pytest.raises(D3Error, match=r"there is no price/nope; known: modal_h100, modal_l4, none"):
        named_price("nope")


def test_a_home_without_records_has_no_forecast(home: Home) -> None:
    from d3.dry_run import dry_run

    study = register(grid("boots=2"), STUDY_FACTORS, Pins({"fake": ""}, {"fake-model": ""}))
    said = dry_run(study, NONE, 1)
    assert "to run: 8 of 8 boots" in said
    assert "time: no boot of this engine on this machine is recorded yet" in said
    assert "cost: no price" in said
    assert not home.runs.exists()
