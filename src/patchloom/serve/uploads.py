"""Reading of uploads: the files of a multipart body, refused early if they are too large or arrive too slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import python_multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from patchloom.serve.refused import Refused
from patchloom.serve.settings import Settings

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_OVERHEAD = 64 * 1024  # bytes that a multipart body may have besides the files
# limits on parts and headers, which are parsed byte by byte in the event loop
_OTHER_PARTS, _MAX_HEADER_BYTES = 15, 16 * 1024
_GRACE = 5.0  # seconds before the rate of an upload is checked


def check_announced(request: Request, settings: Settings, max_files: int) -> None:
    """Refuse a body whose headers announce too many bytes or contradict each other.

    Nothing is reserved for announced bytes: a client that announces much and sends nothing must not block others.
    """
    announced = request.headers.get("content-length", "")
    if announced and "transfer-encoding" in request.headers:
        raise Refused(400, "Send either Content-Length or Transfer-Encoding, not both.")
    # isdigit() alone is true for other scripts' digits, which int() would accept.
    if announced.isascii() and announced.isdigit() and int(announced) > _max_body(settings, max_files):
        raise _too_long(settings)


async def read_upload(
    request: Request, settings: Settings, reserve: Callable[[int], None], max_files: int = 1
) -> list[bytes]:
    """The bytes of every field `file` of a multipart body, kept in memory only.

    `reserve` is called with the size of each chunk as it arrives, and may raise Refused. With max_files=1 the body is
    read only up to the end of the first file.

    Raises:
        Refused: 400, 408, 413, 415 or 422, with the reason for the client.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise Refused(415, "Send the image as multipart/form-data, in a field named file.")
    files = _Files("file", settings, max_files)
    try:
        await _parse(request, boundary, files, reserve)
    except (FormParserError, ValueError):
        raise Refused(400, "The body is not valid multipart/form-data.") from None
    except ClientDisconnect:
        raise Refused(400, "The client disconnected.") from None
    if files.cut_off:
        raise Refused(400, "The body is not valid multipart/form-data: it ends within a file.")
    if not files.complete:
        raise Refused(422, "The body has no field named file.")
    return files.complete


async def _parse(request: Request, boundary: bytes, files: _Files, reserve: Callable[[int], None]) -> None:
    total, most, begun = 0, _max_body(files.settings, files.max_files), time.monotonic()
    # Parsed while it arrives: a body is never in memory twice, and never on the disk.
    parser = python_multipart.MultipartParser(boundary, files.callbacks())
    stream = request.stream()
    while (chunk := await _next_chunk(stream, files, total, begun)) is not None:
        total += len(chunk)
        if total > most:
            raise _too_long(files.settings)
        reserve(len(chunk))
        try:
            parser.write(chunk)
        except _Complete:
            return
    parser.finalize()


async def _next_chunk(stream: AsyncIterator[bytes], files: _Files, total: int, begun: float) -> bytes | None:
    """The next bytes of the body, None at the end. Raises Refused if the upload takes too long or is too slow."""
    settings = files.settings
    longest = settings.upload_timeout * (len(files.complete) + 1)
    # Slow senders hold a connection and memory: whoever sends less than the minimum rate is cut off.
    slowest = _GRACE + total / settings.min_upload_rate
    try:
        return await asyncio.wait_for(anext(stream), begun + min(longest, slowest) - time.monotonic())
    except StopAsyncIteration:
        return None
    except asyncio.TimeoutError:  # the built-in one only since Python 3.11
        if longest <= slowest:
            raise Refused(408, f"The upload took longer than {longest:g} seconds.") from None
        raise Refused(408, f"The upload is slower than {settings.min_upload_rate:g} bytes per second.") from None


def _max_body(settings: Settings, files: int) -> int:
    """The largest body with this many files."""
    return min(files * settings.max_bytes, settings.max_queue_bytes) + _OVERHEAD


def _too_long(settings: Settings) -> Refused:
    return Refused(413, f"A file can have at most {settings.max_bytes / 1e6:g} MB.")


class _Complete(Exception):
    """Raised by the parser's callback when all files are complete, so that the rest of the body is not read."""


class _Files:
    """Collects the files of a multipart body, that is, the parts of one name; other parts are skipped."""

    def __init__(self, name: str, settings: Settings, max_files: int) -> None:
        self.name = name.encode()
        self.settings = settings
        self.max_files = max_files
        self.complete: list[bytes] = []
        self._data = bytearray()
        self._inside = False
        self._parts = 0
        self._header_bytes = 0
        self._header: tuple[bytes, bytes] = (b"", b"")

    def callbacks(self) -> MultipartCallbacks:
        """The callbacks for python_multipart's parser. Headers and data may arrive in several pieces."""
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
        }

    def _part_begin(self) -> None:
        self._inside, self._header = False, (b"", b"")
        self._parts += 1
        if self._parts > _OTHER_PARTS + self.max_files:
            raise Refused(400, f"A body can have at most {_OTHER_PARTS + self.max_files} parts.")

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise Refused(400, f"The headers of the parts can have at most {_MAX_HEADER_BYTES} bytes.")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        # Each piece is counted first: a header of gigabytes in small pieces is refused early.
        self._header = (self._header[0] + data[start:end], self._header[1])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _header_end(self) -> None:
        key, value = self._header
        self._header = (b"", b"")
        if key.lower() == b"content-disposition":
            _, options = parse_options_header(value)
            self._inside = options.get(b"name") == self.name
        if self._inside and len(self.complete) == self.max_files:
            raise Refused(413, f"A request can have at most {self.max_files} files.")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._inside:
            self._data += data[start:end]
            if len(self._data) > self.settings.max_bytes:
                raise _too_long(self.settings)

    def _part_end(self) -> None:
        if not self._inside:
            return
        self.complete.append(bytes(self._data))
        self._data.clear()
        self._inside = False
        if self.max_files == 1:
            raise _Complete

    @property
    def cut_off(self) -> bool:
        """Whether the body ended within a file."""
        return self._inside
