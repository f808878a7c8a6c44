"""Settings of the service: address, access and limits."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from PIL import Image

from patchloom.errors import PatchloomError

_DAY = 86_400
_MAX = {  # upper bounds: larger values are typing errors that would fail much later
    "max_bytes": 10**9, "max_pixels": 10**9, "max_batch": 4096, "max_wait": 60, "max_queue": 100_000,
    "max_explanations": 10_000, "max_queue_bytes": 10**12, "timeout": _DAY, "explain_timeout": _DAY,
    "upload_timeout": _DAY, "min_upload_rate": 10**9, "max_files": 1000, "decoders": 256, "decode_timeout": _DAY,
    "max_connections": 65_536, "idle_timeout": _DAY,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Address, access and limits of a service. Sizes are in bytes, times in seconds.

    Raises PatchloomError for values out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # if set, required as `Authorization: Bearer TOKEN`
    allowed_hosts: tuple[str, ...] = ()  # host names that clients may use besides the own one
    max_bytes: int = 20_000_000  # of one upload
    max_pixels: int = 50_000_000  # of one image, according to its header
    max_batch: int = 16  # images per batch
    max_wait: float = 0.004  # for images that are being decoded
    max_queue: int = 256  # images of predictions in progress
    max_explanations: int = 16  # explanations in progress
    max_queue_bytes: int = 256_000_000  # of all uploads in progress
    timeout: float = 30.0  # of a prediction
    explain_timeout: float = 180.0
    upload_timeout: float = 30.0
    min_upload_rate: float = 4000.0  # bytes per second, after the first seconds of an upload
    max_files: int = 32  # of one request to predict
    decoders: int = max(2, min(4, os.cpu_count() or 2))  # threads that decode large images
    decode_timeout: float = 10.0  # of one image
    max_connections: int = 1000  # fewer if the limit of open files requires it
    idle_timeout: float = 10.0  # of a connection without a complete request head

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _MAX and not 0 < value <= _MAX[field.name]:
                raise PatchloomError(f"{field.name} must be more than 0 and at most {_MAX[field.name]:,}, not {value}.")
        if not self.host.strip():
            raise PatchloomError(
                f"host must be an address, not {self.host!r}: 127.0.0.1 for this machine, 0.0.0.0 for all networks."
            )
        if not 0 <= self.port <= 65535:
            raise PatchloomError(f"port must be from 0 (any free port) to 65535, not {self.port}.")
        if self.token is not None and not _is_token(self.token):
            raise PatchloomError("A token must have at least 8 printable ASCII characters and no space at its ends.")
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and self.max_pixels > limit:
            raise PatchloomError(f"max_pixels must be at most {limit}, the limit of Pillow, not {self.max_pixels}.")
        object.__setattr__(self, "allowed_hosts", tuple(map(_allowed, self.allowed_hosts)))
        if self.max_queue_bytes < self.max_bytes:
            raise PatchloomError(
                f"max_queue_bytes ({self.max_queue_bytes}) must be at least max_bytes ({self.max_bytes})."
            )
        if self.max_queue < self.max_files:
            object.__setattr__(self, "max_files", self.max_queue)  # every file of a request waits in the queue

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def knows_host(self, name: str) -> bool:
        """Whether requests may use the host name `name`.

        On loopback, only loopback names: otherwise a web page whose host name is made to point here (DNS rebinding)
        could read the responses. Elsewhere any name, unless allowed_hosts is set.
        """
        if name in self.allowed_hosts or name == self.host.lower():
            return True
        return is_loopback(name) or not (self.on_loopback or self.allowed_hosts)


def _is_token(text: str) -> bool:
    return len(text) >= 8 and text.isascii() and text.isprintable() and text == text.strip()


def _allowed(host: str) -> str:
    # a bare IPv6 address needs brackets in a URL
    name = host_name(f"[{host}]" if host.count(":") > 1 and "[" not in host else host)
    if not name:
        raise PatchloomError(f"allowed_hosts must be names like models.example.org, not {host!r}.")
    return name


def host_name(host: str) -> str:
    """The name in a Host header, in lower case and without the port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether a name or an address means this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
