"""Maintains the serving certificate of webhooks, and injects its authority into the objects that refer to them.

The authority goes into the `caBundle` of webhook configurations and of the conversion of CustomResourceDefinitions:
only where they refer to this program's service, and only if it differs.
"""

import asyncio
import base64
import contextlib
import datetime
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from accelplane.http.servingtls import CertificateError, ServingTls
from accelplane.kube.certificates import (
    CertificatePolicy,
    CertificateSet,
    RenewalError,
    RenewalPlan,
    RenewalRequest,
    plan_renewal,
    service_names,
)
from accelplane.kube.jsonpatch import Operation, pointer
from accelplane.kube.writebudget import WriteBudget

log = logging.getLogger(__name__)

TargetKind = Literal["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration", "CustomResourceDefinition"]

_WRITE_ATTEMPTS = 5


class ServiceReference(Struct, frozen=True):
    """The service that a webhook runs behind."""

    name: str = ""
    namespace: str = ""


class ClientConfig(Struct, frozen=True, rename="camel"):
    """How the API server reaches a webhook. `ca_bundle` is base64."""

    service: ServiceReference | None = None
    ca_bundle: str | None = None


class WebhookEntry(Struct, frozen=True, rename="camel"):
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
    """A webhook configuration or a CustomResourceDefinition: the fields that injection reads."""

    metadata: TargetMetadata
    webhooks: Sequence[WebhookEntry] | None = None
    spec: DefinitionSpec | None = None


class SecretData(Struct, frozen=True):
    """The data of a Secret, its resource version and its UID."""

    data: dict[str, bytes]
    version: str
    uid: str


class TrustError(Exception):
    """A request failed, or the certificates are unusable. A later attempt may succeed."""


class SecretMissing(TrustError):
    """The Secret does not exist and cannot be created."""

    def __init__(self, namespace: str, name: str, cause: str) -> None:
        remedy = f"run kubectl create secret generic {name} --namespace {namespace}"
        super().__init__(f"secret {namespace}/{name}: not found, cannot be created: {cause}; {remedy}")


class TrustStore(Protocol):
    """The Secret and the targets of injection. Every failure of a request is a `TrustError`."""

    @property
    def watching(self) -> bool:
        """Whether `watch` reports all changes. If not, the caller polls."""
        ...

    async def watch(self, changed: Callable[[], None]) -> None:
        """Calls `changed` after each change of the Secret or of a target, until cancelled. Does not raise."""
        ...

    async def read(self) -> SecretData | None:
        """The Secret, None if it does not exist."""
        ...

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        """Creates the Secret (version None) or replaces its data. False if it is not at `version` any more.

        Raises `SecretMissing` if the account may not create the Secret.
        """
        ...

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        """All objects that may refer to the service."""
        ...

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        """Applies a JSON patch to a target."""
        ...


class TrustSettings(Struct, frozen=True, kw_only=True):
    """The service of the webhooks and the intervals of reconciliation, in seconds.

    `resync` applies while all objects are watched, `poll_interval` while they are not. `min_interval` limits the rate,
    as does a `WriteBudget` if another program reverts the changes.
    """

    service: str
    namespace: str
    policy: CertificatePolicy = CertificatePolicy()
    resync: float = 600
    poll_interval: float = 10
    retry: float = 5
    min_interval: float = 1


def injection_patch(target: Target, bundle: bytes, service: ServiceReference) -> list[Operation]:
    """The JSON patch that sets `bundle` (PEM) wherever a target refers to `service`. Empty if nothing differs."""
    encoded = base64.b64encode(bundle).decode("ascii")
    operations: list[Operation] = []
    for index, entry in enumerate(target.webhooks or ()):
        if _needs_bundle(entry.client_config, encoded, service):
            # The list may change before the patch arrives. The test makes sure that the entry is still the same.
            operations.append(Operation("test", pointer("webhooks", index, "name"), entry.name))
            operations.append(Operation("add", pointer("webhooks", index, "clientConfig", "caBundle"), encoded))
    conversion = target.spec.conversion if target.spec else None
    if conversion and conversion.webhook and _needs_bundle(conversion.webhook.client_config, encoded, service):
        path = pointer("spec", "conversion", "webhook", "clientConfig", "caBundle")
        operations.append(Operation("add", path, encoded))
    return operations


def _needs_bundle(config: ClientConfig | None, encoded: str, service: ServiceReference) -> bool:
    return config is not None and config.service == service and config.ca_bundle != encoded


class Trust:
    """Reconciles the Secret, the certificate that the server uses and the targets' CA bundles, while it runs.

    `on_problem` is called with each new problem, in addition to the log.
    """

    def __init__(
        self,
        store: TrustStore,
        tls: ServingTls,
        settings: TrustSettings,
        *,
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        planner: Callable[[RenewalRequest], Awaitable[RenewalPlan]] = plan_renewal,
        on_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._tls = tls
        self._settings = settings
        self._clock = clock
        self._planner = planner
        self._on_problem = on_problem
        self._name = f"{settings.service}.{settings.namespace}"
        self._budget = WriteBudget()
        self._planned: _Planned | None = None
        self._served: CertificateSet | None = None
        self._secret_uid = ""
        self._problem = ""

    async def reconcile(self) -> None:
        """Renews, injects and serves. Raises `TrustError`."""
        problems: list[str] = []
        try:
            certificates = await self._ensure_secret()
        except SecretMissing as error:
            if self._served is None:
                raise
            # The server continues, so the targets must continue to trust it.
            certificates = self._served
            problems.append(str(error))
        if self._served is None:
            self._serve(certificates)
        problems += await self._inject(certificates.authorities)
        # After the injection: callers must trust a successor before it is served.
        if self._served != certificates:
            self._serve(certificates)
        if problems:
            raise TrustError("; ".join(problems))

    async def run(self) -> None:
        """Reconciles after each change, when a certificate is due, and periodically, until cancelled."""
        changed = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._store.watch(changed.set))
            loop = asyncio.get_running_loop()
            while True:
                # Cleared before reading: a change during the pass causes another pass.
                changed.clear()
                started = loop.time()
                delay = await self._reconcile_and_log()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await changed.wait()
                pause = max(started + self._settings.min_interval - loop.time(), self._budget.longest_delay())
                await asyncio.sleep(max(0.0, pause))

    async def _reconcile_and_log(self) -> float:
        """Returns the seconds until the next pass."""
        try:
            await self.reconcile()
        except TrustError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("%s; next attempt in %g s", error, self._settings.retry)
                self._on_problem(self._problem)
            return self._settings.retry
        if self._problem:
            log.info("certificate of %s: recovered", self._name)
        self._problem = ""
        period = self._settings.resync if self._store.watching else self._settings.poll_interval
        due = (self._planned.until - self._clock()).total_seconds() if self._planned else period
        return max(0.0, min(due, period))

    def _serve(self, certificates: CertificateSet) -> None:
        """Raises `TrustError`."""
        try:
            self._tls.use(certificates.certificate, certificates.key)
        except CertificateError as error:
            raise TrustError(str(error)) from error
        self._served = certificates

    async def _inject(self, bundle: bytes) -> list[str]:
        """Injects the bundle into all targets and returns the failures. Raises `TrustError`."""
        service = ServiceReference(self._settings.service, self._settings.namespace)
        problems: list[str] = []
        for kind, target in await self._store.targets():
            operations = injection_patch(target, bundle, service)
            if not operations:
                continue
            try:
                await self._store.patch(kind, target.metadata.name, operations)
            except TrustError as error:
                problems.append(str(error))
                continue
            self._budget.record((kind, target.metadata.name))
            log.info("%s %s: injected the certificate authority of %s", kind, target.metadata.name, self._name)
        return problems

    async def _ensure_secret(self) -> CertificateSet:
        """The certificates of the Secret, renewed if due. Raises `TrustError`."""
        for _ in range(_WRITE_ATTEMPTS):
            secret = await self._store.read()
            stored = CertificateSet.from_secret(secret.data) if secret else None
            if secret is not None and stored is not None:
                self._secret_uid = secret.uid
            # A deleted Secret, also one that was created again, gets the certificates in use, because callers trust
            # them. One that was emptied gets new ones: this is how to replace a compromised key.
            deleted = secret is None or secret.uid != self._secret_uid
            current = self._served if stored is None and deleted else stored
            certificates = await self._renew(current)
            if certificates == stored:
                return certificates
            data = {**(secret.data if secret else {}), **certificates.secret_data()}
            if await self._store.write(data, secret.version if secret else None):
                self._budget.record("Secret")
                # The plan was for a write that may have to be repeated. An emptied Secret needs a new one.
                self._planned = replace(self._planned, current=certificates) if self._planned else None
                action = "issued" if current is None else "restored" if certificates == current else "renewed"
                log.info("certificate of %s: %s", self._name, action)
                return certificates
        raise TrustError(f"certificate of {self._name}: the Secret changed during each of {_WRITE_ATTEMPTS} writes")

    async def _renew(self, current: CertificateSet | None) -> CertificateSet:
        """The certificates that the Secret should have. Raises `TrustError`."""
        now, planned = self._clock(), self._planned
        if planned is not None and planned.applies(current, now):
            return planned.certificates
        names = service_names(self._settings.service, self._settings.namespace)
        try:
            plan = await self._planner(RenewalRequest(current, names, now, self._settings.policy))
        except RenewalError as error:
            raise TrustError(str(error)) from error
        certificates = plan.certificates or current
        if certificates is None:
            raise TrustError(f"certificate of {self._name}: internal error: nothing was issued")
        self._planned = _Planned(current, certificates, now, plan.until)
        return certificates


class _Planned(Struct, frozen=True):
    """The last plan: `certificates` replace `current`. It was made at `since`; an earlier time is a corrected clock."""

    current: CertificateSet | None
    certificates: CertificateSet
    since: datetime.datetime
    until: datetime.datetime

    def applies(self, current: CertificateSet | None, now: datetime.datetime) -> bool:
        return self.since <= now < self.until and current in (self.current, self.certificates)
