"""Registrations and boots for tests, small and readable: a prompt's responses are one letter per request.

`CACHE = "abbbbbab"` is C1 W1 W2 W3 W4 W5 C2 W6 with response a when cold and b when warm.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from d3.certificate import Context, build, write
from d3.record import (
    Boot,
    BootRecord,
    Check,
    EngineFacts,
    EngineRecord,
    Failure,
    RequestRecord,
    Response,
    Timings,
    sha256,
)
from d3.registration import (
    CellSpec,
    Message,
    Phase,
    PriorArt,
    Prompt,
    Protocol,
    ReadingSpec,
    Registration,
    block_order,
    cell_name,
    short,
    stratum_name,
)
from d3.schema import CERTIFICATE_VERSION
from d3.store import boot_slug

CONF = Path(__file__).parent.parent / "conf"
FOUR = ("on/0", "off/0", "on/1", "off/1")

AGREE, CACHE, BOOT, SCATTERED = "aaaaaaaa", "abbbbbab", "abbbbbbb", "abcabcab"
SEED_AGREE, SEED_FIRST = "aaaaaa", "abbbbb"

CONTEXT = Context(
    registered_at="2026-01-31T12:00:00+00:00",
    certified_at="2026-01-31T14:00:00+00:00",
    parent_run="parent",
    d3_version="0.1.0",
    git_commit="0" * 40,
)


def conf(path: str) -> Any:
    return yaml.safe_load((CONF / path).read_text())


READINGS = tuple(ReadingSpec.model_validate(r) for r in conf("readings/d3.yaml")["items"])


def protocol(name: str = "controlled") -> Protocol:
    found = conf(f"protocol/{name}.yaml")
    return Protocol(name=name, salted=found["salted"], phases=tuple(Phase(**p) for p in found["phases"]))


def cell_spec(key: str, stratum: Mapping[str, str], settings: Mapping[str, Any]) -> CellSpec:
    apc, invariant = key.split("/")
    factors = {"apc": apc, "invariant": invariant, **stratum}
    own = {"temperature": 0.0, "concurrency": 0, "max_tokens": 48, "dtype": "bfloat16", **settings, **stratum}
    return CellSpec(cell=cell_name(factors), stratum=stratum_name(factors), factors=factors, settings=own)


def registration(
    cells: Sequence[str] = FOUR,
    *,
    boots: int = 6,
    least: int | None = None,
    prompts: Sequence[str] = ("short", "long"),
    protocol_name: str = "controlled",
    strata: Sequence[Mapping[str, str]] = ({},),
    **settings: Any,
) -> Registration:
    specs = tuple(cell_spec(key, stratum, settings) for stratum in strata for key in cells)
    return Registration(
        study="test",
        question="Does the first request differ?",
        axes={k: tuple(dict.fromkeys(c.factors[k] for c in specs)) for k in specs[0].factors},
        boots=boots,
        min_valid_boots=boots if least is None else least,
        max_attempts=2,
        seed=1,
        protocol=protocol(protocol_name),
        prompts=tuple(Prompt(id=p, messages=(Message(role="user", content=f"A {p} prompt."),)) for p in prompts),
        tie_gap=0.25,
        confidence=0.95,
        test="fisher",
        readings=READINGS,
        prior_art_searched="2026-01-01",
        prior_art=(PriorArt(source="vLLM issue 40896", says="the symptom"),),
        cells=specs,
        order=block_order([(c.stratum, c.cell) for c in specs], boots, 1),
    )


def response(letter: str, invariant: str = "0", **changed: Any) -> Response:
    """Four tokens, of which the last is the letter's; the flag moves log-probabilities and no token."""
    shift = 0.001 * int(invariant)
    moved = 0.01 * (ord(letter) - ord("a"))
    plain = {
        "text": f"one two three {letter}",
        "token_ids": (1, 2, 3, ord(letter)),
        "logprobs": (-0.1 - shift, -0.2 - shift, -0.3 - shift - moved, -0.4 - shift),
        "gaps": (2.0, 1.5, 1.0, 0.125),
    }
    return Response.model_validate({**plain, **changed})


def boot(
    study: Registration,
    key: str,
    index: int,
    answers: Mapping[str, str],
    *,
    attempt: int = 1,
    stratum: str | None = None,
    letters: Mapping[str, Response] | None = None,
    void: Mapping[str, str] | None = None,
    **changed: Any,
) -> Boot:
    """One valid boot. `answers`: the letters of each prompt; `letters`: other responses for some letters;
    `void`: prompts whose cache check failed, with the evidence; `changed`: fields of the record."""
    apc, invariant = key.split("/")
    own = [c for c in study.cells if c.stratum == (stratum or study.cells[0].stratum)]
    spec = next(c for c in own if (c.factors["apc"], c.factors["invariant"]) == (apc, invariant))
    responses: dict[str, Response] = {}
    requests: list[RequestRecord] = []
    for prompt, script in answers.items():
        for letter, phase in zip(script, study.protocol.phases, strict=False):
            one = (letters or {}).get(letter) or response(letter, invariant)
            responses[one.key()] = one
            requests.append(_request(len(requests), prompt, phase, apc, one))
    checks = [Check(name="pin", held=True, evidence="version 1.0 asked and reported")]
    for prompt in answers:
        evidence = (void or {}).get(prompt)
        checks.append(Check(name="cache", held=evidence is None, evidence=evidence or "as expected", prompt=prompt))
    name = boot_slug(spec.stratum, spec.cell, index, attempt)
    record = BootRecord(
        registration=study.id(),
        boot_id=f"{short(study.id())}/{name}",
        cell=spec.cell,
        stratum=spec.stratum,
        factors=spec.factors,
        boot=index,
        attempt=attempt,
        position=index,
        protocol=study.protocol.name,
        coldness="L1",
        engine=EngineRecord(
            name="tiny",
            transport="worker",
            version_asked="1.0",
            facts=EngineFacts(
                version="1.0",
                block_size=16,
                prefix_caching=apc == "on",
                attention_backend="CPU_ATTN",
                dtype="bfloat16",
                device="cpu",
                invariant_mode="off" if invariant == "0" else "vLLM's flag",
            ),
            command=("python", "worker.py"),
            env={},
        ),
        model="tiny-model",
        model_digest=sha256("tiny-model"),
        environment={"cpu": "a processor", "cores": "2"},
        started_at=f"2026-01-31T13:{index:02d}:00+00:00",
        timings=Timings(boot_s=2.0, requests_s=1.0, stop_s=0.5, total_s=3.5),
        requests=tuple(requests),
        checks=tuple(checks),
        status="valid",
        reason="",
    )
    return Boot(record=record.model_copy(update=changed), responses=responses)


LENGTHS = {"short": 24, "long": 240}


def _request(index: int, prompt: str, phase: Phase, apc: str, answer: Response) -> RequestRecord:
    tokens = LENGTHS.get(prompt, 100)
    hit = (tokens - 1) // 16 * 16
    hashes = answer.hashes()
    return RequestRecord(
        index=index,
        prompt=prompt,
        phase=phase.name,
        expect=phase.expect,
        salt=None,
        prompt_tokens=tokens,
        prompt_sha256=sha256(prompt),
        cached_tokens=hit if apc == "on" and phase.expect == "warm" else 0,
        expected_cached=hit,
        finish_reason="length",
        n_tokens=len(answer.token_ids),
        text_sha256=hashes["text"],
        tokens_sha256=hashes["tokens"],
        logprobs_sha256=hashes["logprobs"],
        response=answer.key(),
        latency_s=0.1,
        running=1,
    )


Answers = Mapping[str, Mapping[str, str]]


def boots(
    study: Registration, cells: Answers | None = None, *, stratum: str | None = None, **changed: Any
) -> list[Boot]:
    """All boots of a stratum; prompts that `cells` does not name agree in every request."""
    calm = "a" * len(study.protocol.phases)
    name = stratum or study.cells[0].stratum
    keys = [f"{c.factors['apc']}/{c.factors['invariant']}" for c in study.cells if c.stratum == name]
    answers = {k: {p.id: (cells or {}).get(k, {}).get(p.id, calm) for p in study.prompts} for k in keys}
    return [boot(study, k, i, answers[k], stratum=name, **changed) for i in range(study.boots) for k in keys]


def failed(
    study: Registration, key: str, index: int, *, kind: str = "engine_error", line: str = "Error: no", **more: Any
) -> Boot:
    """A boot that gave no answer."""
    failure = Failure.model_validate({"stage": "boot", "kind": kind, "line": line})
    status = {"skipped": "skipped", "interrupted": "stopped"}.get(kind, "failed")
    return boot(study, key, index, {}, status=status, reason=f"boot: {line}", failure=failure, checks=(), **more)


def seed_study() -> tuple[Registration, list[Boot]]:
    """The seed's own study: 24 boots, two prompts, six requests each; only the short prompt moves, in on/0 alone."""
    study = registration(protocol_name="seed")
    return study, boots(study, {"on/0": {"short": SEED_FIRST}})


def small_study() -> tuple[Registration, list[Boot]]:
    """The committed certificate's study: one boot per cell, one of them at the second attempt."""
    study = registration(boots=1, prompts=("short",), protocol_name="seed")
    found = boots(study, {"on/0": {"short": SEED_FIRST}})
    first = failed(study, "off/0", 0, kind="timeout", line="no answer within 60 s")
    found[1] = boot(study, "off/0", 0, {"short": SEED_AGREE}, attempt=2, started_at="2026-01-31T13:30:00+00:00")
    return study, [*found, first]


def main() -> None:
    """Write the certificate of the current schema version under tests/data (older versions stay as they are)."""
    study, found = small_study()
    out = Path(__file__).parent / "data" / f"certificate_v{CERTIFICATE_VERSION}.json"
    write(build(study, found, CONTEXT), found, out)


if __name__ == "__main__":
    main()
