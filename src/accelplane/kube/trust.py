"""Keeps a webhook server's own certificate, and makes the API server trust it.

The authority's certificate goes into webhook configurations and into the conversion of custom resource definitions:
only where they lead to our own service, and only where it is missing or another.
"""

import asyncio
import base64
import datetime
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from accelplane.kube.certificates import (
    CertificatePolicy,
    CertificateTrouble,
    Issued,
    Judgement,
    Question,
    issued,
    judged,
    service_names,
)
from accelplane.kube.jsonpatch import Operation, pointer
from accelplane.kube.tls import CertificateError, ServingTls

log = logging.getLogger(__name__)

TargetKind = Literal["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration", "CustomResourceDefinition"]

_TRIES = 5


class ServiceReference(Struct, frozen=True):
    """The service that a configuration leads to."""

    name: str = ""
    namespace: str = ""


class ClientConfig(Struct, frozen=True, rename="camel"):
    """How the API server reaches a webhook; `ca_bundle` is base64."""

    service: ServiceReference | None = None
    ca_bundle: str | None = None


class HookEntry(Struct, frozen=True, rename="camel"):
    """One webhook of a configuration."""

    name: str = ""
    client_config: ClientConfig = ClientConfig()


class ConversionWebhook(Struct, frozen=True, rename="camel"):
    client_config: ClientConfig | None = None


class Conversion(Struct, frozen=True):
    webhook: ConversionWebhook | None = None


class DefinitionSpec(Struct, frozen=True):
    conversion: Conversion | None = None


class TargetMetadata(Struct, frozen=True):
    name: str


class Target(Struct, frozen=True):
    """A webhook configuration or a custom resource definition, the part of it that matters."""

    metadata: TargetMetadata
    webhooks: Sequence[HookEntry] | None = None
    spec: DefinitionSpec | None = None


class Held(Struct, frozen=True):
    """A Secret: its content and the version of it."""

    data: dict[str, bytes]
    version: str


class TrustStore(Protocol):
    """What is needed of the API. Whatever goes wrong is a `TrustError`."""

    async def read(self) -> Held | None:
        """The Secret, None when there is none."""
        ...

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        """Makes the Secret (version None) or replaces its content; False when somebody else was faster."""
        ...

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        """All that may lead to our service."""
        ...

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        """Applies a JSON patch."""
        ...


class TrustError(Exception):
    """The API could not be asked, or said no; trying again later may help."""


class TrustSettings(Struct, frozen=True, kw_only=True):
    """Whose certificate it is, and how often all of it is looked at."""

    service: str
    namespace: str
    policy: CertificatePolicy = CertificatePolicy()
    interval: float = 10
    retry: float = 5


def injection(target: Target, bundle: bytes, service: ServiceReference) -> list[Operation]:
    """What makes a configuration trust `bundle` (PEM) where it leads to `service`; nothing when it does."""
    wanted = base64.b64encode(bundle).decode("ascii")
    operations: list[Operation] = []
    for index, entry in enumerate(target.webhooks or ()):
        if _needs(entry.client_config, wanted, service):
            # Others may edit the list meanwhile; the patch is for this entry and no other.
            operations.append(Operation("test", pointer("webhooks", index, "name"), entry.name))
            operations.append(Operation("add", pointer("webhooks", index, "clientConfig", "caBundle"), wanted))
    conversion = target.spec.conversion if target.spec else None
    if conversion and conversion.webhook and _needs(conversion.webhook.client_config, wanted, service):
        path = pointer("spec", "conversion", "webhook", "clientConfig", "caBundle")
        operations.append(Operation("add", path, wanted))
    return operations


def _needs(config: ClientConfig | None, wanted: str, service: ServiceReference) -> bool:
    return config is not None and config.service == service and config.ca_bundle != wanted


class Trust:
    """Keeps the Secret, what the server serves and what callers trust as they should be, for as long as it runs."""

    def __init__(
        self,
        store: TrustStore,
        tls: ServingTls,
        settings: TrustSettings,
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        judge: Callable[[Question], Awaitable[Judgement]] = judged,
    ) -> None:
        self._store = store
        self._tls = tls
        self._settings = settings
        self._clock = clock
        self._judge = judge
        # what was asked last, and what was said
        self._said: tuple[Issued | None, Issued, datetime.datetime] | None = None
        self._served: Issued | None = None

    async def settle(self) -> None:
        """Renews what is due, injects, and serves. Raises `TrustError`."""
        current = await self._kept()
        if self._served is None:
            self._serve(current)
        service = ServiceReference(self._settings.service, self._settings.namespace)
        problems: list[str] = []
        for kind, target in await self._store.targets():
            operations = injection(target, current.authorities, service)
            if not operations:
                continue
            try:
                await self._store.patch(kind, target.metadata.name, operations)
            except TrustError as error:
                problems.append(str(error))
                continue
            log.info("%s %s: trusts the certificate of %s", kind, target.metadata.name, service.name)
        # Behind the injection: callers are to trust a successor before it serves.
        if self._served != current:
            self._serve(current)
        if problems:
            raise TrustError("; ".join(problems))

    async def run(self) -> None:
        """Settles again and again, until it is cancelled."""
        said = ""
        while True:
            try:
                await self.settle()
                said = ""
                await asyncio.sleep(self._settings.interval)
            except TrustError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("%s; trying again every %g s", said, self._settings.retry)
                await asyncio.sleep(self._settings.retry)

    def _serve(self, current: Issued) -> None:
        """Raises `TrustError`."""
        try:
            self._tls.use(current.certificate, current.key)
        except CertificateError as error:
            raise TrustError(str(error)) from error
        self._served = current

    async def _kept(self) -> Issued:
        """What the Secret holds, renewed if that is due. Raises `TrustError`."""
        names = service_names(self._settings.service, self._settings.namespace)
        for _ in range(_TRIES):
            held = await self._store.read()
            current = issued(held.data) if held else None
            wanted = await self._wanted(current, names)
            if wanted == current:
                return wanted
            data = {**(held.data if held else {}), **wanted.data()}
            if await self._store.write(data, held.version if held else None):
                log.info("certificate of %s: %s", names[0], "issued" if current is None else "renewed")
                return wanted
        raise TrustError(f"the certificate of {names[0]} changes each time that it is written")

    async def _wanted(self, current: Issued | None, names: Sequence[str]) -> Issued:
        """What the Secret should hold. Raises `TrustError`."""
        now = self._clock()
        if self._said is not None:
            asked, wanted, until = self._said
            if current in (asked, wanted) and now < until:
                return wanted
        try:
            judgement = await self._judge(Question(current, names, now, self._settings.policy))
        except CertificateTrouble as error:
            raise TrustError(str(error)) from error
        wanted = judgement.issued or current
        if wanted is None:
            raise TrustError("where there is no certificate none was issued")
        self._said = (current, wanted, judgement.until)
        return wanted
