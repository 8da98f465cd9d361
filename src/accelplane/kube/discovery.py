"""Which kinds the API server serves: older installations of a program do not define all its kinds."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from accelplane.apiserver.errors import ApiError, NotFound

from .client import Client, Selection
from .objects import Object, api_of

log = logging.getLogger(__name__)


async def served_kinds(client: Client, kinds: Sequence[type[Object]]) -> list[type[Object]]:
    """Those of `kinds` that the API server serves, and those of which it is unknown, in the same order.

    A program that watches a kind which is not served never becomes ready. Logs the kinds that are omitted.
    """
    served = await asyncio.gather(*(_is_served(client, kind) for kind in kinds))
    return [kind for kind, found in zip(kinds, served, strict=True) if found]


async def stop_when_served(
    client: Client, kinds: Sequence[type[Object]], stop: Callable[[], None], *, interval: float = 60.0
) -> NoReturn:
    """Lists `kinds`, which are not served, until one is; then calls `stop` once. Runs until it is cancelled.

    A program that was started before a kind was defined manages it after its restart.
    """
    while True:
        await asyncio.sleep(interval)
        for kind in kinds:
            try:
                await client.list(kind, Selection(fields="metadata.name=none"))
            except ApiError as error:
                log.debug("%s: %s", api_of(kind).resource.kind, error)
                continue
            log.info("%s: is defined now; the program ends to manage it after its restart", api_of(kind).resource.kind)
            stop()
            await asyncio.Event().wait()


async def _is_served(client: Client, kind: type[Object]) -> bool:
    name = api_of(kind).resource.kind
    try:
        await client.list(kind, Selection(fields="metadata.name=none"))
    except NotFound:
        log.warning("%s: there is no definition of this kind, so it is not managed until the next start", name)
        return False
    except ApiError as error:
        # Unknown: a missing right or an unreachable server is reported again by the watch, which retries.
        log.warning("%s: %s", name, error)
    return True
