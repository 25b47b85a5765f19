"""The certificate's models, its digest and its JSON Schema; `python -m d3.schema` prints the schema."""

import json
import sys

from pydantic import Field

from d3.contrasts import Contrast
from d3.controls import Control
from d3.limits import Environment
from d3.price import Cost, Price
from d3.record import Endpoint, Failure, Frozen, Status, Timings, canonical_json, sha256
from d3.registration import PriorArt, Registration
from d3.table import CellResult, Excluded, Flag
from d3.verdicts import Verdict

CERTIFICATE_VERSION = 1


class Context(Frozen):
    """What only the maker of a certificate knows: when it was registered, which runs hold the boots, which D3 ran.

    Times are ISO 8601 with an offset. `runs` maps a boot id to its tracking run. `price` is left out where it is None,
    so that certificates of before it was there stay as they are.
    """

    registered_at: str
    certified_at: str
    parent_run: str | None = None
    runs: dict[str, str] = Field(default_factory=dict)
    d3_version: str
    git_commit: str | None = None
    cost_usd: float | None = None
    price: Price | None = Field(default=None, exclude_if=lambda value: value is None)


class Artifact(Frozen):
    """A file beside the certificate, by its path inside the certificate's folder."""

    path: str
    sha256: str


class BootEntry(Frozen):
    """One boot, counted or not, and where its files are."""

    boot_id: str
    stratum: str
    cell: str
    boot: int
    attempt: int
    position: int
    status: Status
    reason: str
    counted: bool
    why_not: str
    coldness: str
    started_at: str
    timings: Timings
    failure: Failure | None
    leftovers: tuple[str, ...]
    run: str | None
    record: Artifact
    responses: Artifact


class Stratum(Frozen):
    """One table with its verdicts. `implementations`: which batch-invariant mode was in force, by the engine's word."""

    stratum: str
    role: str
    settings: dict[str, str]
    cells: tuple[CellResult, ...]
    flag: Flag
    implementations: tuple[str, ...]
    excluded: tuple[Excluded, ...]
    contrasts: tuple[Contrast, ...]
    verdicts: tuple[Verdict, ...]

    def verdict(self, endpoint: Endpoint) -> Verdict:
        """The verdict at this endpoint."""
        return next(v for v in self.verdicts if v.endpoint == endpoint)


class CheckSummary(Frozen):
    """One manipulation check over all boots: held in `held` of `total`, and every failure's evidence."""

    name: str
    held: int
    total: int
    failures: tuple[str, ...]


class Totals(Frozen):
    """Sums over all boots, counted or not; times in seconds."""

    boots: int
    counted: int
    requests: int
    boot_s: float
    requests_s: float
    stop_s: float
    total_s: float


class Certificate(Frozen):
    """Everything a stranger needs to check the verdict. `digest`: SHA-256 of the canonical JSON of all other fields."""

    schema_version: int = CERTIFICATE_VERSION
    answer: str
    registration_id: str
    registration: Registration
    context: Context
    first_boot_at: str | None
    boots: tuple[BootEntry, ...]
    strata: tuple[Stratum, ...]
    controls: tuple[Control, ...]
    checks: tuple[CheckSummary, ...]
    environment: Environment
    varied: tuple[str, ...]
    held: tuple[str, ...]
    neither: tuple[str, ...]
    coldness: dict[str, int]
    limits: tuple[str, ...]
    prior_art: tuple[PriorArt, ...]
    totals: Totals
    cost: Cost | None = Field(default=None, exclude_if=lambda value: value is None)
    digest: str


def digest(certificate: Certificate) -> str:
    """SHA-256 of the canonical JSON of every field but the digest itself."""
    return sha256(canonical_json(certificate.model_dump(mode="json", exclude={"digest"})))


def json_schema() -> str:
    """The JSON Schema of a certificate, as stored in certificate.schema.json."""
    return json.dumps(Certificate.model_json_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(json_schema())
