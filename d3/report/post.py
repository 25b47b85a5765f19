"""The draft of a comment on vLLM issue 40896, from certificates alone. D3 has no code that posts it. Pure."""

from collections.abc import Sequence

from d3.schema import Certificate


def post(certificates: Sequence[tuple[Certificate, str]]) -> str:
    """Draft."""
    return ""
