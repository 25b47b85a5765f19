"""A boot as MLflow's tables show it: its name, parameters and metrics. Pure; the certificate does not use them.

MLflow orders columns by name and charts metrics in the order in which they were logged, so names and order are chosen
for what a reader should see first: the answers, then the two factors, then whether the first request differs.
"""

from collections.abc import Iterable, Sequence

from d3.classify import of_prompt, pattern, unusable
from d3.divergence import diverge
from d3.record import ENDPOINTS, Boot, BootRecord, RequestRecord
from d3.table import FIRST_DIFFERS

SECTION = "divergence/"
ANSWERS = "answers."
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def run_name(record: BootRecord) -> str:
    """Cell and boot, and what is not as usual: a swept stratum, a later attempt, a boot that does not count."""
    parts = [record.cell, f"boot {record.boot}"]
    parts += [record.stratum] if record.stratum != "base" else []
    parts += [f"attempt {record.attempt}"] if record.attempt > 1 else []
    parts += [record.status] if record.status != "valid" else []
    return " · ".join(parts)


def answers(requests: Sequence[RequestRecord]) -> str:
    """One letter per request in the order of sending: `ABBBBBAB` is two texts, the first came back once.

    Where one text has several log-probabilities, numbers tell these apart: `A1A2A2`.
    """
    texts = list(dict.fromkeys(r.text_sha256 for r in requests))
    versions = {
        text: list(dict.fromkeys(r.logprobs_sha256 for r in requests if r.text_sha256 == text)) for text in texts
    }
    numbered = any(len(found) > 1 for found in versions.values())

    def sign(request: RequestRecord) -> str:
        place = texts.index(request.text_sha256)
        letter = LETTERS[place] if place < len(LETTERS) else f"({place + 1})"
        number = versions[request.text_sha256].index(request.logprobs_sha256) + 1
        return f"{letter}{number}" if numbered else letter

    return "".join(sign(r) for r in requests)


def headline(boot: Boot) -> dict[str, float]:
    """Metrics of what differed, in the section of MLflow's charts that comes first.

    `divergence/prompts_that_differ.ENDPOINT` the number of prompts whose first request differs;
    `divergence/first_differs.PROMPT.ENDPOINT` 1 or 0; `divergence/distinct.PROMPT.ENDPOINT` the number of distinct
    responses; `divergence/token.PROMPT` the first token that differs cold to warm (absent when none does);
    `divergence/max_dlogprob.PROMPT` the largest difference of log-probabilities before it.
    """
    totals: dict[str, float] = {}
    numbers: dict[str, float] = {}
    for prompt in _prompts(boot.record):
        requests = of_prompt(boot.record, prompt)
        responses = [boot.responses[r.response] for r in requests]
        for endpoint in ENDPOINTS:
            if not unusable(endpoint, responses):
                differs = float(pattern(requests, endpoint) in FIRST_DIFFERS)
                total = f"{SECTION}prompts_that_differ.{endpoint}"
                totals[total] = totals.get(total, 0.0) + differs
                numbers[f"{SECTION}first_differs.{prompt}.{endpoint}"] = differs
                numbers[f"{SECTION}distinct.{prompt}.{endpoint}"] = float(
                    len({r.endpoint_hash(endpoint) for r in requests})
                )
        parted = diverge(responses[0], responses[-1], 0.0)
        if parted.position is not None:
            numbers[f"{SECTION}token.{prompt}"] = float(parted.position)
        if parted.max_dlogprob is not None:
            numbers[f"{SECTION}max_dlogprob.{prompt}"] = parted.max_dlogprob
    return totals | numbers


def params_of(record: BootRecord) -> dict[str, str]:
    """What a boot was asked, what the engine reports, and which answers were alike, as text."""
    facts = record.engine.facts
    requests = {prompt: of_prompt(record, prompt) for prompt in _prompts(record)}
    return {
        **{f"{ANSWERS}{prompt}": answers(found) for prompt, found in requests.items()},
        **record.factors,
        "engine": record.engine.name,
        "engine.transport": record.engine.transport,
        "engine.version": record.engine.version_asked,
        "model": record.model,
        "model.digest": record.model_digest,
        **{f"prompt.{prompt}.tokens": str(found[0].prompt_tokens) for prompt, found in requests.items()},
        **{f"prompt.{prompt}.sha256": found[0].prompt_sha256 for prompt, found in requests.items()},
        "reported.version": facts.version or "not reported",
        "reported.backend": facts.attention_backend or "not reported",
        "reported.invariant_mode": facts.invariant_mode or "not reported",
        "reported.block_size": str(facts.block_size or "not reported"),
        "reported.prefix_caching": "not reported" if facts.prefix_caching is None else str(facts.prefix_caching),
        "run.boot": str(record.boot),
        "run.attempt": str(record.attempt),
        "run.position": str(record.position),
        "run.protocol": record.protocol,
        "run.coldness": record.coldness,
        **{f"env.{k}": v for k, v in {**record.environment, **facts.environment}.items()},
    }


def metrics_of(boot: Boot) -> dict[str, float]:
    """The headline numbers, cached tokens per request, and seconds."""
    record = boot.record
    cached = {
        f"prefix_cache/cached_tokens.{r.prompt}.{r.phase}": float(r.cached_tokens)
        for r in record.requests
        if r.cached_tokens is not None
    }
    return {**headline(boot), **cached, **{f"time/{k}": v for k, v in record.timings.model_dump().items()}}


def _prompts(record: BootRecord) -> Iterable[str]:
    """The prompts by name, so that every boot of a study has its columns in the same order."""
    return sorted({r.prompt for r in record.requests})
