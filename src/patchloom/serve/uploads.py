"""From the body of a request to a decoded image, refusing early: size while it streams, format and pixels from the
header, and only then the pixels themselves."""

from __future__ import annotations

import asyncio
import io
import re
import struct
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
_MOST_PARTS, _MOST_HEADERS = 16, 16 * 1024  # parsed byte by byte, in the event loop
_MOST_SCANS, _MOST_SCANNED = 64, 1_000_000_000  # of a JPEG: scans, and pixels times scans; an encoder makes some ten

_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # no stuffed byte, no restart marker, no filling


class Refused(Exception):
    """An answer other than 200: a status code and a sentence for the client."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = retry_after


def announced_bytes(request: Request, settings: Settings) -> int:
    """How long the body will be, at most; refused where it says that it is too long, or says two things."""
    said = request.headers.get("content-length", "")
    if said and "transfer-encoding" in request.headers:
        raise Refused(400, "A body has a Content-Length or a Transfer-Encoding, not both.")
    length = int(said) if said.isascii() and said.isdigit() else settings.max_bytes
    if length > settings.max_bytes + _AROUND:
        raise _too_long(settings)
    return length


async def read_upload(request: Request, settings: Settings) -> bytes:
    """The bytes of the field `file` of a multipart body; nothing is written to the disk."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise Refused(415, "Send the image as multipart/form-data, in a field named file.")
    field = _Field("file")
    try:
        await asyncio.wait_for(_parse(request, boundary, field, settings), settings.upload_timeout)
    except asyncio.TimeoutError:  # the built-in one only since Python 3.11
        raise Refused(408, f"The upload took longer than {settings.upload_timeout:g} seconds.") from None
    except (FormParserError, ValueError):
        raise Refused(400, "The body is not valid multipart/form-data.") from None
    except ClientDisconnect:
        raise Refused(400, "The client went away.") from None
    if len(field.data) > settings.max_bytes:
        raise _too_long(settings)
    if not field.found:
        raise Refused(422, "The body has no field named file.")
    return bytes(field.data)


async def _parse(request: Request, boundary: bytes, field: _Field, settings: Settings) -> None:
    """Up to the end of the field; what comes after it is not looked at."""
    total = 0
    parser = python_multipart.MultipartParser(boundary, field.callbacks())
    async for chunk in request.stream():
        total += len(chunk)
        if total > settings.max_bytes + _AROUND:
            raise _too_long(settings)
        try:
            parser.write(chunk)
        except _Complete:
            return
    parser.finalize()


def _too_long(settings: Settings) -> Refused:
    return Refused(413, f"An upload has at most {settings.max_bytes / 1e6:g} MB.")


class _Complete(Exception):
    """The field is there; nothing else of the body matters."""


class _Field:
    """Collects one field of a multipart body; other fields are passed over, of a repeated one the first counts."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.data = bytearray()
        self.found = False
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
        if self._parts > _MOST_PARTS:
            raise Refused(400, f"A body has at most {_MOST_PARTS} parts.")

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

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._inside:
            self.data += data[start:end]

    def _part_end(self) -> None:
        if self._inside:
            self.found = True
            raise _Complete


def check_header(data: bytes, settings: Settings) -> None:
    """Refuse what is no image of a known format, or has too many pixels, without decoding any."""
    if not data:
        raise Refused(422, "The file is empty.")
    size = _webp_size(data)  # Pillow makes room for the whole image when it opens one
    if size is None:
        try:
            with Image.open(io.BytesIO(data), formats=readable_formats(FORMATS)) as image:
                size = image.size
                _check_scans(image, data)
        except UnidentifiedImageError:
            raise Refused(415, f"The file is not an image that is read here: {NAMES}.") from None
        except Image.DecompressionBombError:
            size = (settings.max_pixels + 1, 1)
        except Refused:
            raise
        except Exception:  # damaged headers make Pillow raise errors of every kind
            raise Refused(422, "The image is damaged.") from None
    if size[0] * size[1] > settings.max_pixels:
        raise Refused(413, f"An image has at most {settings.max_pixels / 1e6:g} million pixels.")
    if max(size) > LONGEST * max(1, min(size)):
        raise Refused(422, f"An image is at most {LONGEST} times as long as wide, not {size[0]} x {size[1]}.")


def _check_scans(image: Image.Image, data: bytes) -> None:
    """Every scan of a JPEG passes over all its pixels, and takes no more than ten bytes of the file."""
    scans = count_scans(data) if image.format in ("JPEG", "MPO") else 0
    if scans > _MOST_SCANS or scans * image.width * image.height > _MOST_SCANNED:
        raise Refused(422, f"The image has {scans} scans, too many for {image.width} x {image.height} pixels.")


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
    """The image, RGB and upright. Meant for a thread beside the event loop."""
    check_header(data, settings)
    try:
        return decode(data, "The upload")
    except UnreadableImage:
        raise Refused(422, "The image is damaged and cannot be decoded.") from None
