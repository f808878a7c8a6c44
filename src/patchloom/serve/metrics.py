"""What the service counts, in the form that Prometheus reads."""

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

from patchloom.serve.batcher import Answer
from patchloom.serve.hosting import HostedModel

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Counters of one service, apart from those of any other in the same process."""

    def __init__(self) -> None:
        self.unanswered = 0  # requests that were cut off when the process ended
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "patchloom_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "patchloom_request_seconds", "Seconds from request to answer", ["route"],
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
        """A figure that is asked for whenever Prometheus asks."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def prediction(self, model: HostedModel, answer: Answer) -> None:
        self._batch.labels(model.name).observe(answer.batch)
        self._queued.labels(model.name).observe(answer.queued)

    def text(self) -> bytes:
        return generate_latest(self.registry)
