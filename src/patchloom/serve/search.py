"""Search over HTTP: the neighbours of an upload or of an image in the index, and small pictures of them."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from PIL import Image

from patchloom.errors import PatchloomError
from patchloom.serve.images import check_header, decode_upload, decoding_cost
from patchloom.serve.indexes import HostedIndex
from patchloom.serve.refused import Refused
from patchloom.serve.responses import SearchResponse
from patchloom.serve.routes import UPLOAD_ERRORS, answer_upload, errors, unless_gone, upload_body
from patchloom.serve.service import Place, Service, timings, within

SIDE = 256  # pixels of a small picture
_K = Annotated[int, Query(ge=1, le=100, description="number of neighbours")]
_Condition = Annotated[
    str, Query(max_length=400, description="none, coarse, or oracle=NAME for images of this class first")
]
_Key = Annotated[str, Query(max_length=4096, description="the key of an image in the index")]


def add_search(app: FastAPI, service: Service) -> None:
    """The routes of a service with an index."""

    @app.post(
        "/api/search",
        response_model=SearchResponse,
        responses=errors(*UPLOAD_ERRORS),
        openapi_extra=upload_body(),
        summary="Find the images of the index that are most similar to an image",
    )
    async def search(request: Request, k: _K = 10, condition: _Condition = "none") -> dict[str, Any]:
        hosted = hosted_index(service)
        hosted.check(condition)  # before the upload: a client should not send megabytes only to be refused
        work = partial(search_upload, service, hosted, k=k, condition=condition)
        return await answer_upload(request, service, service.predicting, work)

    @app.post(
        "/api/search/key",
        response_model=SearchResponse,
        responses=errors(400, 401, 403, 404, 422, 503),
        summary="Find the images that are most similar to an image of the index, which is left out itself",
    )
    async def search_key(request: Request, key: _Key, k: _K = 10, condition: _Condition = "none") -> dict[str, Any]:
        hosted = hosted_index(service)
        hosted.check(condition)
        with service.predicting.admit() as place:
            place.take(0, 1)
            return await unless_gone(request, search_by_key(service, hosted, place, hosted.key(key), k, condition))

    @app.get(
        "/api/search/image",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}}, **errors(401, 404, 422, 503)},
        summary=f"Get an image of the index as a JPEG of at most {SIDE} x {SIDE} pixels",
    )
    async def image(request: Request, key: _Key) -> Response:
        hosted = hosted_index(service)
        with service.predicting.admit() as place:
            place.take(0, 1)
            work = within(service.settings.timeout, small_picture(service, hosted, place, hosted.key(key)))
            made = await unless_gone(request, work)
        return Response(made, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})


def hosted_index(service: Service) -> HostedIndex:
    """The index of a service that has one."""
    assert service.hosting.index is not None
    return service.hosting.index


async def search_upload(
    service: Service, hosted: HostedIndex, files: list[bytes], place: Place, k: int, condition: str
) -> dict[str, Any]:
    """The neighbours of an uploaded image; raises Refused like a prediction."""

    async def work() -> dict[str, Any]:
        begun = time.perf_counter()
        pixels = await service.decoded(hosted.model, files[0], place)
        decode = time.perf_counter() - begun
        return await _searched(service, hosted, place, partial(hosted.query, pixels, k, condition), decode)

    return await within(service.settings.timeout, work())


async def search_by_key(
    service: Service, hosted: HostedIndex, place: Place, key: str, k: int, condition: str
) -> dict[str, Any]:
    """The neighbours of an image of the index."""
    begun = time.perf_counter()
    work = _searched(service, hosted, place, partial(hosted.query_key, key, k, condition), 0.0)
    found = await within(service.settings.timeout, work)
    total = round(1000 * (time.perf_counter() - begun), 2)
    found["timings"] |= {"upload_ms": 0.0, "total_ms": total}
    return found


async def _searched(
    service: Service, hosted: HostedIndex, place: Place, query: Callable[[], dict[str, Any]], decode: float
) -> dict[str, Any]:
    """Run a query in the thread of searches."""
    begun = time.perf_counter()
    working = service.searcher.submit(partial(_timed, query))
    found, seconds = await asyncio.wrap_future(place.hold(working))
    waited = time.perf_counter() - begun - seconds
    return {**hosted.model.identity, **found, "timings": timings(decode, waited, seconds, 1)}


def _timed(query: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    begun = time.perf_counter()
    try:
        found = query()
    except PatchloomError as error:  # parameters were checked: what is left are damaged weights
        raise Refused(503, str(error)) from None
    return found, time.perf_counter() - begun


async def small_picture(service: Service, hosted: HostedIndex, place: Place, key: str) -> bytes:
    """An image of the index as a small JPEG, decoded in a thread under the limits of uploads."""
    reading = service.decoders.submit(partial(_read, service, hosted, key))
    stored, cost = await asyncio.wrap_future(place.hold(reading))
    if isinstance(stored, bytes):
        place.take(len(stored))
    work = partial(_small, stored, service)
    made: bytes = await asyncio.wrap_future(place.hold(service.decoders.submit(work, cost)))
    return made


def _read(service: Service, hosted: HostedIndex, key: str) -> tuple[bytes | Image.Image, float]:
    """The stored image and the cost of decoding it."""
    stored = hosted.stored(key, service.settings.max_bytes)
    if isinstance(stored, bytes):
        return stored, _of_index(check_header, stored, service)
    return stored, decoding_cost(0, stored.width * stored.height)


def _small(stored: bytes | Image.Image, service: Service) -> bytes:
    image = _of_index(decode_upload, stored, service) if isinstance(stored, bytes) else stored.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return file.getvalue()


def _of_index(work: Callable[..., Any], stored: bytes, service: Service) -> Any:
    """The result of a check of uploads for an image of the index: the client did not send it, so it gets a 404."""
    try:
        return work(stored, service.settings)
    except Refused as refused:
        raise Refused(404, f"The picture of this image cannot be shown. {refused.text}") from None
