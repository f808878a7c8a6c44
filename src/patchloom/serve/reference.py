"""The page /docs, generated from the OpenAPI description: every route, its parameters and responses.

Written by hand because FastAPI's own pages load scripts from a server on the internet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

Schema = dict[str, Any]

_FRAME = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title} {version}: the API</title>
  <link rel="icon" href="icon.svg">
  <link rel="stylesheet" href="style.css">
</head>
<body>
  <header class="top">
    <p class="brand"><img src="icon.svg" alt="" width="28" height="28"><span>{title}</span></p>
    <p class="tagline">The API of version {version}</p>
  </header>
  <main class="reference">
    <section class="card">
      <h1>{description}</h1>
      <p>Responses are JSON. Every error is <code>{{"error": "a sentence"}}</code>. If the service has a
      token, send <code>Authorization: Bearer TOKEN</code>.</p>
      <pre>{examples}</pre>
      <nav><ul>{contents}</ul></nav>
    </section>
    {routes}
    <section class="card" id="responses"><h2>Objects in the responses</h2>{schemas}</section>
  </main>
  <footer class="muted"><a href="./">The page</a><a href="openapi.json">For programs: openapi.json</a></footer>
</body>
</html>
"""
_EXAMPLES = (
    "curl -F file=@photo.jpg 'http://127.0.0.1:8000/api/predict?top=3'",
    "curl -F file=@one.jpg -F file=@two.jpg http://127.0.0.1:8000/api/predict",
    "curl -F file=@photo.jpg 'http://127.0.0.1:8000/api/explain?maps=rollout&faithfulness=false'",
)
_SEARCH_EXAMPLE = "curl -F file=@photo.jpg 'http://127.0.0.1:8000/api/search?k=5'"


def reference_page(description: Schema) -> str:
    """The HTML page of an OpenAPI description."""
    routes = [
        (method.upper(), path, route)
        for path, methods in description["paths"].items()
        for method, route in methods.items()
    ]
    examples = [*_EXAMPLES, *([_SEARCH_EXAMPLE] if "/api/search" in description["paths"] else [])]
    # Objects without fields, such as unions, are described where they are used.
    schemas = {name: schema for name, schema in description["components"]["schemas"].items() if "properties" in schema}
    return _FRAME.format(
        title=escape(description["info"]["title"]),
        version=escape(description["info"]["version"]),
        description=escape(description["info"]["description"]),
        examples=escape("\n".join(examples)),
        contents="".join(_entry(*route) for route in routes),
        routes="".join(_route(*route) for route in routes),
        schemas="".join(_object(name, schema) for name, schema in schemas.items()),
    )


def _entry(method: str, path: str, route: Schema) -> str:
    link = f'<a href="#{_mark(method, path)}"><code>{method} {escape(path)}</code></a>'
    return f"<li>{link} <span class='muted'>{escape(route['summary'])}</span></li>"


def _route(method: str, path: str, route: Schema) -> str:
    parts = [f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(route['summary'])}.</p>"]
    if body := route.get("requestBody"):
        kind, content = next(iter(body["content"].items()))
        fields = (
            (name, _type(schema), _description(schema)) for name, schema in content["schema"]["properties"].items()
        )
        parts.append(_table(f"Body, {kind}", ("part", "type", ""), fields))
    if parameters := route.get("parameters"):
        rows = ((one["name"], _type(one["schema"]), _description({**one["schema"], **one})) for one in parameters)
        parts.append(_table("Parameters", ("name", "type", ""), rows))
    responses = ((status, _content(one), _meaning(status, one)) for status, one in route["responses"].items())
    parts.append(_table("Responses", ("status", "content", ""), responses))
    return f'<section class="card" id="{_mark(method, path)}">{"".join(parts)}</section>'


def _object(name: str, schema: Schema) -> str:
    rows = ((field, _type(inner), _description(inner)) for field, inner in schema["properties"].items())
    description = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>{description}{_table("", ("field", "type", ""), rows)}'


def _table(title: str, heads: Iterable[str], rows: Iterable[tuple[str, str, str]]) -> str:
    """A table with rows of a name (plain text), a type and a description (both HTML)."""
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr><td><code>{escape(a)}</code></td><td>{b}</td><td>{c}</td></tr>" for a, b, c in rows)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _meaning(status: str, response: Schema) -> str:
    return "" if status == "200" else escape(response["description"])


def _content(response: Schema) -> str:
    contents = response.get("content", {})
    return " or ".join(_type(one["schema"]) if one.get("schema") else escape(kind) for kind, one in contents.items())


def _type(schema: Schema) -> str:
    """The type of a value as HTML; objects are links to their fields."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if schema.get("type") == "array":
        inner = schema.get("items") or {"anyOf": schema.get("prefixItems", [])}
        return f"list of {_type(inner)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return "file" if schema.get("format") == "binary" else escape(schema.get("type", "value"))


def _description(schema: Schema) -> str:
    default = f" (default {schema['default']})" if schema.get("default") is not None else ""
    return escape(schema.get("description", "") + default)


def _mark(method: str, path: str) -> str:
    return re.sub(r"\W+", "-", f"{method.lower()}{path}").strip("-")
