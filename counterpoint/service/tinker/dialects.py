"""The endpoints of OpenAI's and Anthropic's APIs for `model = "tinker://..."`.

Tools for evaluations and agents ask saved weights by them. The gateway of the environments reads and writes the dialects.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.json_body import parse_body
from counterpoint.environments.gateway.server import PATHS, answer_to, body_of, refused, sent
from counterpoint.environments.gateway.session import Limits, Session
from counterpoint.service.chat import ChatModel
from counterpoint.service.tinker.futures import TooMany
from counterpoint.service.tinker.intake import claimed
from counterpoint.service.tinker.refusals import NoSuchThing, OverQuota, TooLarge
from counterpoint.service.tinker.service import Service
from counterpoint.transport.http.listening import PROVEN

Found = TypeVar("Found")

ABANDONED_SECONDS = 0.5
"""The time between two looks for clients that have gone away."""

ROOT = "/oai/api/"
"""The start of the APIs' paths, such as `v1/chat/completions`, as at the managed service."""


class Dialects:
    """The endpoints, over one service."""

    def __init__(self, service: Service, chat: Chat, owner_of: Callable[[web.Request], str | None]) -> None:
        """`owner_of` returns the owner of a request's key, or None for a wrong key."""
        self._service = service
        self._chat = chat
        self._owner_of = owner_of
        self._open: Counter[str] = Counter()
        """The number of each owner's unanswered requests."""
        self._source, self._numbers = f"chat-{secrets.token_hex(8)}", itertools.count()
        """Their names in the ledger: none of them comes again."""

    def add_to(self, app: web.Application) -> None:
        """Adds the endpoints to an application."""
        app.router.add_get(f"{ROOT}v1/models", self._models)
        for path in PATHS:
            app.router.add_post(f"{ROOT}{path}", self._ask)

    async def _models(self, request: web.Request) -> web.Response:
        if self._owner_of(request) is None:
            return refused(request, _wrong_key())
        names = sorted(self._service.names)
        served = [{"id": name, "object": "model", "created": 0, "owned_by": "counterpoint"} for name in names]
        return web.json_response({"object": "list", "data": served})

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        try:
            owner = self._owner_of(request)
            if owner is None:
                raise _wrong_key()
            if not request.app[PROVEN].note(request, owner):
                raise GatewayRefused("this key has its share of connections; close some, or use them again", status=429)
            if self._open[owner] >= self._service.config.max_pending:
                raise GatewayRefused(
                    f"{self._open[owner]} requests of this key are not answered yet; wait for one", status=429
                )
            self._open[owner] += 1
            try:
                with self._service.intake.room(owner, claimed(request)):
                    return await self._answered(request, owner)
            except (TooMany, TooLarge) as error:
                raise GatewayRefused(str(error), status=429 if isinstance(error, TooMany) else 413) from error
            finally:
                self._open[owner] -= 1
                if not self._open[owner]:
                    del self._open[owner]
        except GatewayRefused as refusal:
            return refused(request, refusal)

    async def _answered(self, request: web.Request, owner: str) -> web.StreamResponse:
        fields = parse_body(await body_of(request, Limits().body_bytes))
        name, path = fields.get("model"), request.path.removeprefix(ROOT)
        if not isinstance(name, str):
            raise GatewayRefused(
                "model is not given; expected a name of the base model or a URI of weights", parameter="model"
            )
        adapter, longest = await self._adapter(name, owner), self._service.config.max_tokens
        model = ChatModel(
            self._service.servers, self._chat, adapter, longest, owner, lambda tokens: self._reserved(owner, tokens)
        )
        session = Session(model, "", "", Limits(), agent_sampling=True)
        try:
            async with session.admitted():
                answer, asked = await _unless_abandoned(request, answer_to(session, path, fields))
        finally:  # also the use of an abandoned or failed request
            model.servers.end()
            if model.servers.used.tokens:
                number = f"{self._source}:{next(self._numbers)}"
                await self._service.store.ledger.count(owner, number, model.servers.used)
        if "model" in answer:
            answer["model"] = name
        return await sent(request, path, answer, asked)

    @contextmanager
    def _reserved(self, owner: str, tokens: int) -> Iterator[None]:
        """Keeps `tokens` of an owner's day for a model call. Raises `GatewayRefused`."""
        tenants = self._service.tenants
        try:
            tenants.check_tokens(owner, tokens)
        except (OverQuota, TooMany) as error:
            code = "insufficient_quota" if isinstance(error, OverQuota) else None
            raise GatewayRefused(str(error), status=429, code=code) from error
        with tenants.tokens.held(owner, tokens):
            yield

    async def _adapter(self, name: str, owner: str) -> tuple[str, Path] | None:
        if name in self._service.names:
            return None
        try:
            saved = await self._service.weights.named(name, owner)
        except NoSuchThing:
            raise GatewayRefused(
                f"there is no model {name[:120]!r}; expected {', '.join(sorted(self._service.names))} or the URI of "
                "save_weights_for_sampler",
                parameter="model",
                status=404,
                code="model_not_found",
            ) from None
        if saved.kind != "sampler_weights":
            raise GatewayRefused(
                f"{name[:120]} has no weights for samplers; use save_weights_for_sampler", parameter="model"
            )
        return await self._service.weights.adapter_of(saved), Path(saved.directory)


async def _unless_abandoned(request: web.Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Returns the result of `work`, or ends it, also at the servers, once its client has gone away."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=ABANDONED_SECONDS))[0]:
            if request.transport is None or request.transport.is_closing():
                raise GatewayRefused("the client has gone away", status=499)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _wrong_key() -> GatewayRefused:
    return GatewayRefused("the key is none of those that are taken", status=401, code="invalid_api_key")
