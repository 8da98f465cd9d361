"""What a test lets happen to requests for the API server: by its double, or on the way to the genuine one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    parameters: dict[str, str]
    content_type: str
    body: Any
    accept: str = ""

    @property
    def watch(self) -> bool:
        return self.parameters.get("watch") == "true"

    def __str__(self) -> str:
        return f"{'WATCH' if self.watch else self.method} {self.path}"


@dataclass
class Fault:
    """What happens to requests whose text (`GET /api/v1/…`, `WATCH /api/…`) matches, so many times.

    `status` is answered; without one the connection is closed, or nothing is ever answered (`hang`). With `after`, the
    request is carried out first, so that only its answer is lost. The first `skip` that match are let pass; `then` is
    called when it happens.
    """

    pattern: str
    status: int = 0
    times: int = 1
    hang: bool = False
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    skip: int = 0
    then: Callable[[], object] = lambda: None

    def hits(self, asked: Asked) -> bool:
        """Whether it happens to this request, counted."""
        if not self.times or not re.search(self.pattern, str(asked)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True
