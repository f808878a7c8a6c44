"""A page with queries and their neighbours, pictures included, in one HTML file that needs no network."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from patchloom import temporary
from patchloom.data.images import as_picture
from patchloom.data.opening import open_source
from patchloom.data.sources import Item, Source
from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.pages import data_url, html_page
from patchloom.reading import read_file

if TYPE_CHECKING:
    from patchloom.search.index import Index

SIDE = 160  # pixels of a picture in the page
# frame colours: the finest level that agrees is green, the next orange, then lighter ones; grey where none does
COLOURS = ("#2e9e44", "#e08a1e", "#f0c36a", "#f7e2b8")
NONE = "#9aa3b0"


class Pictures:
    """The images of an index by key, for showing them: from their files, or from the data set they came from."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    @cached_property
    def _source(self) -> Source | None:
        with suppress(PatchloomError):
            return open_source(self.data["where"], targets="none") if self.data.get("where") else None
        return None

    def path(self, key: str) -> Path | None:
        """The file of an image, if it has one and it is there."""
        path = Path(self.data.get("root") or "", key)
        return path if path.is_absolute() and path.is_file() else None

    def read(self, key: str) -> Image.Image | None:
        """The image; None if it is not there any more."""
        with suppress(PatchloomError):
            path = self.path(key)
            if path is not None:
                picture = as_picture(path)
                return picture if isinstance(picture, Image.Image) else None
            return None if self._source is None else self._source.read(Item(key))
        return None

    def stored(self, key: str, most: int) -> bytes | Image.Image | None:
        """An image as it is stored: the bytes of a file of at most `most` bytes, or the picture where the data set has
        no files. None if it is not there any more or larger."""
        path = self.path(key)
        with suppress(PatchloomError, OSError):
            if path is not None:
                return read_file(path, most)
            if self.data.get("root") is None and self._source is not None:
                item = Item(key)
                return self._source.data(item) or self._source.read(item)
        return None


def thumbnail(image: Image.Image | None, side: int = SIDE) -> str:
    """An image as a data URL, at most `side` pixels long; a grey box for one that is missing."""
    if image is None:
        return data_url(_MISSING.encode(), "image/svg+xml")
    small = image.convert("RGB")
    small.thumbnail((side, side))
    if max(small.size) < 64:  # small images would be blurred by the browser, and damaged by JPEG
        file, kind = io.BytesIO(), "png"
        small.save(file, "PNG")
    else:
        file, kind = io.BytesIO(), "jpeg"
        small.save(file, "JPEG", quality=85)
    return data_url(file.getvalue(), f"image/{kind}")


_MISSING = (
    "<svg xmlns='http://www.w3.org/2000/svg' width='64' height='64'><rect width='64' height='64' fill='#ccc'/></svg>"
)


def frame(labels: Mapping[str, str | None], truth: Mapping[str, str | None], fine_to_coarse: Sequence[str]) -> str:
    """The colour of a result's frame: the finest level at which its label is that of the query (Fig. 2.7)."""
    for level, column in enumerate(fine_to_coarse):
        if truth.get(column) is not None and labels.get(column) == truth[column]:
            return COLOURS[min(level, len(COLOURS) - 1)]
    return NONE


def write_gallery(
    index: Index, results: Sequence[Mapping[str, Any]], path: str | PathLike[str], title: str = "Neighbours"
) -> None:
    """Write what `Index.query` returned as a page: each query with its ranked neighbours.

    The frame of a neighbour has the colour of the finest label column that agrees with the query: with its label if the
    query is an image of the index, else with the class that its neighbours give it.
    """
    pictures = Pictures(index.header.data)
    columns = sorted(index.columns, key=lambda name: -len(index.columns[name].names))
    places = {key: place for place, key in enumerate(index.contents.keys)}
    rows = "".join(_row(index, found, pictures, columns, places) for found in results)
    _write(Path(path), title, _legend(columns) + rows)


def write_sections(
    pictures: Pictures, sections: Sequence[tuple[str, Sequence[str]]], path: str | PathLike[str], title: str
) -> None:
    """Write a page with a heading and the pictures of some keys, section after section."""
    body = "".join(
        f"<h2>{escape(heading)}</h2><div class=row>"
        + "".join(_figure(pictures.read(key), "var(--line)", escape(_short(key))) for key in keys)
        + "</div>"
        for heading, keys in sections
    )
    _write(Path(path), title, body)


def _write(path: Path, title: str, body: str) -> None:
    with errors_in_writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(path, html_page(title, f"{_STYLE}<h1>{escape(title)}</h1>{body}"))


_STYLE = (
    "<style>.row{display:grid;grid-template-columns:repeat(auto-fill,minmax(8rem,1fr));gap:.7rem;margin:1rem 0 2rem}"
    ".row figure{margin:0;font-size:.8rem}.row img{width:100%;aspect-ratio:1;object-fit:contain;border:5px solid;"
    "box-sizing:border-box;background:#8882}.swatch{display:inline-block;width:1em;height:1em;margin:0 .4em 0 1em;"
    "vertical-align:-.1em}</style>"
)


def _legend(columns: Sequence[str]) -> str:
    if not columns:
        return ""
    marks = [(COLOURS[min(i, len(COLOURS) - 1)], f"same {name}") for i, name in enumerate(columns)]
    swatches = "".join(
        f'<span class=swatch style="background:{colour}"></span>{escape(text)}'
        for colour, text in [*marks, (NONE, "other")]
    )
    return f"<p class=soft>Frames:{swatches}</p>"


def _row(
    index: Index, found: Mapping[str, Any], pictures: Pictures, columns: Sequence[str], places: Mapping[str, int]
) -> str:
    truth = _labels_of_query(index, found, places)
    guesses = "".join(f"<br>{escape(name)}: {escape(str(value))}" for name, value in truth.items() if value)
    query = _figure(
        _query_picture(found["query"]), "var(--ink)", f"<b>query</b><br>{escape(_short(found['query']))}{guesses}"
    )
    results = "".join(
        _figure(
            pictures.read(result["key"]),
            frame(result["labels"], truth, columns),
            f"{rank}. {result['score']:.3f} {escape(_short(result['key']))}"
            + "".join(f"<br>{escape(str(result['labels'][name]))}" for name in columns if result["labels"][name]),
        )
        for rank, result in enumerate(found["results"], 1)
    )
    return f"<div class=row>{query}{results}</div>"


def _labels_of_query(index: Index, found: Mapping[str, Any], places: Mapping[str, int]) -> dict[str, str | None]:
    """The labels of a query that is in the index; else its likeliest classes."""
    root = index.header.data.get("root")
    named = Path(str(found["query"])).absolute()
    key = named.relative_to(root).as_posix() if root and named.is_relative_to(root) else named.as_posix()
    if key in places:
        return index.contents.labels(places[key])
    return {column: next(iter(votes), None) for column, votes in found["knn"].items()}


def _query_picture(name: str) -> Image.Image | None:
    with suppress(PatchloomError):
        picture = as_picture(name)
        return picture if isinstance(picture, Image.Image) else None
    return None


def _figure(image: Image.Image | None, colour: str, caption: str) -> str:
    return (
        f'<figure><img alt="" src="{thumbnail(image)}" style="border-color:{colour}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _short(name: str) -> str:
    return Path(name).name
