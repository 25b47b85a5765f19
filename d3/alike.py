"""Two certificates whose requests asked for different numbers of tokens, cut to what both asked for. Pure.

Greedy decoding does not know how many tokens will be asked for: the first 32 of 48 are what 32 would have been. Uncut,
a longer answer would part more often only because it has more places to part at.
"""

from d3.certificate import build
from d3.comparison import Side
from d3.record import ENDPOINTS, Boot, Endpoint, Frozen, RequestRecord, Response


def asked(side: Side) -> frozenset[int]:
    """How many tokens the requests of this certificate asked for, over all its cells."""
    return frozenset(int(cell.settings["max_tokens"]) for cell in side.certificate.registration.cells)


class Alike(Frozen):
    """Both sides as they may be compared, at which endpoints, and what was done to them, empty for nothing."""

    old: Side
    new: Side
    endpoints: tuple[Endpoint, ...]
    words: str


def alike(old: Side, new: Side) -> Alike:
    """Both sides as they are where they asked for the same numbers of tokens, else cut to the smallest number.

    Bytes cannot be compared then: where a token's text ends is the tokenizer's to say.
    """
    if asked(old) == asked(new):
        return Alike(old=old, new=new, endpoints=ENDPOINTS, words="")
    tokens = min(asked(old) | asked(new))
    words = (
        f"requests asked for {_numbers(old)} and {_numbers(new)} tokens: tokens and log-probabilities are compared "
        f"over the first {tokens} of every response, bytes not at all"
    )
    return Alike(old=cut(old, tokens), new=cut(new, tokens), endpoints=("tokens", "logprobs"), words=words)


def cut(side: Side, tokens: int) -> Side:
    """The same study as if its requests had asked for so many tokens; texts are empty, all is recounted."""
    boots = tuple(cut_boot(boot, tokens) for boot in side.boots)
    certificate = side.certificate
    return Side(certificate=build(certificate.registration, boots, certificate.context), boots=boots)


def cut_boot(boot: Boot, tokens: int) -> Boot:
    """The boot as if its requests had asked for so many tokens; its texts are empty."""
    shorter = {key: _response(response, tokens) for key, response in boot.responses.items()}
    requests = tuple(_request(request, shorter[request.response]) for request in boot.record.requests)
    return Boot(
        record=boot.record.model_copy(update={"requests": requests}),
        responses={response.key(): response for response in shorter.values()},
    )


def _response(response: Response, tokens: int) -> Response:
    return Response(
        text="",
        token_ids=response.token_ids[:tokens],
        logprobs=response.logprobs[:tokens],
        gaps=response.gaps[:tokens],
    )


def _request(request: RequestRecord, response: Response) -> RequestRecord:
    hashes = response.hashes()
    changes = {
        "n_tokens": len(response.token_ids),
        "text_sha256": hashes["text"],
        "tokens_sha256": hashes["tokens"],
        "logprobs_sha256": hashes["logprobs"],
        "response": response.key(),
    }
    return request.model_copy(update=changes)


def _numbers(side: Side) -> str:
    return ", ".join(str(n) for n in sorted(asked(side)))
