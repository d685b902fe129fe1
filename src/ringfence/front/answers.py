"""Where answers to questions come in that people signed elsewhere: one small POST each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ringfence.core.aio import in_thread
from ringfence.front.identify import PEER
from ringfence.front.refusals import Refusal, Refusals
from ringfence.governance.by_webhook import AnswerRefused
from ringfence.store import Approval

ANSWERS = "/approvals/answer"
_MAX_BYTES = 8_192
_SECONDS = 10.0
_MAX_AT_ONCE = 16


class AnswersFront:
    """An ASGI application for one path. What it refuses is counted, and on record."""

    def __init__(self, take: Callable[[Mapping[str, str], bytes], Approval], refusals: Refusals) -> None:
        """`take` waits for the disk, and raises AnswerRefused."""
        self._take = take
        self._refusals = refusals
        self._at_once = asyncio.Semaphore(_MAX_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            settled = await self._answered(request)
        except ClientDisconnect:
            return
        except AnswerRefused as exc:
            self._refusals.count(Refusal("webhook", exc.reason, scope.get(PEER)))
            said = JSONResponse({"problem": str(exc), "reason_code": exc.reason}, exc.status, {"connection": "close"})
            await said(scope, receive, send)
            return
        await JSONResponse({"approval": settled.id, "state": settled.state})(scope, receive, send)

    async def _answered(self, request: Request) -> Approval:
        if request.method != "POST":
            raise AnswerRefused(405, "bad_method", "answers are posted")
        if request.headers.get("origin") is not None:
            raise AnswerRefused(403, "foreign_origin", "a page in a browser answers in the console")
        body = b""
        try:
            async with asyncio.timeout(_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_BYTES:
                        raise AnswerRefused(413, "too_large", f"an answer has {_MAX_BYTES} bytes at most")
        except TimeoutError:
            raise AnswerRefused(408, "too_slow", f"the answer did not arrive within {_SECONDS:g} s") from None
        async with self._at_once:
            return await in_thread(lambda: self._take(request.headers, body))
