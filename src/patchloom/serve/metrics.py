"""Metrics of the service, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from patchloom.serve.batcher import BatchResult
from patchloom.serve.hosting import HostedModel

# Upper bounds of the histogram's buckets, in seconds.
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one service, in a registry of its own, so that several services can run in one process."""

    def __init__(self) -> None:
        self.unanswered = 0  # requests without a response when the process ended
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "patchloom_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "patchloom_request_seconds", "Seconds from request to response", ["route"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._batch = Histogram(
            "patchloom_batch_images", "Images in the batch of a prediction", ["model"],
            buckets=_IMAGES, registry=self.registry,
        )  # fmt: skip
        self._queued = Histogram(
            "patchloom_queue_seconds", "Seconds that an image waits for its batch", ["model"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.reloads = Counter("patchloom_reloads", "Reloads by outcome", ["outcome"], registry=self.registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed whenever Prometheus reads the metrics."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def prediction(self, model: HostedModel, result: BatchResult) -> None:
        """Count the prediction of one image."""
        self._batch.labels(model.name).observe(result.batch)
        self._queued.labels(model.name).observe(result.queued)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
