"""What a study costs: seconds out of boot records, times a dated price. Pure; context of a study, never registered."""

import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from d3.record import BootRecord, Frozen
from d3.registration import Registration

HOUR = 3600.0
TRIED = ("valid", "void", "failed", "stopped")  # a skipped boot used no machine


class Price(Frozen):
    """The price of a machine while it runs; None: no price, seconds only. `per` boot: each boot has one of its own."""

    name: str
    usd_per_hour: float | None
    per: Literal["boot", "machine"]
    gpu: str | None
    dated: str
    source: str


class Cost(Frozen):
    """What the boots took, in seconds, and what that costs in US dollars where there is a price.

    `boot_s`: all boots' seconds, summed; `gpu_s`: those of boots that found a GPU; `wall_s`: time in which at least one
    ran; `billed_s`: the one of them that the price is for; `usd_per_boot`: `usd` by the number of boots tried.
    """

    boots: int
    boot_s: float
    gpu_s: float
    wall_s: float
    billed_s: float
    usd: float | None
    usd_per_boot: float | None


class Forecast(Frozen):
    """What a study will take; None where nothing was measured yet. `basis`: how many boots it rests on."""

    boots: int
    requests: int
    basis: int
    boot_s: float | None
    wall_s: float | None
    usd: float | None


def cost(price: Price, records: Sequence[BootRecord]) -> Cost:
    """What these boots took and cost."""
    tried = [r for r in records if r.status in TRIED]
    boot_s = sum(r.timings.total_s for r in tried)
    gpu_s = sum(r.timings.total_s for r in tried if "gpu" in r.environment)
    wall_s = _covered([(datetime.fromisoformat(r.started_at).timestamp(), r.timings.total_s) for r in tried])
    billed_s = boot_s if price.per == "boot" else wall_s
    usd = None if price.usd_per_hour is None else round(price.usd_per_hour * billed_s / HOUR, 4)
    return Cost(
        boots=len(tried),
        boot_s=round(boot_s, 3),
        gpu_s=round(gpu_s, 3),
        wall_s=round(wall_s, 3),
        billed_s=round(billed_s, 3),
        usd=usd,
        usd_per_boot=None if usd is None or not tried else round(usd / len(tried), 4),
    )


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of spans, each its start and its length (seconds)."""
    total, until = 0.0, float("-inf")
    for start, length in sorted(spans):
        total += max(0.0, start + length - max(start, until))
        until = max(until, start + length)
    return total


def words(price: Price, cost: Cost) -> str:
    """The cost in one line."""
    seconds = f"{cost.boots} boots took {cost.boot_s:.0f} s in all, {cost.wall_s:.0f} s on the clock"
    if cost.gpu_s:
        seconds += f", {cost.gpu_s:.0f} GPU-seconds"
    if cost.usd is None:
        return f"{seconds}."
    each = "" if cost.usd_per_boot is None else f" (${cost.usd_per_boot:.4f} a boot)"
    return (f"{seconds}: ${cost.usd:.2f}{each} at ${price.usd_per_hour} per hour and {price.per}, price {price.name} "
            f"of {price.dated}, {price.source}.")  # fmt: skip


def forecast(
    registration: Registration, done: Sequence[BootRecord], earlier: Sequence[BootRecord], price: Price, at_once: int
) -> Forecast:
    """What is left of a study will take, by the median of earlier boots of its engines, their time by token apart.

    `done`: records of this study; their boots do not run again where valid. `earlier`: boots of the same engine on a
    machine like the one to come.
    """
    valid = {(r.stratum, r.cell, r.boot) for r in done if r.status == "valid"}
    slots = [s for s in registration.order if (s.stratum, s.cell, s.boot) not in valid]
    asked = len(registration.prompts) * len(registration.protocol.phases)
    basis = [r for r in earlier if r.status == "valid" and any(q.n_tokens for q in r.requests)]
    boot_s = wall_s = usd = None
    if basis:
        start_s = statistics.median(r.timings.total_s - r.timings.requests_s for r in basis)
        token_s = statistics.median(r.timings.requests_s / sum(q.n_tokens for q in r.requests) for r in basis)
        tokens = [asked * registration.cell(s.stratum, s.cell).settings["max_tokens"] for s in slots]
        boot_s = sum(start_s + token_s * n for n in tokens)
        wall_s = boot_s / at_once
        if price.usd_per_hour is not None:
            usd = price.usd_per_hour * (boot_s if price.per == "boot" else wall_s) / HOUR
    return Forecast(
        boots=len(slots), requests=asked * len(slots), basis=len(basis), boot_s=boot_s, wall_s=wall_s, usd=usd
    )
