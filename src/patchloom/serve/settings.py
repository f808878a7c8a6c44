"""What the service is told when it starts: where to listen, whom to answer, and how much it takes on."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from PIL import Image

from patchloom.errors import PatchloomError

_DAY = 86_400
_MOST = {  # upper bounds: more is a slip of the keyboard, and would fail much later
    "max_bytes": 10**9, "max_pixels": 10**9, "max_batch": 4096, "max_wait": 60, "max_queue": 100_000,
    "max_explanations": 10_000, "max_queue_bytes": 10**12, "timeout": _DAY, "explain_timeout": _DAY,
    "upload_timeout": _DAY, "min_upload_rate": 10**9, "max_files": 1000, "decoders": 256, "decode_timeout": _DAY,
    "max_connections": 65_536, "idle_timeout": _DAY,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Where and how to serve. Sizes are in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # asked for as `Authorization: Bearer TOKEN` where there is one
    allowed_hosts: tuple[str, ...] = ()  # names by which clients may call it, besides its own
    max_bytes: int = 20_000_000  # of one upload
    max_pixels: int = 50_000_000  # of one image, as its header says
    max_batch: int = 16  # images that the network sees at once
    max_wait: float = 0.004  # that a batch waits for images that are being decoded
    max_queue: int = 256  # requests to predict that are under way
    max_explanations: int = 16  # requests to explain that are under way
    max_queue_bytes: int = 256_000_000  # of all uploads that are under way
    timeout: float = 30.0  # of a prediction
    explain_timeout: float = 180.0
    upload_timeout: float = 30.0
    min_upload_rate: float = 4000.0  # bytes per second, after the first seconds of an upload
    max_files: int = 32  # of one request to predict
    decoders: int = max(2, min(4, os.cpu_count() or 2))  # threads that decode large images beside the network
    decode_timeout: float = 10.0  # of one image
    max_connections: int = 1000  # fewer where the process may not open so many files
    idle_timeout: float = 10.0  # of a connection without a complete request head

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _MOST and not 0 < value <= _MOST[field.name]:
                raise PatchloomError(f"{field.name} is more than 0 and at most {_MOST[field.name]:,}, not {value}.")
        if not self.host.strip():
            raise PatchloomError(
                f"host is an address to listen at, not {self.host!r}: 127.0.0.1 for this machine alone, "
                "0.0.0.0 for every network."
            )
        if not 0 <= self.port <= 65535:
            raise PatchloomError(f"A port is a number from 0 (any that is free) to 65535, not {self.port}.")
        if self.token is not None and not _is_token(self.token):
            raise PatchloomError("A token has at least 8 printable ASCII characters, and no space at its ends.")
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and self.max_pixels > limit:
            raise PatchloomError(f"max_pixels is at most {limit}, the most that Pillow decodes, not {self.max_pixels}.")
        object.__setattr__(self, "allowed_hosts", tuple(map(_allowed, self.allowed_hosts)))
        if self.max_queue_bytes < self.max_bytes:
            raise PatchloomError(
                f"max_queue_bytes ({self.max_queue_bytes}) holds at least one upload (max_bytes, {self.max_bytes})."
            )
        if self.max_queue < self.max_files:
            object.__setattr__(self, "max_files", self.max_queue)  # every file of a request waits in the queue

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def knows_host(self, name: str) -> bool:
        """Whether a request may call this server by `name`.

        On loopback only by a loopback name: otherwise a web page whose name is made to point here (DNS rebinding) could
        read what the service answers. Elsewhere by any name, unless some are given.
        """
        if name in self.allowed_hosts or name == self.host.lower():
            return True
        return is_loopback(name) or not (self.on_loopback or self.allowed_hosts)


def _is_token(text: str) -> bool:
    return len(text) >= 8 and text.isascii() and text.isprintable() and text == text.strip()


def _allowed(given: str) -> str:
    name = host_name(f"[{given}]" if given.count(":") > 1 and "[" not in given else given)
    if not name:
        raise PatchloomError(f"allowed_hosts are names like models.example.org, not {given!r}.")
    return name


def host_name(host: str) -> str:
    """The name in a Host header, in small letters and without the port; empty where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
