"""Takes over the claims of a driver of Intel before the first call of the kubelet is answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from accelplane.dra import takeover
from accelplane.dra.claimtasks import EXPECTED, claim_error
from accelplane.dra.events import Reason
from accelplane.dra.model import ClaimError
from accelplane.dra.store import ClaimStore
from accelplane.host.blocking import in_thread

log = logging.getLogger(__name__)

ForeignClaims: TypeAlias = Mapping[str, Sequence[takeover.PreparedDevice]]
"""The devices of each claim, by UID."""


class Adoption:
    """`adopt` writes entries for the claims, None if no claims are taken over."""

    def __init__(
        self,
        store: ClaimStore,
        adopt: Callable[[ForeignClaims], Awaitable[None]] | None,
        on_event: Callable[[Reason, str], None],
    ) -> None:
        self._store = store
        self._adopt = adopt
        self._on_event = on_event
        self._task: asyncio.Task[ClaimError | None] | None = None

    async def problem(self) -> ClaimError | None:
        """Waits for the takeover, which a cancelled call does not cancel. Returns why it is not done.

        Then the call must fail, because a claim that is not known yet would be unprepared. The next one tries again. A
        file that cannot be decoded is left as it is.
        """
        if self._adopt is None:
            return None
        if self._task is None:
            self._task = asyncio.create_task(self._run(self._adopt), name="takeover of claims")
        task = self._task
        if (problem := await asyncio.shield(task)) is not None and self._task is task:
            self._task = None
        return problem

    async def idle(self) -> None:
        """Waits until no takeover runs."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self, adopt: Callable[[ForeignClaims], Awaitable[None]]) -> ClaimError | None:
        try:
            if found := await in_thread(self._store.foreign_claims):
                await adopt(found)
                log.info("%d claims of another driver were taken over", len(found))
        except Exception as error:
            problem = claim_error(error, "claims of another driver are not taken over: ")
            log.error("%s", problem, exc_info=not isinstance(error, (*EXPECTED, takeover.TakeoverError)))
            self._on_event("ClaimTakeoverFailed", str(problem))
            return None if isinstance(error, takeover.TakeoverError) else problem
        return None
