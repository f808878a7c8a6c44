"""What the service is told when it starts: where to listen, whom to answer, and how much it takes on."""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from PIL import Image

from patchloom.errors import PatchloomError


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
    decoders: int = max(2, min(4, os.cpu_count() or 2))  # threads that decode images beside the network

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "port" and isinstance(value, int | float) and not 0 < value < math.inf:
                raise PatchloomError(f"{field.name} is more than 0 and has an end, not {value}.")
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
