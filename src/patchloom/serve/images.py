"""From the bytes of an upload to a decoded image: format, pixels and cost are checked from the header first."""

from __future__ import annotations

import io
import re
import struct
import time

from PIL import Image, UnidentifiedImageError

from patchloom.data.decoding import UnreadableImage, decode, readable_formats
from patchloom.data.images import LONGEST
from patchloom.serve.refused import Refused
from patchloom.serve.settings import Settings

FORMATS = frozenset({"PNG", "JPEG", "MPO", "GIF", "BMP", "WEBP", "TIFF"})  # MPO: the JPEG of some phones
NAMES = "PNG, JPEG, GIF, BMP, WEBP or TIFF"

# of a JPEG: scans, and pixels times scans; encoders write about ten scans
_MAX_SCANS, _MAX_SCANNED = 64, 1_000_000_000
_HEADER_SECONDS = 2.0
_PIXELS_PER_SECOND, _SCANNED_PER_SECOND = 100e6, 500e6  # rough speed of decoders on one core
_BYTES_PER_SECOND = 10e6  # much faster for a photo, slower for a file that consists of markers only
_CHEAP = 0.05  # seconds

_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA  # JPEG markers: start of image, end of image, start of scan
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # not a stuffed byte, a restart marker or padding


class _Deadline:
    """Opens bytes as files that raise OSError on reading once the time is over.

    Pillow decodes between reads of 64 KB and reads chunks and markers one by one, so this also ends the decoding of a
    file that was made to take long.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.end

    def open(self, data: bytes) -> io.BytesIO:
        """A file over `data` that obeys the deadline."""
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
    """Refuse a file that is not an image of a known format or has too many pixels, without decoding it.

    Returns the cost of decoding, see `decoding_cost`.

    Raises:
        Refused: 413, 415 or 422, with the reason for the client.
    """
    if not data:
        raise Refused(422, "The file is empty.")
    # opening a WEBP file with Pillow allocates the whole image, so its size is read here
    size, scans = _webp_size(data), 1
    deadline = _Deadline(min(_HEADER_SECONDS, settings.decode_timeout))
    if size is None:
        try:
            with Image.open(deadline.open(data), formats=readable_formats(FORMATS)) as image:
                size = image.size
                scans = _check_scans(image, data)
        except UnidentifiedImageError:
            raise Refused(415, f"The file is not an image of a supported format: {NAMES}.") from None
        except Image.DecompressionBombError:
            size = (settings.max_pixels + 1, 1)
        except Refused:
            raise
        except Exception:  # damaged headers make Pillow raise all kinds of errors
            raise _too_slow() if deadline.is_over else Refused(422, "The image is damaged.") from None
    if size[0] * size[1] > settings.max_pixels:
        raise Refused(413, f"An image can have at most {settings.max_pixels / 1e6:g} million pixels.")
    if max(size) > LONGEST * max(1, min(size)):
        raise Refused(422, f"An image can be at most {LONGEST} times as long as wide, not {size[0]} x {size[1]}.")
    return decoding_cost(len(data), size[0] * size[1], scans)


def decoding_cost(size: int, pixels: int = 0, scans: int = 1) -> float:
    """Estimated seconds to decode a file of `size` bytes; 0 if they are negligible."""
    # Bytes are parsed, pixels are written once, and each scan of a progressive JPEG visits all of them again.
    seconds = size / _BYTES_PER_SECOND + pixels / _PIXELS_PER_SECOND + pixels * scans / _SCANNED_PER_SECOND
    return seconds if seconds > _CHEAP else 0.0


def _too_slow() -> Refused:
    return Refused(422, "The image takes too long to decode.")


def _check_scans(image: Image.Image, data: bytes) -> int:
    """The number of scans of an image; refuses too many.

    Decoding a scan of a JPEG visits all pixels, while a scan can have as few as ten bytes in the file.
    """
    scans = count_scans(data) if image.format in ("JPEG", "MPO") else 1
    if scans > _MAX_SCANS or scans * image.width * image.height > _MAX_SCANNED:
        raise Refused(422, f"The image has {scans} scans, too many for {image.width} x {image.height} pixels.")
    return scans


def count_scans(data: bytes) -> int:
    """The number of scans of the first image in a JPEG file: follows markers and skips segments as libjpeg does."""
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
    """Width and height from the header of a WEBP file (RFC 9649); None for other files."""
    # RIFF, size, "WEBP", then the first chunk: VP8X (extended), VP8L (lossless) or VP8 (lossy).
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":  # 24 bits each, less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # 14 bits each, less one, after a signature byte
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[26:30])
    # 14 bits each; the two above are a scale that decoders ignore.
    return width & 0x3FFF, height & 0x3FFF


def decode_upload(data: bytes, settings: Settings) -> Image.Image:
    """Decode an image whose header was checked, to RGB and upright. Call it in a thread, not in the event loop.

    Raises:
        Refused: 422 if the image is damaged or takes longer than `decode_timeout`.
    """
    deadline = _Deadline(settings.decode_timeout)
    try:
        return decode(data, "The upload", deadline.open)
    except UnreadableImage:
        damaged = Refused(422, "The image is damaged and cannot be decoded.")
        raise _too_slow() if deadline.is_over else damaged from None
