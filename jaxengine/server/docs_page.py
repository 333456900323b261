"""/docs: the routes as one page without scripts, made from /openapi.json. The usual pages load
scripts from elsewhere, which on this origin could read the chat page's conversations and its key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import RedirectResponse, Response

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "summary{cursor:pointer;padding:.3rem 0}code{font-family:ui-monospace,monospace}"
    "pre{overflow:auto;padding:.6rem;border:1px solid #8884;border-radius:.4rem}"
    "table{border-collapse:collapse}td{vertical-align:top;padding:.1rem .8rem .1rem 0}"
    ".method{display:inline-block;width:4.5rem;font-weight:600}"
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def install(app: FastAPI) -> None:
    """Add /docs, and /redoc, which leads there."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        page = docs_html(request.app.openapi())
        return Response(page, media_type="text/html", headers=HEADERS)

    @router.get("/redoc")
    async def redoc(request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + "/docs")

    app.include_router(router)


def docs_html(schema: dict[str, Any]) -> str:
    """The page of an OpenAPI description."""
    info = schema["info"]
    title = f"{info['title']} {info['version']}"
    routes = "".join(_routes(schema))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>. '
        f"Errors have OpenAI's form, below /v1/messages Anthropic's.</p>{routes}</html>"
    )


def _routes(schema: dict[str, Any]) -> Iterator[str]:
    parts = schema.get("components", {}).get("schemas", {})
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            said = operation.get("description") or operation.get("summary", "")
            yield (
                f'<details><summary><span class="method">{method.upper()}</span>'
                f"<code>{escape(path)}</code></summary><p>{escape(said)}</p>"
                f"{_parameters(operation)}{_body(operation, parts)}{_answers(operation)}</details>"
            )


def _parameters(operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>in the {escape(p['in'])}</td>"
        f"<td>{escape(_kind(p.get('schema', {})))}</td></tr>"
        for p in operation.get("parameters", ())
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _body(operation: dict[str, Any], parts: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    schema = parts.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    needed = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(part))}</td>"
        f"<td>{'required' if name in needed else ''}</td></tr>"
        for name, part in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _answers(operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(status)}</td><td>{escape(answer.get('description', ''))}</td></tr>"
        for status, answer in operation["responses"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in few words."""
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_kind(part) for part in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    kind = schema.get("type", "any")
    return f"list of {_kind(schema.get('items', {}))}" if kind == "array" else str(kind)
