"""The HTTP routes: the web page, the API, its documentation, and health and metrics for monitoring."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
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
    ExplainResponse,
    ModelsResponse,
    PredictResponse,
    ResultsResponse,
    SamplesResponse,
    StateResponse,
    VersionResponse,
)
from patchloom.serve.routes import UPLOAD_ERRORS, answer_upload, errors, upload_body
from patchloom.serve.search import add_search
from patchloom.serve.service import Service

_PAGE = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "search.js": "text/javascript",
    "icon.svg": "image/svg+xml",
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
    if service.hosting.index is not None:
        add_search(app, service)
    _add_models(app, service)
    _add_samples(app)
    _add_state(app, service)
    _add_reference(app)
    return app


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
    @app.get("/readyz", response_model=StateResponse, responses=errors(503), summary="Readiness for requests")
    async def readyz() -> dict[str, str]:
        if service.stopping:
            raise Refused(503, "The service is stopping.", retry_after=5)
        return {"status": "ready"}

    @app.get(
        "/version",
        response_model=VersionResponse,
        responses=errors(401, 404, 422),
        summary="Version of the code and digest of the weights",
    )
    async def version(model: _ModelName = None) -> dict[str, str]:
        return service.find(model).identity

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **errors(401)},
        summary="Metrics for Prometheus",
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _add_samples(app: FastAPI) -> None:
    samples = find_samples()

    @app.get("/api/samples", response_model=SamplesResponse, responses=errors(401), summary="List the sample images")
    async def list_samples() -> dict[str, Any]:
        return {"samples": list(samples.values())}

    @app.get(
        "/api/samples/{name}",
        response_class=Response,
        responses={200: {"content": {"image/png": {}, "image/jpeg": {}}}, **errors(401, 404, 422)},
        summary="Get a sample image",
    )
    async def sample(name: str) -> Response:
        if name not in samples:
            raise Refused(404, "There is no sample with this name.")
        found = samples[name]
        return Response(found.data, media_type=found.media_type, headers={"cache-control": "max-age=3600"})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/api/models", response_model=ModelsResponse, responses=errors(401), summary="List the models")
    async def list_models() -> dict[str, Any]:
        models = [describe(model) for model in service.hosting.models.values()]
        index = service.hosting.index
        return {"version": __version__, "models": models, "index": index and index.describe()}

    @app.post(
        "/api/reload",
        response_model=ModelsResponse,
        responses=errors(401, 403, 503),
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
        "classes": list(names_or_indices(model.network.class_names, config.num_classes)) if model.classifies else [],
        "maps": list(available_maps(model.network)) if model.classifies else [],
        "per_class": model.network.per_class,
    }


def _add_work(app: FastAPI, service: Service) -> None:
    failures = errors(*UPLOAD_ERRORS)

    @app.post(
        "/api/predict",
        response_model=PredictResponse | ResultsResponse,
        responses=failures,
        openapi_extra=upload_body(several=True),
        summary="Classify one image, or several at once",
    )
    async def predict(request: Request, model: _ModelName = None, top: _Top = 5) -> dict[str, Any]:
        work = partial(service.predict, service.find_classifier(model), top=top)
        return await answer_upload(request, service, service.predicting, work, service.settings.max_files)

    @app.post(
        "/api/explain",
        response_model=ExplainResponse,
        responses=failures,
        openapi_extra=upload_body(),
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
        found = service.find_classifier(model)
        names = None if maps is None else [name.strip() for name in maps.split(",")]
        # Before the upload: a client should not send megabytes only to be refused.
        service.check_queue(faithfulness)
        work = partial(service.explain, found, maps=names, target=target, faithfulness=faithfulness)
        return await answer_upload(request, service, service.explaining, work)
