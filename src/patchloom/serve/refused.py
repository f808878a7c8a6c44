"""The exception that becomes an error response."""

from __future__ import annotations


class Refused(Exception):
    """A request that is refused: the HTTP status, a sentence for the client, and optionally seconds for Retry-After.

    Raised anywhere below a route, in a thread too: the handler in `app` turns it into the response.
    """

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = retry_after
