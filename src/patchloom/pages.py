"""Pages in one HTML file that needs no network: their style, the script that shows values of charts on hover, and
images inside them."""

from __future__ import annotations

import base64
from html import escape
from importlib.resources import files


def html_page(title: str, body: str) -> str:
    """A page with the style of reports and charts that show values on hover, in one file."""
    # Both are put into the page, so that one file can be sent and opened anywhere.
    style, script = ((files("patchloom") / f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{style}</style><body>{body}<script>{script}</script></body></html>\n"
    )


def data_url(data: bytes, media_type: str) -> str:
    """The bytes of an image as a URL that holds them; `media_type` is image/png or the like."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
