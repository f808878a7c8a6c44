"""From the body of a request to a decoded image, refusing early: size while it streams, format and pixels from the
header, and only then the pixels themselves."""

from __future__ import annotations

import asyncio
import io
import re
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import python_multipart
from PIL import Image, UnidentifiedImageError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from patchloom.data.decoding import UnreadableImage, decode, readable_formats
from patchloom.data.images import LONGEST
from patchloom.serve.settings import Settings

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORMATS = frozenset({"PNG", "JPEG", "MPO", "GIF", "BMP", "WEBP", "TIFF"})  # MPO: the JPEG of some phones
NAMES = "PNG, JPEG, GIF, BMP, WEBP or TIFF"
_AROUND = 64 * 1024  # what a multipart body may hold besides the file
_OTHER_PARTS, _MOST_HEADERS = 15, 16 * 1024  # parsed byte by byte, in the event loop
_GRACE = 5.0  # seconds before the rate of an upload is looked at
_MOST_SCANS, _MOST_SCANNED = 64, 1_000_000_000  # of a JPEG: scans, and pixels times scans; an encoder makes some ten

_HEADER_SECONDS = 2.0
_PIXELS_PER_SECOND, _SCANNED_PER_SECOND = 100e6, 500e6  # about what decoders do on one core
_BYTES_PER_SECOND = 10e6  # much faster in a photo, slower in a file made of nothing but markers
_CHEAP = 0.05  # seconds

_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # no stuffed byte, no restart marker, no filling


class Refused(Exception):
    """An answer other than 200: a status code and a sentence for the client."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = retry_after


def check_announced(request: Request, settings: Settings, most_files: int) -> None:
    """Refuse a body that says that it is too long, or says two things. Nothing is reserved for what it announces."""
    said = request.headers.get("content-length", "")
    if said and "transfer-encoding" in request.headers:
        raise Refused(400, "A body has a Content-Length or a Transfer-Encoding, not both.")
    if said.isascii() and said.isdigit() and int(said) > _most_bytes(settings, most_files):
        raise _too_long(settings)


async def read_upload(
    request: Request, settings: Settings, reserve: Callable[[int], None], most_files: int = 1
) -> list[bytes]:
    """The bytes of every field `file` of a multipart body; nothing is written to the disk.

    `reserve` is called with the size of each piece as it arrives, and may refuse it. With most_files = 1 nothing after
    the first file is looked at.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise Refused(415, "Send the image as multipart/form-data, in a field named file.")
    files = _Files("file", settings, most_files)
    try:
        await _parse(request, boundary, files, reserve)
    except (FormParserError, ValueError):
        raise Refused(400, "The body is not valid multipart/form-data.") from None
    except ClientDisconnect:
        raise Refused(400, "The client went away.") from None
    if files.cut_off:
        raise Refused(400, "The body is not valid multipart/form-data: it ends within a file.")
    if not files.complete:
        raise Refused(422, "The body has no field named file.")
    return files.complete


async def _parse(request: Request, boundary: bytes, files: _Files, reserve: Callable[[int], None]) -> None:
    total, most, begun = 0, _most_bytes(files.settings, files.most), time.monotonic()
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
    """None at the end. Refused when it takes longer than an upload may, or comes more slowly."""
    settings = files.settings
    longest = settings.upload_timeout * (len(files.complete) + 1)
    slowest = _GRACE + total / settings.min_upload_rate
    try:
        return await asyncio.wait_for(anext(stream), begun + min(longest, slowest) - time.monotonic())
    except StopAsyncIteration:
        return None
    except asyncio.TimeoutError:  # the built-in one only since Python 3.11
        if longest <= slowest:
            raise Refused(408, f"The upload took longer than {longest:g} seconds.") from None
        raise Refused(408, f"The upload is slower than {settings.min_upload_rate:g} bytes per second.") from None


def _most_bytes(settings: Settings, files: int) -> int:
    """Of a body with so many files."""
    return min(files * settings.max_bytes, settings.max_queue_bytes) + _AROUND


def _too_long(settings: Settings) -> Refused:
    return Refused(413, f"A file has at most {settings.max_bytes / 1e6:g} MB.")


class _Complete(Exception):
    """All files are there; nothing else of the body matters."""


class _Files:
    """Collects the files of a multipart body, the parts of one name; other parts are passed over."""

    def __init__(self, name: str, settings: Settings, most: int) -> None:
        self.name = name.encode()
        self.settings = settings
        self.most = most
        self.complete: list[bytes] = []
        self._data = bytearray()
        self._inside = False
        self._parts = 0
        self._header_bytes = 0
        self._header: tuple[bytes, bytes] = (b"", b"")

    def callbacks(self) -> MultipartCallbacks:
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
        if self._parts > _OTHER_PARTS + self.most:
            raise Refused(400, f"A body has at most {_OTHER_PARTS + self.most} parts.")

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADERS:
            raise Refused(400, f"The headers of the parts have at most {_MOST_HEADERS} bytes.")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
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
        if self._inside and len(self.complete) == self.most:
            raise Refused(413, f"A request has at most {self.most} files.")

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
        if self.most == 1:
            raise _Complete

    @property
    def cut_off(self) -> bool:
        """Whether a file was begun and not ended."""
        return self._inside


class _Deadline:
    """Files over bytes that cannot be read any more once the time is over.

    Pillow decodes between reads of 64 KB, and walks through chunks and markers one read at a time: a file that is made
    to take long ends there.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def open(self, data: bytes) -> io.BytesIO:
        return _TimedFile(data, self)


class _TimedFile(io.BytesIO):
    def __init__(self, data: bytes, deadline: _Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        if self._deadline.is_over:
            raise OSError("it takes too long to decode")
        return super().read(size)


def check_header(data: bytes, settings: Settings) -> float:
    """Refuse what is no image of a known format, or has too many pixels, without decoding any.

    What decoding it will cost.
    """
    if not data:
        raise Refused(422, "The file is empty.")
    size, scans = _webp_size(data), 1  # Pillow makes room for the whole image when it opens one
    deadline = _Deadline(min(_HEADER_SECONDS, settings.decode_timeout))
    if size is None:
        try:
            with Image.open(deadline.open(data), formats=readable_formats(FORMATS)) as image:
                size = image.size
                scans = _check_scans(image, data)
        except UnidentifiedImageError:
            raise Refused(415, f"The file is not an image that is read here: {NAMES}.") from None
        except Image.DecompressionBombError:
            size = (settings.max_pixels + 1, 1)
        except Refused:
            raise
        except Exception:  # damaged headers make Pillow raise errors of every kind
            raise _too_slow() if deadline.is_over else Refused(422, "The image is damaged.") from None
    if size[0] * size[1] > settings.max_pixels:
        raise Refused(413, f"An image has at most {settings.max_pixels / 1e6:g} million pixels.")
    if max(size) > LONGEST * max(1, min(size)):
        raise Refused(422, f"An image is at most {LONGEST} times as long as wide, not {size[0]} x {size[1]}.")
    return decoding_cost(len(data), size[0] * size[1], scans)


def decoding_cost(size: int, pixels: int = 0, scans: int = 1) -> float:
    """About how many seconds a file of so many bytes takes; 0 if it is too little to matter."""
    seconds = size / _BYTES_PER_SECOND + pixels / _PIXELS_PER_SECOND + pixels * scans / _SCANNED_PER_SECOND
    return seconds if seconds > _CHEAP else 0.0


def _too_slow() -> Refused:
    return Refused(422, "The image takes too long to decode.")


def _check_scans(image: Image.Image, data: bytes) -> int:
    """Every scan of a JPEG passes over all its pixels, and takes no more than ten bytes of the file: how many."""
    scans = count_scans(data) if image.format in ("JPEG", "MPO") else 1
    if scans > _MOST_SCANS or scans * image.width * image.height > _MOST_SCANNED:
        raise Refused(422, f"The image has {scans} scans, too many for {image.width} x {image.height} pixels.")
    return scans


def count_scans(data: bytes) -> int:
    """Scans of the first image in a JPEG file: markers are followed as libjpeg does, segments are passed over."""
    scans, place = 0, 2
    while found := _MARKER.search(data, place):
        place, marker = found.end(), data[found.end() - 1]
        if marker == _EOI:
            break
        scans += marker == _SOS
        if marker > 0xBF and marker != _SOI:  # has a segment, whose first two bytes are its length
            place += int.from_bytes(data[place : place + 2], "big")
    return scans


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height from the header of a WEBP file, None if it is none (RFC 9649)."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":  # 24 bits each, less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # 14 bits each, less one, after a signature byte
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[26:30])
    return width & 0x3FFF, height & 0x3FFF


def decode_upload(data: bytes, settings: Settings) -> Image.Image:
    """An image whose header was checked, RGB and upright. Meant for a thread beside the event loop."""
    deadline = _Deadline(settings.decode_timeout)
    try:
        return decode(data, "The upload", deadline.open)
    except UnreadableImage:
        damaged = Refused(422, "The image is damaged and cannot be decoded.")
        raise _too_slow() if deadline.is_over else damaged from None
