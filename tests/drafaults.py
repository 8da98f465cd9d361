"""Faults at each step that changes the node: a write, rename, flush or removal of a file, or a write to the kernel.

`Faults.step` is called before each of them. A process that is killed makes no further step; a step that fails is not
made, and the others are.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

from kernelhost import KernelHost

from accelplane.dra import durable
from accelplane.host import WriteError
from accelplane.simulate.kernel import Kernel


class Killed(BaseException):
    """The process has ended at a step."""


class Faults:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at = 0
        self.kind: Literal["kill", "fail"] = "kill"

    def arm(self, at: int, kind: Literal["kill", "fail"]) -> None:
        """The fault is at the step with this number, from 1; 0 is none."""
        self.steps, self.at, self.kind = [], at, kind

    @property
    def reached(self) -> bool:
        return 0 < self.at <= len(self.steps)

    def step(self, name: str) -> None:
        """Raises `Killed` or `OSError`."""
        self.steps.append(name)
        if self.kind == "kill" and self.reached:
            raise Killed(name)
        if len(self.steps) == self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    @contextmanager
    def of_files(self) -> Iterator[None]:
        with patch.object(durable, "os", _FaultyOs(self)):
            yield


class _FaultyOs:
    """The module `os`, in which the functions that change files are steps."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in ("write", "fsync", "replace", "unlink", "open"):
            return function

        def call(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & os.O_CREAT:
                self._faults.step(f"{name} {arguments[0] if name != 'write' else ''}")
            return function(*arguments, **options)

        return call


class FaultyHost(KernelHost):
    """The emulated kernel, to which each write is a step. All scans share it."""

    def __init__(self, kernel: Kernel, faults: Faults) -> None:
        super().__init__(kernel, [])
        self.faults = faults
        self.boot_id = "first"

    def raw_text(self, path: str) -> str:
        return self.boot_id if path.endswith("/boot_id") else super().raw_text(path)

    def fresh(self) -> "FaultyHost":
        return self

    def write(self, path: str, text: str) -> None:
        try:
            self.faults.step(f"{path} = {text!r}")
        except OSError as error:
            raise WriteError(path, str(error), error.errno or 0) from None
        super().write(path, text)
