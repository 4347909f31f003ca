"""What a server offers (`/v1/models`), which of it is meant, and whether the server is ready at all."""

from __future__ import annotations

from urllib.parse import urlsplit

import aiohttp
import msgspec

from draftsmith.errors import UserError
from draftsmith.recipe import without_credentials
from draftsmith.target.endpoints import Endpoint, no_url
from draftsmith.target.transport import Transport
from draftsmith.target.wire import PassingFault, explanation


class _Meta(msgspec.Struct):
    n_ctx: int | None = None


class Card(msgspec.Struct):
    """One model of a server's list."""

    id: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None
    """llama.cpp's."""

    def __post_init__(self) -> None:
        if self.max_model_len is None and self.meta is not None:
            self.max_model_len = self.meta.n_ctx  # of one slot


class _Cards(msgspec.Struct):
    data: list[Card]


class NotReady(Exception):
    """A server that may come up yet: what is wrong with it, and what a user could do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


async def models_of(endpoint: Endpoint, transport: Transport, api_key_env: str, seconds: float) -> list[Card]:
    """The model list, under the URL as given or with /v1; settles the endpoint's base URL.

    Raises:
        NotReady: the server is down, still loading, or no such server.
        UserError: no URL, or the server refuses the key.
    """
    tried = [endpoint.url] if endpoint.url.endswith("/v1") else [endpoint.url + "/v1", endpoint.url]
    for url in tried:
        try:
            status, content = await transport.within(seconds, "GET", url + "/models")
        except aiohttp.InvalidURL:
            raise no_url(endpoint.url) from None
        except PassingFault as fault:
            raise NotReady(f"the server does not answer ({fault.reason})", "start it, or correct --server") from None
        if status == 404:
            continue
        if status in (401, 403):
            found = "its key was refused" if transport.authorization else "it is not set"
            raise UserError(
                f"{endpoint.shown}: HTTP {status}, expected an API key in the environment variable {api_key_env}, "
                f"{found}; export the right key, or name its variable with --api-key-env"
            )
        if status != 200:
            raise NotReady(
                f"expected its model list, found HTTP {status} ({explanation(content)})",
                "wait until the server is ready, as --wait 30m does, or correct --server",
            )
        try:
            cards = msgspec.json.decode(content, type=_Cards).data
        except msgspec.DecodeError:
            continue
        endpoint.url = url
        return cards
    places = " or ".join(without_credentials(url) + "/models" for url in tried)
    raise NotReady(f"expected an OpenAI-compatible API, found none at {places}", "give --server its base URL")


def choose(endpoint: Endpoint, cards: list[Card], model: str | None) -> Card:
    """The model that is meant: the one of that name, or the only one.

    Raises:
        UserError: the server does not offer it, or offers several.
    """
    if model is None and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card.id == model:
            return card
    wanted = "one model of several" if model is None else f"the model {model}"
    offered = ", ".join(card.id for card in cards) or "none"
    raise UserError(f"{endpoint.shown}: expected {wanted}, the server offers {offered}; name one with --model")


def refuse_two_credentials(endpoints: list[Endpoint], transport: Transport, api_key_env: str) -> None:
    """One header cannot carry a user of the URL and a key.

    Raises:
        UserError: a server was given both.
    """
    for endpoint in endpoints:
        if transport.authorization and "@" in urlsplit(endpoint.url).netloc:
            raise UserError(
                f"{endpoint.shown}: expected either a user in the URL or a key in {api_key_env}, found both; "
                "drop one, or name another variable with --api-key-env"
            )
