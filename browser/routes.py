"""The routes under /monarch/ that the tab uses. None blocks ComfyUI's event loop; guard says who may call them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from .board import Findings, board, shown
from .guard import Body, Refused, changing, reading, text_of
from .names import names
from .server import pages
from .turns import turns


def register(server: Any) -> None:
    """Add the routes to ComfyUI's PromptServer."""
    actions = Actions(server)
    server.routes.get("/monarch/state")(reading(actions.state))
    for name in ("attend", "pair", "forget", "check", "free"):
        server.routes.post(f"/monarch/{name}")(changing(getattr(actions, name)))


class Actions:
    """What each route does: a request and its body in, plain data out; raises Refused."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._watch: Any = None
        self._checking: asyncio.Task[None] | None = None

    async def state(self, request: web.Request) -> Body:
        return await asyncio.to_thread(board.state)

    async def attend(self, request: web.Request, body: Body) -> Body:
        """A page says who it is, and whether it shows the tab."""
        client = text_of(body, "client", 128)
        if client not in self._server.sockets:
            raise Refused("this page is not connected", 409)
        user = self._server.user_manager.get_request_user_id(request)
        pages.note(client, user, is_open=body.get("open") is True)
        await self._look_now()
        return {}

    async def pair(self, request: web.Request, body: Body) -> Body:
        from ..distributed.auth import AuthError
        from ..distributed.pairing import PairingError, pair

        code = text_of(body, "code")
        try:
            worker = await asyncio.to_thread(pair, code)
        except (AuthError, PairingError) as error:
            raise Refused(shown(str(error)), 409) from None
        await self._look_now()
        return {"name": worker.name}

    async def forget(self, request: web.Request, body: Body) -> Body:
        from ..distributed.auth import AuthError, Pairings

        name = text_of(body, "name", 128)
        try:
            roles = await asyncio.to_thread(Pairings.remove, name)
        except AuthError as error:
            raise Refused(shown(str(error)), 409) from None
        if not roles:
            raise Refused("no paired machine has this name", 404)
        await self._look_now()
        return {}

    async def check(self, request: web.Request, body: Body) -> Body:
        """Starts the doctor; what it finds comes with the state."""
        from .checkup import examine

        if turns.rendering:
            raise Refused("a render is running; check when it is done", 409)
        if self._checking is None or self._checking.done():
            # A page that asks for the state after this answer knows that it runs, and offers no second one.
            board.found(Findings(running=True), quiet=True)
            comfyui = Path(str(sys.modules["server"].__file__)).parent
            self._checking = asyncio.create_task(asyncio.to_thread(examine, comfyui, sys.argv[1:]))
        return {}

    async def free(self, request: web.Request, body: Body) -> Body:
        """Has ComfyUI unload its models, and workers those that they hold for it."""
        from ..distributed.holdings import holdings

        if turns.rendering:
            raise Refused("a render is running; free memory when it is done", 409)
        for flag in ("unload_models", "free_memory"):
            self._server.prompt_queue.set_flag(flag, True)
        await asyncio.to_thread(holdings.release)
        asyncio.get_running_loop().call_later(2.0, lambda: asyncio.ensure_future(self._look_now()))
        return {}

    async def _look_now(self) -> None:
        if self._watch is None:
            self._watch = await asyncio.to_thread(_make_watch)
        await asyncio.to_thread(self._watch.look_now)


def _make_watch() -> Any:
    from ..nodes.this_comfyui import versions
    from .watch import Watch

    return Watch(versions, names.get)
