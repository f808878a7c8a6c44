"""Limits on connections: idle ones are closed, and their number stays below the limit of open files."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from patchloom.errors import PatchloomError

ACCEPTED_AT_ONCE = 4
_SPARE_FILES = 32  # for a reload, and for sockets that are closed only after new ones were accepted
_FEWEST = 4
_BUSY = json.dumps({"error": "The service has too many connections. Try again in a moment."}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


def connection_limit(wanted: int) -> int:
    """The number of connections that the limit of open files allows, at most `wanted`.

    Raises PatchloomError if there are too few to serve.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    # /dev/fd lists the files that this process has open now.
    free = limit - len(os.listdir("/dev/fd")) - _SPARE_FILES
    if free < _FEWEST:
        raise PatchloomError(
            f"This process can open only {limit} files, too few to serve. "
            f"Raise the limit: ulimit -n {limit - free + _FEWEST}"
        )
    return min(wanted, free)


class Connections:
    """All connections of a server. When the limit is reached, a new one replaces the one that has been idle longest."""

    def __init__(self, most: int, idle_timeout: float) -> None:
        self.most = most
        self.idle_timeout = idle_timeout
        self.open: set[Connection] = set()
        self.idle: dict[Connection, asyncio.TimerHandle] = {}  # in the order in which they fell idle

    @property
    def protocol(self) -> Any:
        """The factory of connections that uvicorn calls."""
        return partial(Connection, self)

    def make_room(self) -> bool:
        """Close an idle connection if the limit is reached; returns whether one more can be accepted."""
        if len(self.open) >= self.most and self.idle:
            # Dictionaries keep the order of insertion: the first one has been idle longest.
            next(iter(self.idle)).end()
        return len(self.open) < self.most


class Connection(H11Protocol):
    """One connection. It is idle while no complete request head has arrived since it was opened or since its last
    response."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = connections
        self._unsent = 0  # bytes of the response that were unsent when the timer started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.make_room():
            # A ready-made response: parsing the request first would cost what is scarce.
            transport.write(_REFUSAL)
            transport.close()
            return
        self._all.open.add(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        """The client does not read the response: start the timer that closes the connection."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    def end(self) -> None:
        """Close at once, even with unsent data."""
        self._forget()
        # close() would wait for the client to read what is unsent, which it may never do.
        self.transport.abort()

    def _update(self) -> None:
        if self not in self._all.open:
            return
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop_waiting()
        elif self not in self._all.idle:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._unsent = self.transport.get_write_buffer_size()
        self._all.idle[self] = self.loop.call_later(self._all.idle_timeout, self._time_out)

    def _time_out(self) -> None:
        # Less is unsent than when the timer started, so the client has read something.
        if 0 < self.transport.get_write_buffer_size() < self._unsent:
            self._wait()  # a slow client, but it is reading
        else:
            self.end()

    def _stop_waiting(self) -> None:
        if timer := self._all.idle.pop(self, None):
            timer.cancel()

    def _forget(self) -> None:
        self._stop_waiting()
        self._all.open.discard(self)


class AcceptErrors:
    """Exception handler of an event loop that reports failed accepts at most once per minute; asyncio repeats them many
    times per second."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._seconds
            print(f"patchloom: cannot accept connections: {context['exception']}", file=sys.stderr, flush=True)
