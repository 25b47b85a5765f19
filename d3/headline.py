"""A boot in a few numbers, the columns that MLflow compares runs by. Pure; the certificate does not use them."""

from d3.classify import of_prompt, pattern, unusable
from d3.divergence import diverge
from d3.record import ENDPOINTS, Boot
from d3.table import FIRST_DIFFERS


def headline(boot: Boot) -> dict[str, float]:
    """Metrics per prompt.

    `first_differs.PROMPT.ENDPOINT` 1 or 0; `distinct.PROMPT.ENDPOINT` the number of distinct responses;
    `divergence_token.PROMPT` the first token that differs cold to warm (absent when none does);
    `max_dlogprob.PROMPT` the largest difference of log-probabilities before it.
    """
    numbers: dict[str, float] = {}
    for prompt in dict.fromkeys(r.prompt for r in boot.record.requests):
        requests = of_prompt(boot.record, prompt)
        responses = [boot.responses[r.response] for r in requests]
        for endpoint in ENDPOINTS:
            if not unusable(endpoint, responses):
                numbers[f"first_differs.{prompt}.{endpoint}"] = float(pattern(requests, endpoint) in FIRST_DIFFERS)
                numbers[f"distinct.{prompt}.{endpoint}"] = float(len({r.endpoint_hash(endpoint) for r in requests}))
        parted = diverge(responses[0], responses[-1], 0.0)
        if parted.position is not None:
            numbers[f"divergence_token.{prompt}"] = float(parted.position)
        if parted.max_dlogprob is not None:
            numbers[f"max_dlogprob.{prompt}"] = parted.max_dlogprob
    return numbers
