"""One boot: may its answers count, and did the first request of each prompt differ from the rest? Pure."""

import math
from collections.abc import Sequence

from d3.errors import D3Error
from d3.record import ENDPOINTS, Boot, BootRecord, Endpoint, RequestRecord, Response
from d3.registration import Registration
from d3.table import Kind, Outcome


def classify(registration: Registration, boot: Boot) -> list[Outcome]:
    """The outcome of every registered prompt at every endpoint."""
    found = []
    for prompt in registration.prompts:
        requests = of_prompt(boot.record, prompt.id)
        void = void_reason(registration, boot.record, prompt.id)
        responses = [boot.responses[key] for key in dict.fromkeys(r.response for r in requests)]
        for endpoint in ENDPOINTS:
            why = void or unusable(endpoint, responses)
            found.append(
                Outcome(
                    boot_id=boot.record.boot_id,
                    stratum=boot.record.stratum,
                    cell=boot.record.cell,
                    prompt=prompt.id,
                    endpoint=endpoint,
                    kind="void" if why else _kind(boot.record, requests, endpoint),
                    why=why,
                    hashes={} if why else _hashes(requests, endpoint),
                )
            )
    return found


def of_prompt(record: BootRecord, prompt: str) -> list[RequestRecord]:
    """The requests of one prompt in the order in which they ran."""
    return sorted((r for r in record.requests if r.prompt == prompt), key=lambda r: r.index)


def _kind(record: BootRecord, requests: Sequence[RequestRecord], endpoint: Endpoint) -> Kind:
    """The pattern, but where D3 did not boot the engine its first request is not the first after a boot."""
    kind = pattern(requests, endpoint)
    return "unknown" if kind == "boot" and record.coldness == "none" else kind


def pattern(requests: Sequence[RequestRecord], endpoint: Endpoint) -> Kind:
    """Which request differs, from the expected cache states alone (PROTOCOL, request order inside a boot).

    `cache`: all cold ones are equal, all warm ones are, and the two differ. `unknown`: the same with only one cold
    request, so that cache and boot cannot be told apart. `boot`: the first differs from all others, a later cold one
    does not. Anything else that is not `agree` is `scattered`.
    """
    first, *rest = [r.endpoint_hash(endpoint) for r in requests]
    if {first}.issuperset(rest):
        return "agree"
    cold = [r.endpoint_hash(endpoint) for r in requests if r.expect == "cold"]
    warm = {r.endpoint_hash(endpoint) for r in requests if r.expect == "warm"}
    starts_cold = requests[0].expect == "cold"
    if starts_cold and len(set(cold)) == 1 and len(warm) == 1:
        return "cache" if len(cold) > 1 else "unknown"
    if starts_cold and len(cold) > 1 and len(set(rest)) == 1 and first not in rest:
        return "boot"
    return "scattered"


def void_reason(registration: Registration, record: BootRecord, prompt: str) -> str:
    """Why this boot cannot answer for this prompt at any endpoint; empty when it can."""
    failed = [c for c in record.checks if c.prompt == prompt and not c.held]
    if failed:
        return "; ".join(f"check {c.name} failed: {c.evidence}" for c in failed)
    requests = of_prompt(record, prompt)
    ran = [(r.phase, r.expect) for r in requests]
    wanted = [(p.name, p.expect) for p in registration.protocol.phases]
    if ran != wanted:
        return f"{len(ran)} of {len(wanted)} registered requests ran, or out of order: {' '.join(p for p, _ in ran)}"
    if len(ran) < 2:
        return "one request alone can show no difference"
    if len({r.prompt_sha256 for r in requests}) > 1:
        return "the engine did not get the same prompt in every request"
    return ""


def unusable(endpoint: Endpoint, responses: Sequence[Response]) -> str:
    """Why these responses cannot be compared at this endpoint; empty when they can."""
    return next((why for why in (_gap(endpoint, r) for r in responses) if why), "")


def _gap(endpoint: Endpoint, response: Response) -> str:
    tokens, logprobs = response.token_ids, response.logprobs
    if endpoint == "tokens" and response.text and not tokens:
        return "the engine reports no token ids"
    if endpoint == "logprobs":
        if not logprobs and (tokens or response.text):
            return "the engine reports no log-probabilities"
        if tokens and len(logprobs) != len(tokens):
            return f"log-probabilities for {len(logprobs)} of {len(tokens)} tokens"
        missing = [i for i, x in enumerate(logprobs) if x is None or not math.isfinite(x)]
        if missing:
            return f"a missing, NaN or infinite log-probability at token {missing[0]}"
    return ""


def _hashes(requests: Sequence[RequestRecord], endpoint: Endpoint) -> dict[str, frozenset[str]]:
    return {
        expect: frozenset(r.endpoint_hash(endpoint) for r in requests if r.expect == expect)
        for expect in ("cold", "warm")
    }


def why_not_counted(registration: Registration, record: BootRecord) -> str:
    """Why a boot's answers do not count, whatever other attempts there are; empty when they do."""
    if record.status != "valid":
        return f"{record.status}: {record.reason}" if record.reason else record.status
    if why := _too_warm(registration, record):
        return why
    failed = [c for c in record.checks if c.prompt is None and not c.held]
    if failed:
        return "; ".join(f"check {c.name} failed: {c.evidence}" for c in failed)
    if all(void_reason(registration, record, p.id) for p in registration.prompts):
        return "every prompt of the boot is void"
    return ""


def _too_warm(registration: Registration, record: BootRecord) -> str:
    """Why a boot was not cold enough for its study; empty when it was."""
    if record.coldness == "L3":
        return "a restored snapshot is never evidence"
    if (record.coldness == "L2") != (record.start == "fork"):
        return f"coldness {record.coldness} is not that of a start by {record.start}"
    asked = registration.cell(record.stratum, record.cell).settings.get("start")
    if record.coldness == "L2" and asked != "fork":
        return "a fork of a process that had imported (coldness L2) counts only where start=fork is registered"
    return ""


def check_boot(registration: Registration, boot: Boot) -> None:
    """Raises D3Error where a boot is none of this study's, or its record and responses do not fit together."""
    record = boot.record
    name = f"boot {record.boot_id}"
    try:
        spec = registration.cell(record.stratum, record.cell)
    except KeyError:
        raise D3Error(f"{name}: its cell ({record.stratum} {record.cell}) is not registered") from None
    if record.factors != spec.factors:
        raise D3Error(f"{name}: factors {record.factors} are not those registered for its cell, {spec.factors}")
    if not 0 <= record.boot < registration.boots:
        raise D3Error(f"{name}: boot {record.boot} is not one of the {registration.boots} registered")
    if record.protocol != registration.protocol.name:
        raise D3Error(f"{name}: protocol {record.protocol}, registered is {registration.protocol.name}")
    known = {p.id for p in registration.prompts}
    hashes = {key: (response.key(), response.hashes()) for key, response in boot.responses.items()}
    for r in record.requests:
        where = f"{name}: request {r.index} ({r.prompt} {r.phase})"
        if r.prompt not in known:
            raise D3Error(f"{where}: the prompt is not registered")
        if r.response not in boot.responses:
            raise D3Error(f"{where}: its response {r.response[:12]} is missing")
        key, own = hashes[r.response]
        if key != r.response:
            raise D3Error(f"{where}: response {r.response[:12]} has other content")
        for endpoint, value in own.items():
            if r.endpoint_hash(endpoint) != value:
                raise D3Error(f"{where}: the recorded {endpoint} hash is not that of its response")
    extra = set(boot.responses) - {r.response for r in record.requests}
    if extra:
        raise D3Error(f"{name}: response {min(extra)[:12]} belongs to no request")
