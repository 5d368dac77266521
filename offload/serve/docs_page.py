"""/docs: the schema of /openapi.json as a page that needs nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; } table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #ccc; padding: .25rem .5rem; vertical-align: top; }
div { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #eee; }
a { color: #9db8ff; } }
"""
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def docs_page(schema: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI schema: its routes, then the objects that these take and give."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>",
            '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
            *_routes(schema["paths"]),
            "<h1>Objects</h1>",
            *_objects(schema["components"]["schemas"]),
        )
    )


def _routes(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            if "requestBody" in operation:
                yield f"<p>Body: {_of_content(operation['requestBody'])}</p>"
            for status, answer in operation["responses"].items():
                yield f"<p>{escape(status)}: {_of_content(answer)}</p>"


def _of_content(holder: Mapping[str, Any]) -> str:
    kinds = holder.get("content", {}).items()
    return ", ".join(f"{_type(kind.get('schema', {}))} as {escape(name)}" for name, kind in kinds)


def _objects(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
        yield f"<p>{escape(schema.get('description', ''))}</p>"
        if "properties" not in schema:
            yield f"<p>{_type(schema)}</p>"
            continue
        yield "<div><table>"
        for field, of_field in schema["properties"].items():
            needed = "required" if field in schema.get("required", ()) else _default(of_field)
            about = escape(of_field.get("description", ""))
            cells = f"<code>{escape(field)}</code>", _type(of_field), needed, about
            yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        yield "</table></div>"


def _default(field: Mapping[str, Any]) -> str:
    return f"default {escape(json.dumps(field['default']))}" if "default" in field else ""


def _type(schema: Mapping[str, Any]) -> str:
    """What a value may be, with links to objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(map(_type, schema[key]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(escape(json.dumps(value)) for value in values)
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    limits = [f"{sign} {schema[name]:g}" for name, sign in _LIMITS.items() if name in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *limits]))
