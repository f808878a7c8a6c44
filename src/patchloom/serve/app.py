"""The HTTP routes: the web page, the API, its documentation, and health and metrics for monitoring."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from patchloom import __version__
from patchloom.data.samples import find_samples
from patchloom.errors import PatchloomError
from patchloom.explaining.maps import available_maps
from patchloom.models.class_names import names_or_indices
from patchloom.serve.guard import Guard, error_response
from patchloom.serve.hosting import HostedModel
from patchloom.serve.reference import reference_page
from patchloom.serve.refused import Refused
from patchloom.serve.responses import (
    ErrorResponse,
    ExplainResponse,
    ModelsResponse,
    PredictResponse,
    ResultsResponse,
    SamplesResponse,
    StateResponse,
    VersionResponse,
)
from patchloom.serve.service import Gate, Service
from patchloom.serve.uploads import check_announced, read_upload

_PAGE = {"index.html": "text/html", "style.css": "text/css", "app.js": "text/javascript", "icon.svg": "image/svg+xml"}
_ERRORS = {
    400: "an invalid request",
    401: "the bearer token is missing or wrong",
    403: "not allowed",
    404: "no such model or sample",
    405: "no such method",
    408: "the upload was too slow",
    413: "too many bytes or pixels",
    415: "not an image of a known format",
    422: "a damaged image, or a parameter out of range",
    503: "busy or too slow: retry after Retry-After seconds",
}
_ModelName = Annotated[str | None, Query(max_length=200, description="the model to use; default: the first")]
_Top = Annotated[int, Query(ge=1, le=1000, description="number of classes to return")]


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service; on shutdown it also ends the threads of the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="patchloom", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Classify images and see which regions drive a prediction.",
        swagger_ui_oauth2_redirect_url=None,
    )  # fmt: skip
    # The guard is the outermost layer: it also sees requests to unknown paths, and errors of the application.
    app.add_middleware(Guard, settings=service.settings, metrics=service.metrics)
    _add_errors(app)
    _add_page(app)
    _add_work(app, service)
    _add_models(app, service)
    _add_samples(app)
    _add_state(app, service)
    _add_reference(app)
    return app


def _upload(several: bool = False) -> dict[str, Any]:
    """The OpenAPI description of the multipart body."""
    file: dict[str, Any] = {"type": "string", "format": "binary", "description": "an image"}
    if several:
        file = {"type": "array", "items": file, "minItems": 1, "description": "an image; repeat the part for several"}
    schema = {"type": "object", "required": ["file"], "properties": {"file": file}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of error responses."""
    return {code: {"model": ErrorResponse, "description": _ERRORS[code]} for code in codes}


def _add_errors(app: FastAPI) -> None:
    """Every error response is {"error": sentence} and reveals nothing about the internals of the server."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        headers = None if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return error_response(error.status, error.text, headers)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, f"{error.detail}.", dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # One sentence is enough, and pydantic's own report repeats the input, which may be large.
        first = error.errors()[0]
        return error_response(422, f"Invalid parameter {first['loc'][-1]}: {first['msg']}.")


def _add_page(app: FastAPI) -> None:
    """Serve the files of the page from memory, under fixed paths: a request can never name a file."""
    folder = resources.files("patchloom.serve") / "page"

    def add(name: str, media_type: str) -> None:
        content = (folder / name).read_bytes()

        async def send() -> Response:
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

        path = "/" if name == "index.html" else f"/{name}"
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(send)

    for name, media_type in _PAGE.items():
        add(name, media_type)


def _add_reference(app: FastAPI) -> None:
    """Documentation of the API; call it last, since it describes the routes added so far."""
    content = reference_page(app.openapi())

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs() -> Response:
        return Response(content, media_type="text/html", headers={"cache-control": "no-cache"})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=StateResponse, summary="Liveness of the process")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=StateResponse, responses=_errors(503), summary="Readiness for requests")
    async def readyz() -> dict[str, str]:
        if service.stopping:
            raise Refused(503, "The service is stopping.", retry_after=5)
        return {"status": "ready"}

    @app.get(
        "/version",
        response_model=VersionResponse,
        responses=_errors(401, 404, 422),
        summary="Version of the code and digest of the weights",
    )
    async def version(model: _ModelName = None) -> dict[str, str]:
        return service.find(model).identity

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **_errors(401)},
        summary="Metrics for Prometheus",
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _add_samples(app: FastAPI) -> None:
    samples = find_samples()

    @app.get("/api/samples", response_model=SamplesResponse, responses=_errors(401), summary="List the sample images")
    async def list_samples() -> dict[str, Any]:
        return {"samples": list(samples.values())}

    @app.get(
        "/api/samples/{name}",
        response_class=Response,
        responses={200: {"content": {"image/png": {}, "image/jpeg": {}}}, **_errors(401, 404, 422)},
        summary="Get a sample image",
    )
    async def sample(name: str) -> Response:
        if name not in samples:
            raise Refused(404, "There is no sample with this name.")
        found = samples[name]
        return Response(found.data, media_type=found.media_type, headers={"cache-control": "max-age=3600"})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/api/models", response_model=ModelsResponse, responses=_errors(401), summary="List the models")
    async def list_models() -> dict[str, Any]:
        models = [describe(model) for model in service.hosting.models.values()]
        return {"version": __version__, "models": models}

    @app.post(
        "/api/reload",
        response_model=ModelsResponse,
        responses=_errors(401, 403, 503),
        summary="Reload all models without dropping requests (only if a token is set)",
    )
    async def reload() -> dict[str, Any]:
        # Without a token anybody could make the server load models again and again.
        if service.settings.token is None:
            raise Refused(403, "Reloading over HTTP requires a server with a token. Send SIGHUP instead.")
        if not await reload_models(service):
            raise Refused(503, "The models could not be reloaded; the old ones stay in use.", retry_after=5)
        return await list_models()


async def reload_models(service: Service) -> bool:
    """Reload all models; returns whether it succeeded. If not, the old ones stay and the reason is on stderr."""
    try:
        await asyncio.to_thread(service.hosting.reload)
    except Exception as error:  # whatever it is, the old models still work
        reason = error if isinstance(error, PatchloomError | OSError) else repr(error)
        print(f"patchloom: not reloaded: {reason}", file=sys.stderr, flush=True)
        service.metrics.reloads.labels("failed").inc()
        return False
    service.metrics.reloads.labels("done").inc()
    return True


def describe(model: HostedModel) -> dict[str, Any]:
    """The entry of a model in /api/models."""
    config = model.network.config
    return {
        "name": model.name,
        "digest": model.digest,
        "architecture": config.name,
        "family": config.family,
        "parameters": sum(parameter.numel() for parameter in model.network.parameters()),
        "image_size": config.img_size,
        "classes": list(names_or_indices(model.network.class_names, config.num_classes)),
        "maps": list(available_maps(model.network)),
        "per_class": model.network.per_class,
    }


def _add_work(app: FastAPI, service: Service) -> None:
    errors = _errors(400, 401, 403, 404, 408, 413, 415, 422, 503)

    async def upload(request: Request, gate: Gate, work: Any, max_files: int = 1) -> dict[str, Any]:
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
        for timed in (part["timings"] for part in response.get("results", [response]) if "timings" in part):
            timed["upload_ms"] = round(1000 * (read - begun), 2)
            timed["total_ms"] = round(1000 * (time.perf_counter() - begun), 2)
        return response

    @app.post(
        "/api/predict",
        response_model=PredictResponse | ResultsResponse,
        responses=errors,
        openapi_extra=_upload(several=True),
        summary="Classify one image, or several at once",
    )
    async def predict(request: Request, model: _ModelName = None, top: _Top = 5) -> dict[str, Any]:
        work = partial(service.predict, service.find(model), top=top)
        return await upload(request, service.predicting, work, service.settings.max_files)

    @app.post(
        "/api/explain",
        response_model=ExplainResponse,
        responses=errors,
        openapi_extra=_upload(),
        summary="Classify an image and show the regions that drive the prediction",
    )
    async def explain(
        request: Request,
        model: _ModelName = None,
        maps: Annotated[
            str | None, Query(max_length=400, description="names separated by commas; default: all")
        ] = None,
        target: Annotated[
            str | None, Query(max_length=400, description="class to explain; default: the top one")
        ] = None,
        faithfulness: Annotated[bool, Query(description="measure how faithful the maps are")] = True,
    ) -> dict[str, Any]:
        found = service.find(model)
        names = None if maps is None else [name.strip() for name in maps.split(",")]
        # Before the upload: a client should not send megabytes only to be refused.
        service.check_queue(faithfulness)
        work = partial(service.explain, found, maps=names, target=target, faithfulness=faithfulness)
        return await upload(request, service.explaining, work)


async def unless_gone(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
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
