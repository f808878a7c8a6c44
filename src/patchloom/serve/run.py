"""The server process: bind, load models, serve until a signal, finish the requests in progress."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import uvicorn
from PIL import Image

from patchloom.console import Console
from patchloom.devices import Device, choose_device
from patchloom.errors import PatchloomError
from patchloom.serve.app import make_app, reload_models
from patchloom.serve.connections import ACCEPTED_AT_ONCE, AcceptErrors, Connections, connection_limit
from patchloom.serve.hosting import Hosting
from patchloom.serve.service import Service
from patchloom.serve.settings import Settings

_BACKLOG = 1024


def serve(
    sources: Sequence[str],
    settings: Settings,
    base: str | None = None,
    int8: bool = False,
    device: Device = "auto",
    console: Console | None = None,
    *,
    index: str | None = None,
    coarse: str | None = None,
) -> None:
    """Serve models until SIGTERM or SIGINT; SIGHUP reloads them. `index` is the folder of an index to search, and
    `coarse` the label column of its coarse condition.

    Raises PatchloomError if the address is in use, or a model or the index cannot be loaded.
    """
    console = console or Console(sys.stderr)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # pixels are counted before Pillow decodes any
    with _bound(settings) as listener:
        service = Service(Hosting(sources, base, int8, choose_device(device), index, coarse), settings)
        asyncio.run(_serve(service, listener, console))
    cut_off = service.metrics.unanswered
    console.say(f"Stopped; {cut_off} requests were cut off." if cut_off else "Stopped; all requests were finished.")
    if service.busy:  # a normal exit while a thread still runs C code could crash
        sys.stderr.flush()
        os._exit(0)


def _bound(settings: Settings) -> socket.socket:
    """Bind before the models are loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A restart may bind at once, although connections of the process before are in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, UnicodeError, TypeError) as error:  # the latter two for an invalid name
        listener.close()
        reason = getattr(error, "strerror", None) or "there is no such address"
        raise PatchloomError(f"{settings.host}, port {settings.port} cannot be used: {reason}.") from error
    return listener


def _greet(service: Service, port: int, console: Console) -> None:
    settings = service.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    if not settings.on_loopback and settings.token is None:
        console.say("Anyone who can reach this address can use the service. Require a bearer token with --token.")
    console.say(f"Serving {', '.join(service.hosting.models)} at http://{host}:{port} (Ctrl-C to stop)")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, greet: Callable[[], None]) -> None:
        super().__init__(config)
        self.greet = greet

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio uses one number for the backlog and for accepts per turn
        self.greet()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to _on_signals: uvicorn would raise them again at its end, and the exit code would not be 0."""
        yield


async def _serve(service: Service, listener: socket.socket, console: Console) -> None:
    settings = service.settings
    # No request can take longer than this, so that a shutdown cuts nobody off.
    longest = settings.upload_timeout * settings.max_files + max(settings.timeout, settings.explain_timeout)
    connections = Connections(connection_limit(settings.max_connections), settings.idle_timeout)
    # log_level: uvicorn warns of every malformed request, so a client could fill the disk with log lines
    config = uvicorn.Config(
        # proxy_headers=False: X-Forwarded-For is set by anybody, and nothing here depends on addresses.
        make_app(service), log_config=None, log_level="error", access_log=False, server_header=False,
        proxy_headers=False, ws="none", http=connections.protocol, backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=math.ceil(settings.idle_timeout), timeout_graceful_shutdown=math.ceil(longest) + 1,
    )  # fmt: skip
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    server = _Server(config, partial(_greet, service, listener.getsockname()[1], console))
    reloads: set[asyncio.Task[None]] = set()

    def stop() -> None:
        server.should_exit = service.stopping = True
        for which in (signal.SIGTERM, signal.SIGINT):
            # A second signal ends the process at once.
            if asyncio.get_running_loop().remove_signal_handler(which):
                signal.signal(which, _end_at_once)  # works even if the event loop is stuck

    async def reload() -> None:
        if await reload_models(service):
            console.say(f"Reloaded: {', '.join(service.hosting.models)}")

    def start_reload() -> None:
        task = asyncio.get_running_loop().create_task(reload())
        reloads.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(reloads.discard)

    with _on_signals({signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: start_reload}):
        await server.serve(sockets=[listener])


def _end_at_once(*_: object) -> None:
    os.write(2, b"Ended by a second signal; requests in progress were abandoned.\n")
    # Not sys.exit: the loop or a thread in C code may be what does not end.
    os._exit(3)


@contextlib.contextmanager
def _on_signals(handlers: dict[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Handle signals in the event loop, except those that the process was started to ignore (nohup)."""
    loop = asyncio.get_running_loop()
    before = {which: signal.getsignal(which) for which in handlers}
    for which, call in handlers.items():
        if before[which] is not signal.SIG_IGN:
            loop.add_signal_handler(which, call)
    try:
        yield
    finally:
        for which, handler in before.items():
            loop.remove_signal_handler(which)
            signal.signal(which, handler)
