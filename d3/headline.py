"""A boot in a few numbers, the columns that MLflow compares runs by. Pure; the certificate does not use them."""

from d3.classify import of_prompt, pattern, unusable
from d3.divergence import diverge
from d3.record import ENDPOINTS, Boot, BootRecord
from d3.table import FIRST_DIFFERS

SECTION = "divergence/"


def headline(boot: Boot) -> dict[str, float]:
    """Metrics per prompt, in the section of MLflow's charts that comes first.

    `divergence/first_differs.PROMPT.ENDPOINT` 1 or 0; `divergence/distinct.PROMPT.ENDPOINT` the number of distinct
    responses; `divergence/token.PROMPT` the first token that differs cold to warm (absent when none does);
    `divergence/max_dlogprob.PROMPT` the largest difference of log-probabilities before it.
    """
    numbers: dict[str, float] = {}
    for prompt in dict.fromkeys(r.prompt for r in boot.record.requests):
        requests = of_prompt(boot.record, prompt)
        responses = [boot.responses[r.response] for r in requests]
        for endpoint in ENDPOINTS:
            if not unusable(endpoint, responses):
                numbers[f"{SECTION}first_differs.{prompt}.{endpoint}"] = float(
                    pattern(requests, endpoint) in FIRST_DIFFERS
                )
                numbers[f"{SECTION}distinct.{prompt}.{endpoint}"] = float(
                    len({r.endpoint_hash(endpoint) for r in requests})
                )
        parted = diverge(responses[0], responses[-1], 0.0)
        if parted.position is not None:
            numbers[f"{SECTION}token.{prompt}"] = float(parted.position)
        if parted.max_dlogprob is not None:
            numbers[f"{SECTION}max_dlogprob.{prompt}"] = parted.max_dlogprob
    return numbers


def params_of(record: BootRecord) -> dict[str, str]:
    """What a boot was: its factors and place, engine, model, prompts and machine, as text."""
    facts = record.engine.facts
    prompts = {f"prompt.{r.prompt}.tokens": str(r.prompt_tokens) for r in record.requests}
    prompts |= {f"prompt.{r.prompt}.sha256": r.prompt_sha256 for r in record.requests}
    return {
        **record.factors,
        "boot": str(record.boot),
        "attempt": str(record.attempt),
        "position": str(record.position),
        "protocol": record.protocol,
        "coldness": record.coldness,
        "engine": record.engine.name,
        "engine.transport": record.engine.transport,
        "engine.version_asked": record.engine.version_asked,
        "engine.version": facts.version or "not reported",
        "engine.backend": facts.attention_backend or "not reported",
        "engine.invariant_mode": facts.invariant_mode or "not reported",
        "engine.block_size": str(facts.block_size or "not reported"),
        "engine.prefix_caching": str(facts.prefix_caching),
        "model": record.model,
        "model.digest": record.model_digest,
        **prompts,
        **{f"env.{k}": v for k, v in {**record.environment, **facts.environment}.items()},
    }


def metrics_of(boot: Boot) -> dict[str, float]:
    """Seconds, cached tokens per request, and the headline numbers."""
    record = boot.record
    timings = {f"time/{k}": v for k, v in record.timings.model_dump().items()}
    cached = {
        f"prefix_cache/cached_tokens.{r.prompt}.{r.phase}": float(r.cached_tokens)
        for r in record.requests
        if r.cached_tokens is not None
    }
    return {**timings, **cached, **headline(boot)}
