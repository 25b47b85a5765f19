"""What differs around two certificates: the measured environment, and what was registered. Pure."""

from collections.abc import Mapping, Sequence

from d3.limits import Environment, flat
from d3.record import Frozen, canonical_json, sha256
from d3.registration import CellSpec, Registration
from d3.schema import Certificate

NOTHING = "not stated"
LONG = 60  # longer registered fields are shown by size and digest, longer pairs of texts by the words that differ
FOLLOWS = ("cells", "order")  # shown by the settings, and by what they follow from


class Fact(Frozen):
    """A named fact that is not the same on both sides, as text; several values on a side are joined by commas."""

    name: str
    old: str
    new: str


def environment_facts(old: Certificate, new: Certificate) -> tuple[Fact, ...]:
    """The facts of engine, machine and D3 that differ."""
    return _differing(_stated(old), _stated(new))


def registered_facts(old: Registration, new: Registration) -> tuple[Fact, ...]:
    """The registered fields and settings that differ, each once however many cells it is in; empty when none does."""
    if old.id() == new.id():
        return ()
    names = [f for f in Registration.model_fields if f not in FOLLOWS]
    fields = _differing({f: _brief(getattr(old, f)) for f in names}, {f: _brief(getattr(new, f)) for f in names})
    settings = _differing(_settings(old.cells), _settings(new.cells))
    found = (*fields, *settings)
    return found or tuple(
        Fact(name=f, old=_brief(getattr(old, f)), new=_brief(getattr(new, f)))
        for f in FOLLOWS
        if getattr(old, f) != getattr(new, f)
    )


def _stated(certificate: Certificate) -> Mapping[str, str]:
    environment: Environment = certificate.environment
    context = certificate.context
    own = {"d3.version": context.d3_version, "d3.commit": context.git_commit or NOTHING}
    return own | environment.common | {d.name: ", ".join(d.values) for d in environment.differing}


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Fact, ...]:
    found = []
    for name in sorted({*old, *new}):
        a, b = old.get(name, NOTHING), new.get(name, NOTHING)
        if a != b and min(len(a), len(b)) > LONG:  # two command lines: only the words that differ
            a, b = _own_words(a, b), _own_words(b, a)
        if a != b or old.get(name) != new.get(name):
            found.append(Fact(name=name, old=a, new=b))
    return tuple(found)


def _own_words(mine: str, other: str) -> str:
    theirs = {word.rstrip(",") for word in other.split()}
    own = dict.fromkeys(w.rstrip(",") for w in mine.split() if w.rstrip(",") not in theirs)
    return " ".join(own) or "the same words, fewer times or in another order"


def _brief(value: object) -> str:
    text = canonical_json(value)
    if len(text) <= LONG:
        return text.strip('"')
    size = f"{len(value)} of them, " if isinstance(value, tuple) else ""
    return f"{size}sha256 {sha256(text)[:8]}"


def _settings(cells: Sequence[CellSpec]) -> Mapping[str, str]:
    found: dict[str, set[str]] = {}
    for cell in cells:
        for name, value in flat("", cell.settings).items():
            found.setdefault(name, set()).add(value)
    return {name: ", ".join(sorted(values)) for name, values in found.items()}
