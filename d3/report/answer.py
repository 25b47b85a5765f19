"""The answer in plain words, for a reader who knows neither caches nor statistics. Pure.

The certificate's own answer stays the registered wording; this one says the same without the field's terms.
"""

from collections.abc import Callable, Sequence

from d3.limits import OWN_MODE
from d3.readings import UNEXPLAINED
from d3.record import Endpoint, Frozen
from d3.report.tables import counts_of
from d3.schema import Certificate, Stratum
from d3.table import CellResult, State

FEW = 4  # 3 of 3 against 0 of 3 has p = 0.1 by Fisher's exact test, 4 of 4 against 0 of 4 has 0.03
FIRST: dict[Endpoint, str] = {
    "text": "the first answer",
    "tokens": "the tokens of the first answer",
    "logprobs": "the log-probabilities of the first answer",
}
ANY: dict[Endpoint, str] = {"text": "answers", "tokens": "tokens", "logprobs": "log-probabilities"}
SETTING = {
    "on/0": "with the cache on and the batch-invariant mode off",
    "on/1": "with the cache and the batch-invariant mode on",
    "off/0": "with the cache and the batch-invariant mode off",
    "off/1": "with the cache off and the batch-invariant mode on",
}


class PlainAnswer(Frozen):
    """What one stratum says, in plain words, and its disposition for bytes."""

    stratum: str
    disposition: str
    words: str


class _Seen(Frozen):
    """A stratum at one endpoint."""

    stratum: Stratum
    endpoint: Endpoint

    def cell(self, key: str) -> CellResult | None:
        return next((c for c in self.stratum.cells if c.key == key), None)

    def state(self, key: str) -> State:
        cell = self.cell(key)
        return cell.state(self.endpoint).state if cell else "absent"

    def differed(self, key: str) -> str:
        """With how many prompts, and in how many boots of each, answers differed in this cell."""
        cell = self.cell(key)
        counts = [counts_of(p, self.endpoint) for p in cell.prompts] if cell else []
        usable = [c for c in counts if c.n]
        moved = [c for c in usable if c.k + c.scattered]
        if not moved:
            return f"in 0 of {min((c.n for c in usable), default=0)} boots"
        boots = " or ".join(sorted({f"{c.k + c.scattered} of {c.n}" for c in moved}))
        prompts = f"for {len(moved)} of {len(usable)} prompts " if len(usable) > 1 else ""
        return f"{prompts}in {boots} boots"

    def mode(self) -> str:
        """The batch-invariant mode; one that is D3's own must not be taken for the engine's flag."""
        own = next((m for m in self.stratum.implementations if m.startswith(OWN_MODE)), None)
        return f"the batch-invariant mode (here {own}, not vLLM's own flag)" if own else "the batch-invariant mode"

    def first(self) -> str:
        """What happens with the mode off. The cold cache is named only where the cell without a cache agrees."""
        if self.state("on/0") == "agrees":
            return f"repeats gave the same {ANY[self.endpoint]} with the batch-invariant mode off"
        if self.state("on/0") == "diverges":
            cold = " after a cold cache" if self.state("off/0") == "agrees" else ""
            return f"{FIRST[self.endpoint]}{cold} can differ from later ones (seen {self.differed('on/0')})"
        if self.state("on/0") == "scattered":
            return (
                f"{ANY[self.endpoint]} to the same prompt can differ in no regular way (seen {self.differed('on/0')})"
            )
        return "the cache was not measured with the batch-invariant mode off"


def answers(certificate: Certificate) -> tuple[PlainAnswer, ...]:
    """One answer per stratum that was not sampled on purpose; all of them where every one was."""
    study = [s for s in certificate.strata if s.role == "study"] or list(certificate.strata)
    found = []
    for stratum in study:
        where = f"With {stratum.stratum}, " if len(study) > 1 else "On this engine, "
        words = where + plain(stratum, "text")
        if stratum.verdict("logprobs").reading != stratum.verdict("text").reading:
            words += f" The numbers behind the answers read otherwise: {plain(stratum, 'logprobs')}"
        disposition = stratum.verdict("text").disposition
        found.append(PlainAnswer(stratum=stratum.stratum, disposition=disposition, words=words))
    return tuple(found)


def plain(stratum: Stratum, endpoint: Endpoint) -> str:
    """The verdict of one stratum and endpoint in plain words, to be read after `On this engine, `.

    A reading that is not one of D3's own is given in its registered words.
    """
    verdict = stratum.verdict(endpoint)
    words = READINGS.get(verdict.reading)
    return words(_Seen(stratum=stratum, endpoint=endpoint)) if words else f"by the registered reading: {verdict.answer}"


def cautions(certificate: Certificate) -> list[str]:
    """What a reader must know before using the answer: failed controls, and a study too small to tell."""
    found = [
        f"The {c.kind} control ({c.stratum}) failed, so do not rely on this: {c.words}."
        for c in certificate.controls
        if c.held is False
    ]
    if certificate.registration.boots < FEW:
        found.append(f"A quick look: with fewer than {FEW} boots per cell no contrast can be told from chance.")
    return found


def _void(seen: _Seen) -> str:
    whys = [f"{c.key}: {c.state(seen.endpoint).why}" for c in seen.stratum.cells if seen.state(c.key) == "void"]
    return f"there is no answer yet: too little of what was planned could be measured ({'; '.join(whys)})."


def _boot_state(seen: _Seen) -> str:
    without = [k for k in ("off/0", "off/1") if seen.state(k) in {"diverges", "boot_state", "scattered"}]
    if without:
        where = " and ".join(f"{SETTING[k]} {seen.differed(k)}" for k in without)
        return (
            f"{ANY[seen.endpoint]} to the same prompt can differ without the prefix cache too, so the cache is not the"
            f" cause. Seen {where}."
        )
    moved = [k for k in ("on/0", "on/1") if seen.state(k) == "boot_state"]
    where = " and ".join(f"{SETTING[k]} {seen.differed(k)}" for k in moved)
    return (
        f"only {FIRST[seen.endpoint]} after a start can differ, and a later one with a cold cache does not, so the"
        f" start of the engine is the cause and not the cache. Seen {where}."
    )


def _unavailable(seen: _Seen) -> str:
    return f"{seen.first()}; whether the batch-invariant mode stops it is open: the engine does not run with it here."


def _inert(seen: _Seen) -> str:
    return (
        f"{seen.first()}; whether the batch-invariant mode stops it is open: switched on, it changed no number at all,"
        " so it was not tested."
    )


def _closed(seen: _Seen) -> str:
    return _with_the_mode(seen, "stops it")


def _gap(seen: _Seen) -> str:
    return _with_the_mode(seen, "does not stop it")


def _with_the_mode(seen: _Seen, effect: str) -> str:
    return (
        f"{FIRST[seen.endpoint]} after a cold cache can differ from later ones; switching on {seen.mode()} {effect}."
        f" Seen without the mode {seen.differed('on/0')}, with it {seen.differed('on/1')}."
    )


def _none(seen: _Seen) -> str:
    counts = [counts_of(p, seen.endpoint) for c in seen.stratum.cells for p in c.prompts]
    n = min((c.n for c in counts if c.n), default=0)
    bound = max((c.null_bound for c in counts if c.n and c.null_bound is not None), default=1.0)
    return (
        f"repeats of a prompt always gave the same {ANY[seen.endpoint]} within a boot, in every setting that was run."
        f" With {n} boot{'s' * (n != 1)} per setting, a true rate of up to {bound:.0%} could still go unseen."
    )


def _unexplained(seen: _Seen) -> str:
    told: dict[State, str] = {
        "diverges": f"{FIRST[seen.endpoint]} differed from later ones",
        "boot_state": f"only {FIRST[seen.endpoint]} after a start differed",
        "scattered": f"{ANY[seen.endpoint]} differed in no regular way",
    }
    keys = [c.key for c in seen.stratum.cells]
    moved = [k for k in keys if seen.state(k) in told]
    calm = [k for k in keys if seen.state(k) == "agrees"]
    lost = [k for k in keys if k not in moved and k not in calm]
    parts = [f"{told[seen.state(k)]} {SETTING.get(k, k)} ({seen.differed(k)})" for k in moved]
    parts += [_rest(calm, moved)] if calm else []
    parts += [f"nothing could be measured {_or(lost)}"] if lost else []
    only = "; no other setting was run" if len(keys) == 1 else ""
    return f"what was seen fits none of the explanations written down beforehand: {', and '.join(parts)}{only}."


def _rest(calm: Sequence[str], moved: Sequence[str]) -> str:
    return "nothing differed in the other settings" if moved and len(calm) > 1 else f"nothing differed {_or(calm)}"


def _or(keys: Sequence[str]) -> str:
    return " or ".join(SETTING.get(k, k) for k in keys)


READINGS: dict[str, Callable[[_Seen], str]] = {
    "void": _void,
    "boot_state": _boot_state,
    "flag_unavailable": _unavailable,
    "flag_inert": _inert,
    "closed_by_flag": _closed,
    "open_gap": _gap,
    "none": _none,
    UNEXPLAINED: _unexplained,
}
