"""`intel_xpumanager_sidecar`: writes labels for the Xe-Link topology that XPU Manager beside it exports as metrics.

The labels are in a feature file for node-feature-discovery (NFD). When the metrics cannot be read, the last labels stay
for some time, because XPU Manager restarts. The file is removed at the end.
"""

import asyncio
import contextlib
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Value, flags_of, parse_or_exit
from accelplane.cli.untilsignal import until_signal
from accelplane.http.client import HttpClient
from accelplane.http.stream import HttpClientError
from accelplane.logs import v
from accelplane.node import atomic_file
from accelplane.nodelabels import xelink

log = logging.getLogger(__name__)

PROGRAM = "intel_xpumanager_sidecar"
FATAL = 255
HOST = "127.0.0.1"
FILE_NAME = "xpum-sidecar-labels.txt"
_FEATURES = "/etc/kubernetes/node-feature-discovery/features.d/"
_TIMEOUT = 5.0
_MAX_PAGE = 4 * 1024 * 1024
_MAX_FILE = 1024 * 1024


class ReadError(Exception):
    """The metrics cannot be read."""


class Options(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The flags and their values."""

    interval: Annotated[int, Meta(ge=0, description="seconds between reading the metrics")] = 10
    startup_delay: Annotated[int, Meta(ge=0, description="seconds before the metrics are read for the first time")] = 10
    xpum_port: Annotated[int, Meta(description=f"port of XPU Manager on {HOST}")] = 29999
    lane_count: Annotated[int, Meta(description="minimum number of lanes of a link")] = 4
    label_namespace: Annotated[str, Meta(description="prefix of the labels")] = "gpu.intel.com"
    allow_subdeviceless_links: Annotated[
        bool, Meta(description="accept links that are not on sub-devices, as of GPUs with one tile")
    ] = False
    cert: Annotated[
        str,
        Meta(
            description="PEM file with the only trusted certificate, of an authority or of XPU Manager; turns HTTPS on"
        ),
    ] = ""
    tmp_dir_prefix: Annotated[
        str, Meta(description="directory for the temporary directory, on the file system of the label file")
    ] = _FEATURES
    dst_file_path: Annotated[str, Meta(description="label file")] = f"{_FEATURES}{FILE_NAME}"
    stale_timeout: Annotated[
        int, Meta(ge=0, description="seconds for which the labels stay when the metrics cannot be read")
    ] = 300

    @classmethod
    def from_flags(cls, given: Mapping[str, Value]) -> "Options":
        """Raises `ValueError` for a value that is not possible."""
        options = msgspec.convert(given, cls)
        if not options.interval:
            raise ValueError("-interval: found 0, expected at least 1 second")
        if not 0 < options.xpum_port < 65536:
            raise ValueError(f"-xpum-port: found {options.xpum_port}, expected 1 to 65535")
        return options


FLAGS = (*flags_of(Options), *logflags.FLAGS)


class Sidecar:
    """Keeps the label file up to date."""

    def __init__(self, options: Options) -> None:
        self._options = options
        # A connection for each request: XPU Manager's server closes idle ones.
        context = self._context if options.cert else None
        self._client = HttpClient(HOST, options.xpum_port, context=context, idle_timeout=0)
        self._last_success = time.monotonic()
        self._problem = ""

    async def run(self) -> None:
        """Runs until cancelled."""
        log.log(v(1), "waiting %d s", self._options.startup_delay)
        await asyncio.sleep(self._options.startup_delay)
        self._last_success = time.monotonic()
        while True:
            await self.update()
            await asyncio.sleep(self._options.interval)

    async def update(self) -> None:
        """Reads the metrics and writes the labels. Errors are logged when they change."""
        problem = ""
        try:
            labels = await self._read()
            self._last_success = time.monotonic()
        except (ReadError, xelink.PageError) as error:
            problem = str(error)
            labels = self._labels_after_failure()
        try:
            if labels is not None and self._write(labels):
                log.info("%s: wrote %d labels", self._options.dst_file_path, len(labels))
        except OSError as error:
            problem = problem or f"{error.filename or self._options.dst_file_path}: {error.strerror or error}"
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem

    def remove(self) -> None:
        """Removes the label file. Errors are logged."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._options.dst_file_path)
        except OSError as error:
            log.error("%s: cannot be removed: %s", self._options.dst_file_path, error.strerror or error)

    async def _read(self) -> dict[str, str]:
        options = self._options
        page = await self._page()
        found = xelink.links(page, allow_subdeviceless=options.allow_subdeviceless_links)
        labels, warnings = xelink.labels(found, options.label_namespace, min_lanes=options.lane_count)
        for warning in warnings:
            log.log(v(1), "%s", warning)
        return labels

    async def _page(self) -> str:
        """The metrics page of XPU Manager. Raises `ReadError`."""
        try:
            async with asyncio.timeout(_TIMEOUT), self._client.request("GET", "/metrics") as response:
                body = await response.read(_MAX_PAGE)
        except TimeoutError:
            raise ReadError(f"{self._client.authority}: no response within {_TIMEOUT:g} s") from None
        except HttpClientError as error:
            raise ReadError(f"{self._client.authority}: {error}") from None
        except (OSError, ValueError) as error:  # of the certificate
            raise ReadError(f"-cert: {self._options.cert}: {error}") from None
        if response.status != 200:
            raise ReadError(f"{self._client.authority}: found {response.status} {response.phrase}, expected 200")
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise ReadError(f"{self._client.authority}: the page is not UTF-8") from None

    def _context(self) -> ssl.SSLContext:
        """Read anew for each request, because certificates are renewed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may have no certificate of an authority
        context.load_verify_locations(self._options.cert)
        return context

    def _labels_after_failure(self) -> dict[str, str] | None:
        """The labels without links, or None to keep the last ones."""
        fresh = time.monotonic() - self._last_success < self._options.stale_timeout
        if fresh and os.path.lexists(self._options.dst_file_path):
            return None
        return xelink.labels([], self._options.label_namespace, min_lanes=0)[0]

    def _write(self, labels: Mapping[str, str]) -> bool:
        """Replaces the file unless it has these labels; returns whether it did. Raises `OSError`."""
        path = self._options.dst_file_path
        text = "".join(f"{name}={value}\n" for name, value in labels.items()).encode()
        if atomic_file.content(path, _MAX_FILE) == text:
            return False
        directory = tempfile.mkdtemp(prefix="xpumsidecar", dir=self._options.tmp_dir_prefix)
        temporary = os.path.join(directory, FILE_NAME)
        try:
            with open(temporary, "xb") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.rmdir(directory)
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 255 for fatal errors, 2 for invalid flags."""
    signals.end_at_once()
    given = parse_or_exit(PROGRAM, FLAGS, arguments, lenient=True)
    try:
        logflags.start(given, PROGRAM)
        asyncio.run(run(Options.from_flags(given)))
    except (ValueError, OSError) as error:
        log.critical("%s", logflags.message_of(error))
        return FATAL
    return 0


async def run(options: Options) -> None:
    """Runs until SIGTERM or SIGINT, and removes the label file."""
    sidecar = Sidecar(options)
    try:
        await until_signal(sidecar.run())
    finally:
        sidecar.remove()
