"""`dry_run=true`: the grid, the order of boots, the time and the cost that are to be expected; nothing is written."""

from collections.abc import Iterator, Sequence

from d3.machine import machine
from d3.price import Forecast, Price, forecast
from d3.record import BootRecord
from d3.registration import Registration, short
from d3.store import RECORD, load, runs_dir

SHOWN = 48  # boots of the order that are printed; the rest is counted


def dry_run(registration: Registration, price: Price, at_once: int) -> str:
    """What would run, in lines for people."""
    records = [load(BootRecord, path) for path in sorted(runs_dir().glob(f"studies/*/boots/*/{RECORD}"))]
    done = [r for r in records if r.registration == registration.id()]
    found = forecast(registration, done, _alike(registration, records, price, at_once), price, at_once)
    return "\n".join([*_grid(registration, found), *_order(registration), *_expected(found, price, at_once)])


def _alike(
    registration: Registration, records: Sequence[BootRecord], price: Price, at_once: int
) -> Sequence[BootRecord]:
    """Earlier boots of the same engines on the machine that the price names, else on this one.

    Boots that share a machine slow each other down: where some ran as many at once as planned, only those count.
    """
    engines = {(c.settings["engine"]["name"], c.settings["engine"]["version"]) for c in registration.cells}
    here = machine()["cpu"]
    same = [
        r
        for r in records
        if (r.engine.name, r.engine.version_asked) in engines
        and (price.gpu in r.environment.get("gpu", "") if price.gpu else r.environment.get("cpu") == here)
    ]
    return [r for r in same if r.environment.get("boots_at_once") == str(at_once)] or same


def _grid(registration: Registration, found: Forecast) -> Iterator[str]:
    yield f"dry run of {registration.study}, registration {short(registration.id())}; nothing is registered or run"
    yield f"grid: {len(registration.cells)} cells x {registration.boots} boots"
    yield from (f"  {c.stratum}: {c.cell}" for c in registration.cells)
    yield f"to run: {found.boots} of {len(registration.order)} boots, {found.requests} requests"


def _order(registration: Registration) -> Iterator[str]:
    yield "order of boots:"
    yield from (
        f"  {i:3d} boot {s.boot} {s.stratum} {s.cell}" for i, s in enumerate(registration.order[:SHOWN], start=1)
    )
    if len(registration.order) > SHOWN:
        yield f"  and {len(registration.order) - SHOWN} more"


def _expected(found: Forecast, price: Price, at_once: int) -> Iterator[str]:
    where = f"a machine with {price.gpu}" if price.gpu else "this machine"
    if found.boot_s is None or found.wall_s is None:
        yield f"time: no boot of this engine on {where} is recorded yet, so none can be said; boots=1 measures it"
    else:
        each = found.boot_s / max(1, found.boots)
        yield (f"time: about {_span(found.wall_s)}, {at_once} at once ({each:.0f} s a boot, "
               f"by {found.basis} earlier boots of this engine on {where})")  # fmt: skip
    if price.usd_per_hour is None:
        yield "cost: no price; price=NAME gives one, see conf/price"
    else:
        amount = "unknown without a time" if found.usd is None else f"about ${found.usd:.2f}"
        yield (f"cost: {amount} at ${price.usd_per_hour} per hour and {price.per}, price {price.name} of "
               f"{price.dated}, {price.source}")  # fmt: skip


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
