"""Lets requests to /monarch/ through that come from ComfyUI's own page, or from a program that is no browser."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

_MAX_BODY_BYTES = 64 * 1024

Body = dict[str, Any]


class Refused(Exception):
    """The request is answered with this sentence and status."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


def reading(handler: Callable[[web.Request], Awaitable[Body]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A route that changes nothing: answers what `handler` gives, as JSON."""

    async def answer(request: web.Request) -> web.Response:
        return await _answer(request, lambda: handler(request))

    return answer


def changing(
    handler: Callable[[web.Request, Body], Awaitable[Body]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A route that changes something: `handler` is also given the JSON object that the request has to carry."""

    async def checked(request: web.Request) -> Body:
        return await handler(request, await _body(request))

    async def answer(request: web.Request) -> web.Response:
        return await _answer(request, lambda: checked(request))

    return answer


async def _answer(request: web.Request, handler: Callable[[], Awaitable[Body]]) -> web.Response:
    try:
        _require_same_origin(request)
        return web.json_response({"ok": True, **await handler()}, headers={"Cache-Control": "no-store"})
    except Refused as refusal:
        return web.json_response({"ok": False, "error": str(refusal)}, status=refusal.status)
    except Exception:
        # What went wrong is for the log: an exception's text may name files.
        logging.exception("Monarch: %s failed", request.path)
        return web.json_response({"ok": False, "error": "it failed; ComfyUI's log says why"}, status=500)


def _require_same_origin(request: web.Request) -> None:
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    # What a person typed into the address bar comes from no site; such requests are GET.
    if site != "same-origin" and not (site == "none" and request.method == "GET"):
        raise Refused("a page of another site cannot use Monarch", 403)
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower():
        raise Refused("a page of another site cannot use Monarch", 403)


async def _body(request: web.Request) -> Body:
    # Pages of other sites can send forms and plain text without asking, JSON they cannot.
    if request.content_type != "application/json":
        raise Refused("the body has to be application/json", 415)
    data = b""
    async for chunk in request.content.iter_chunked(_MAX_BODY_BYTES):
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise Refused("the body is too large", 413)
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refused("the body has to be a JSON object")
    return body


def text_of(body: Body, name: str, most: int = 4096) -> str:
    """A text of the body. Raises Refused if it is missing, empty or too long."""
    value = body.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"the {name} is missing")
    if len(value) > most:
        raise Refused(f"the {name} is too long")
    return value.strip()
