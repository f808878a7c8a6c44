"""What the routes share: descriptions for OpenAPI, and how an upload is admitted, read and processed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request

from patchloom.serve.refused import Refused
from patchloom.serve.responses import ErrorResponse
from patchloom.serve.service import Gate, Service
from patchloom.serve.uploads import check_announced, read_upload

T = TypeVar("T")
_ERRORS = {
    400: "an invalid request",
    401: "the bearer token is missing or wrong",
    403: "not allowed",
    404: "no such model, sample or key",
    405: "no such method",
    408: "the upload was too slow",
    413: "too many bytes or pixels",
    415: "not an image of a known format",
    422: "a damaged image, or a parameter out of range",
    503: "busy or too slow: retry after Retry-After seconds",
}
UPLOAD_ERRORS = (400, 401, 403, 404, 408, 413, 415, 422, 503)


def errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of error responses."""
    return {code: {"model": ErrorResponse, "description": _ERRORS[code]} for code in codes}


def upload_body(several: bool = False) -> dict[str, Any]:
    """The OpenAPI description of the multipart body."""
    file: dict[str, Any] = {"type": "string", "format": "binary", "description": "an image"}
    if several:
        file = {"type": "array", "items": file, "minItems": 1, "description": "an image; repeat the part for several"}
    schema = {"type": "object", "required": ["file"], "properties": {"file": file}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


async def answer_upload(
    request: Request, service: Service, gate: Gate, work: Any, max_files: int = 1
) -> dict[str, Any]:
    """Admit a request, read its files and run `work`, with timings; the gate counts bytes as they arrive."""
    begun = time.perf_counter()
    # From the headers alone, before a byte of the body is read.
    check_announced(request, service.settings, max_files)
    with gate.admit() as place:
        files = await read_upload(request, service.settings, place.take, max_files)
        # Bytes were counted as they arrived; images count once they are complete.
        place.take(0, len(files))
        read = time.perf_counter()
        response = await unless_gone(request, work(files=files, place=place))
    for timed in (part["timings"] for part in (response, *response.get("results", ())) if "timings" in part):
        timed["upload_ms"] = round(1000 * (read - begun), 2)
        timed["total_ms"] = round(1000 * (time.perf_counter() - begun), 2)
    return response


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; if the client disconnects, work that has not started is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    # The server notices a closed connection only by reading from it.
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(400, "The client disconnected.")
        return working.result()
    finally:
        # Cancelling the future removes its work from the queues, unless a thread has begun it.
        working.cancel()
        watching.cancel()
