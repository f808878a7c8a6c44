"""The work of a request from bytes to a response: admission, decoding in threads, batching, explaining, timing."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from patchloom.data.images import crop
from patchloom.errors import PatchloomError
from patchloom.explaining.explanation import explain
from patchloom.inference.predict import best_classes
from patchloom.serve.batcher import Batcher
from patchloom.serve.hosting import HostedModel, Hosting
from patchloom.serve.images import check_header, decode_upload, decoding_cost
from patchloom.serve.metrics import Metrics
from patchloom.serve.refused import Refused
from patchloom.serve.settings import Settings
from patchloom.serve.workers import Workers
from patchloom.text import without_nan

T = TypeVar("T")
_PREVIEW = 128  # longer side of a map in the response, in pixels; the page smooths it


class Gate:
    """Limits the images and the bytes of uploads in progress; what exceeds the limits is refused at once.

    An upload counts with the bytes that have arrived, and as an image only when it is complete, so that a client that
    announces an upload without sending it does not block others.

    Args:
        max_images: complete images in progress.
        max_bytes: bytes of all uploads in progress.
    """

    def __init__(self, max_images: int, max_bytes: int) -> None:
        self.max_images = max_images
        self.max_bytes = max_bytes
        self.inside = 0
        self.bytes = 0
        self.lock = threading.Lock()

    @contextmanager
    def admit(self) -> Iterator[Place]:
        """Admit one request; raises Refused, before anything is read, if a limit is reached."""
        # Without the lock: `take` checks again, and this only saves the reading of the body.
        if self.inside >= self.max_images or self.bytes >= self.max_bytes:
            raise _busy()
        place = Place(self)
        try:
            yield place
        finally:
            place.leave()


class Place:
    """The images and bytes of one request, released when it has its response and no thread uses its data any more."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._bytes = self._images = 0
        self._holders = 1

    def take(self, size: int, images: int = 0) -> None:
        """Count more bytes that have arrived, and images that are complete; raises Refused if a limit is exceeded."""
        gate = self._gate
        with gate.lock:
            if gate.inside + images > gate.max_images or gate.bytes + size > gate.max_bytes:
                raise _busy()
            gate.inside += images
            gate.bytes += size
            self._images += images
            self._bytes += size

    def hold(self, work: Future[Any]) -> Future[Any]:
        """Keep the place until `work` is done or cancelled, even if the client has disconnected."""
        with self._gate.lock:
            self._holders += 1
        # Work in a thread goes on when its client leaves; its bytes are in memory until it ends, and so they count.
        work.add_done_callback(lambda _: self.leave())
        return work

    def leave(self) -> None:
        """Release one hold; the last one frees the place."""
        with self._gate.lock:
            self._holders -= 1
            if not self._holders:
                self._gate.inside -= self._images
                self._gate.bytes -= self._bytes


def _busy() -> Refused:
    return Refused(503, "The service is busy. Try again in a moment.", retry_after=1)


class Service:
    """The models, and the threads, queues and limits that serve requests."""

    def __init__(self, hosting: Hosting, settings: Settings) -> None:
        self.hosting = hosting
        self.settings = settings
        self.metrics = Metrics()
        self.batcher = Batcher(settings.max_batch, settings.max_wait, self.metrics.prediction)
        self.predicting = Gate(settings.max_queue, settings.max_queue_bytes)
        self.explaining = Gate(settings.max_explanations, settings.max_queue_bytes)
        self.decoders = Workers(settings.decoders + 1, "decoder", reserved=1)  # one for small images only
        # One at a time: an explanation is hundreds of forward passes on all cores.
        self.explainer = Workers(1, "explainer")
        # One at a time: a search reads all vectors of the index, with all cores.
        self.searcher = Workers(1, "searcher")
        # moving mean of the seconds of an explanation, without and with faithfulness
        self.pace = {False: 0.0, True: 0.0}
        self.stopping = False
        self._watch()

    def _watch(self) -> None:
        predicting, explaining = self.predicting, self.explaining
        self.metrics.watch("patchloom_predicting", "Predictions under way", lambda: predicting.inside)
        self.metrics.watch("patchloom_explaining", "Explanations under way", lambda: explaining.inside)
        self.metrics.watch(
            "patchloom_upload_bytes", "Bytes of uploads under way", lambda: predicting.bytes + explaining.bytes
        )
        self.metrics.watch("patchloom_queue_images", "Images that wait for a batch", lambda: self.batcher.waiting)

    @property
    def busy(self) -> bool:
        """Whether a thread is still working, perhaps for a client that has disconnected."""
        return self.decoders.busy or self.explainer.busy or self.searcher.busy

    def close(self, seconds: float = 2.0) -> None:
        """End the threads; those that do not end within `seconds` are abandoned."""
        self.decoders.close(seconds)
        self.explainer.close(seconds)
        self.searcher.close(seconds)
        self.batcher.close(seconds)

    def find(self, name: str | None) -> HostedModel:
        """The model of this name, or the default model; raises Refused (404) if there is none."""
        try:
            return self.hosting.find(name)
        except PatchloomError as error:
            raise Refused(404, str(error)) from None

    def find_classifier(self, name: str | None) -> HostedModel:
        """The same for a model that must have classes; raises Refused (422) if it has none."""
        found = self.find(name)
        if not found.classifies:
            raise Refused(422, f"{found.name} has no classifier: it is for search, which needs --index.")
        return found

    def check_queue(self, faithfulness: bool) -> None:
        """Refuse an explanation that would time out because of those that come first."""
        quick, slow = self.explainer.ahead(urgent=not faithfulness)
        ahead = quick * self.pace[False] + slow * self.pace[True]
        if ahead and ahead + self.pace[faithfulness] > self.settings.explain_timeout:
            raise Refused(503, f"The service is busy: about {ahead:.0f} s of work are queued.", math.ceil(ahead))

    async def predict(self, model: HostedModel, files: list[bytes], place: Place, top: int) -> dict[str, Any]:
        """Predictions of one file, or `results` of several, with an error in place of an invalid file.

        Raises:
            Refused: 422 for a damaged image (of one file), 503 if it takes too long.
        """
        if len(files) == 1:
            predicted = self._predict(model, files[0], place, top)
            return {**model.identity, **await within(self.settings.timeout, predicted)}
        each = [asyncio.ensure_future(_or_error(self._predict(model, data, place, top))) for data in files]
        try:
            results = await within(self.settings.timeout, asyncio.gather(*each))
        finally:
            for future in each:  # gather leaves the others running when one fails
                future.cancel()
        return {**model.identity, "results": results}

    async def explain(self, model: HostedModel, files: list[bytes], place: Place, **options: Any) -> dict[str, Any]:
        """Predictions, maps and faithfulness of one file; `options` are those of `patchloom.explain`.

        Raises:
            Refused: 422 for an unknown map or class, 503 if it takes too long.
        """
        explained = self._explain(model, files[0], place, options)
        return {**model.identity, **await within(self.settings.explain_timeout, explained)}

    async def decoded(self, model: HostedModel, data: bytes, place: Place) -> np.ndarray:
        """(height, width, 3) uint8: the image resized and cropped for the network; the rest of it is not kept."""
        # Even a header can take long to parse, so the event loop does not do it.
        checking = self.decoders.submit(partial(check_header, data, self.settings), decoding_cost(len(data)))
        cost: float = await asyncio.wrap_future(place.hold(checking))
        work = partial(crop_upload, data, model, self.settings)
        pixels: np.ndarray = await asyncio.wrap_future(place.hold(self.decoders.submit(work, cost)))
        return pixels

    async def _predict(self, model: HostedModel, data: bytes, place: Place, top: int) -> dict[str, Any]:
        begun = time.perf_counter()
        # Announced before decoding, so that a batch that is about to start waits for it.
        self.batcher.expect()
        try:
            pixels = await self.decoded(model, data, place)
        # CancelledError too, which is not an Exception: otherwise the batcher would wait for an image that never comes.
        except BaseException:
            self.batcher.forget()
            raise
        decoded = time.perf_counter()
        result = await asyncio.wrap_future(self.batcher.submit(model, pixels))
        if not np.isfinite(result.probabilities).all():
            raise Refused(503, f"The output of {model.name} is NaN: its weights are damaged.")
        return {
            "predictions": best_classes(model.network, result.probabilities, top),
            "timings": timings(decoded - begun, result.queued, result.computed, result.batch),
        }

    async def _explain(self, model: HostedModel, data: bytes, place: Place, options: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        pixels = await self.decoded(model, data, place)
        decoded = time.perf_counter()
        measures = bool(options["faithfulness"])
        # Again: the queue may have grown while the image arrived.
        self.check_queue(measures)
        cost = math.inf if measures else 0.0  # slow ones wait for all others
        work = self.explainer.submit(partial(_explained, model, pixels, options), cost)
        found, seconds = await asyncio.wrap_future(place.hold(work))
        before = self.pace[measures]
        # An exponential mean: the last few explanations decide.
        self.pace[measures] = 0.7 * before + 0.3 * seconds if before else seconds
        waited = time.perf_counter() - decoded - seconds
        return {
            "predictions": found.predictions,
            "target": found.target,
            "image": _png(Image.fromarray(found.image)),
            "maps": [{"name": name, "png": _grey(values)} for name, values in found.maps.items()],
            "layers": [
                {"name": name, "heads": list(map(_grey, _stretched(maps)))} for name, maps in found.heads.items()
            ],
            "faithfulness": without_nan(found.faithfulness or {}),
            "timings": timings(decoded - begun, waited, seconds, 1),
        }


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled and refused after `seconds`."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # the built-in one only since Python 3.11
        raise Refused(503, f"The request took longer than {seconds:g} seconds.", retry_after=5) from None


async def _or_error(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of one file among several, or {"error": ...} if the file is invalid."""
    try:
        return await work
    except Refused as refused:
        # 503 concerns the whole request: it is to be retried as a whole.
        if refused.status >= 500:
            raise
        return {"error": refused.text}


def crop_upload(data: bytes, model: HostedModel, settings: Settings) -> np.ndarray:
    """Decode an upload and crop it for the model: (height, width, 3) uint8."""
    return np.asarray(crop(decode_upload(data, settings), model.network.preprocessing))


def _explained(model: HostedModel, pixels: np.ndarray, options: dict[str, Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    try:
        found = explain(model.twin, pixels, **options)
    except PatchloomError as error:
        raise Refused(422, str(error)) from None
    return found, time.perf_counter() - begun


def timings(decode: float, queue: float, model: float, batch: int) -> dict[str, float]:
    """The field `timings` of a response, from seconds."""
    seconds = {"decode_ms": decode, "queue_ms": queue, "model_ms": model}
    return {**{name: round(1000 * value, 2) for name, value in seconds.items()}, "batch": batch}


def _stretched(maps: np.ndarray) -> Sequence[np.ndarray]:
    """Scale each of the maps (heads, height, width) to [0, 1]: the page shows where a head attends, not how much."""
    low = maps.min(axis=(1, 2), keepdims=True)
    span = maps.max(axis=(1, 2), keepdims=True) - low
    return list((maps - low) / np.where(span > 0, span, 1))


def _grey(values: np.ndarray) -> str:
    """A map (height, width) in [0, 1] as a small grey PNG, base64."""
    image = Image.fromarray((np.nan_to_num(values).clip(0, 1) * 255).round().astype(np.uint8))
    image.thumbnail((_PREVIEW, _PREVIEW), Image.Resampling.BILINEAR)
    return _png(image)


def _png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
