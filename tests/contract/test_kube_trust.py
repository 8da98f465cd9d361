"""Maintaining the webhooks' certificate with an in-memory store: order of steps, lost Secrets, timing."""

import asyncio
import base64
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from certificates import accepts
from virtualtime import VirtualTimeLoop

from accelplane.http.servingtls import ServingTls
from accelplane.kube.authority import plan_renewal_in_process, renew
from accelplane.kube.certificates import CertificatePolicy, service_names
from accelplane.kube.jsonpatch import Operation
from accelplane.kube.testing import PatchError, apply_json_patch
from accelplane.kube.trust import SecretData, SecretMissing, Target, TargetKind, Trust, TrustError, TrustSettings

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NAMES = service_names("hooks", "system")
POLICY = CertificatePolicy()
SETTINGS = TrustSettings(service="hooks", namespace="system")


class RecordingTls(ServingTls):
    """Records the certificates that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.served: list[bytes] = []

    def use(self, certificate: bytes, key: bytes) -> None:
        super().use(certificate, key)
        self.served.append(certificate)


def configuration(name: str) -> dict[str, Any]:
    service = {"name": "hooks", "namespace": "system", "path": "/x"}
    return {"metadata": {"name": name}, "webhooks": [{"name": "a", "clientConfig": {"service": service}}]}


class Store:
    """A `TrustStore` in memory. Tests change it, make requests fail, and report changes."""

    def __init__(self) -> None:
        self.secret: SecretData | None = None
        self.version = 0
        self.targets_by_name = {"one": configuration("one"), "two": {"metadata": {"name": "two"}, "webhooks": []}}
        self.concurrent_writes: list[SecretData] = []
        self.failing_targets: set[str] = set()
        self.may_create = True
        self.watching = False
        self.patches = 0
        self.reads = 0
        self.on_patch: Callable[[], object] = lambda: None
        self.changed: Callable[[], None] = lambda: None

    async def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed
        await asyncio.Event().wait()

    async def read(self) -> SecretData | None:
        self.reads += 1
        return self.secret

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        if self.concurrent_writes:
            self.secret = self.concurrent_writes.pop()
        if version != (self.secret.version if self.secret else None):
            return False
        if version is None and not self.may_create:
            raise SecretMissing("system", "own", "forbidden")
        self.version += 1
        self.secret = SecretData(data, str(self.version), self.secret.uid if self.secret else str(self.version))
        self.changed()
        return True

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        documents = json.dumps(list(self.targets_by_name.values()))
        return [("MutatingWebhookConfiguration", one) for one in msgspec.json.decode(documents, type=list[Target])]

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        if name in self.failing_targets:
            raise TrustError(f"{kind} {name}: no")
        self.on_patch()
        self.patches += 1
        try:
            self.targets_by_name[name] = apply_json_patch(
                self.targets_by_name[name], json.loads(msgspec.json.encode(operations))
            )
        except PatchError as error:
            raise TrustError(f"{kind} {name}: {error}") from error
        self.changed()

    def bundle(self, name: str = "one") -> bytes:
        return base64.b64decode(self.targets_by_name[name]["webhooks"][0]["clientConfig"].get("caBundle", ""))


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime.datetime:
        return self.now


def trust(store: Store, tls: ServingTls | None = None, clock: Callable[[], datetime.datetime] = Clock()) -> Trust:  # noqa: B008
    return Trust(store, tls or ServingTls(), SETTINGS, clock=clock, planner=plan_renewal_in_process)


async def test_first_pass_issues_injects_and_serves_and_the_second_changes_nothing() -> None:
    store, tls = Store(), ServingTls()
    reconciler = trust(store, tls)
    await reconciler.reconcile()
    assert store.secret is not None
    assert tls.ready
    assert accepts(store.bundle(), store.secret.data["tls.crt"], NAMES[0], START)
    written, patched = store.version, store.patches
    await reconciler.reconcile()
    assert (store.version, store.patches) == (written, patched)


async def test_successor_is_injected_before_it_is_served() -> None:
    store, tls, clock = Store(), RecordingTls(), Clock()
    reconciler = trust(store, tls, clock)
    await reconciler.reconcile()
    served_at_patches: list[list[bytes]] = []
    store.on_patch = lambda: served_at_patches.append(list(tls.served))
    # Another authority and certificate, as after a restore of the Secret from a backup.
    other = renew(None, NAMES, START, POLICY)
    store.secret = SecretData(other.secret_data(), "other", "uid")
    await reconciler.reconcile()
    assert store.bundle() == other.authorities
    assert served_at_patches == [tls.served[:1]]
    assert tls.served[1:] == [other.certificate]


async def test_concurrent_first_issuance_of_another_replica_wins() -> None:
    store = Store()
    other = renew(None, NAMES, START, POLICY)
    store.concurrent_writes.append(SecretData(other.secret_data(), "other", "uid"))
    await trust(store).reconcile()
    assert store.secret is not None
    assert store.secret.data == other.secret_data()
    assert store.bundle() == other.authorities


async def test_other_data_of_the_secret_is_preserved() -> None:
    store = Store()
    store.secret = SecretData({"note": b"mine"}, "7", "uid")
    await trust(store).reconcile()
    assert store.secret.data["note"] == b"mine"


async def test_failing_target_does_not_block_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store, tls = Store(), ServingTls()
    store.targets_by_name = {"broken": configuration("broken"), **store.targets_by_name}
    store.failing_targets = {"broken"}
    with pytest.raises(TrustError, match="broken: no"):
        await trust(store, tls).reconcile()
    assert tls.ready
    assert store.bundle()
    assert "one: injected" in caplog.text
    assert "broken: injected" not in caplog.text


async def test_bundle_is_not_injected_into_another_webhook_if_the_list_changes_meanwhile() -> None:
    store = Store()
    reconciler = trust(store)
    foreign = {"name": "foreign", "clientConfig": {"url": "https://example.com"}}
    store.on_patch = lambda: store.targets_by_name["one"]["webhooks"].insert(0, foreign)
    with pytest.raises(TrustError, match="one"):
        await reconciler.reconcile()
    assert foreign["clientConfig"] == {"url": "https://example.com"}
    store.on_patch = lambda: None
    await reconciler.reconcile()
    entries = store.targets_by_name["one"]["webhooks"]
    assert [bool(one["clientConfig"].get("caBundle")) for one in entries] == [False, True]


async def test_removed_bundle_is_injected_again() -> None:
    store = Store()
    reconciler = trust(store)
    await reconciler.reconcile()
    store.targets_by_name["one"] = configuration("one")
    await reconciler.reconcile()
    assert store.bundle()


@pytest.mark.parametrize("created_again", [False, True])
async def test_deleted_secret_is_restored_with_the_certificates_in_use(created_again: bool) -> None:
    store, tls = Store(), RecordingTls()
    reconciler = trust(store, tls)
    await reconciler.reconcile()
    await reconciler.reconcile()
    assert store.secret is not None
    before = store.secret.data
    store.secret = SecretData({}, "9", "another") if created_again else None
    await reconciler.reconcile()
    assert store.secret is not None
    assert store.secret.data == before
    assert len(tls.served) == 1


async def test_certificates_are_replaced_when_a_clock_that_was_ahead_is_corrected() -> None:
    store, tls, clock = Store(), RecordingTls(), Clock()
    clock.now = START + datetime.timedelta(days=400)
    reconciler = trust(store, tls, clock)
    await reconciler.reconcile()
    clock.now = START
    await reconciler.reconcile()
    assert accepts(store.bundle(), tls.served[-1], NAMES[0], START)


async def test_emptied_secret_gets_a_new_authority() -> None:
    store, tls = Store(), RecordingTls()
    reconciler = trust(store, tls)
    await reconciler.reconcile()
    await reconciler.reconcile()
    assert store.secret is not None
    before = store.secret.data
    store.secret = SecretData({}, "9", store.secret.uid)
    await reconciler.reconcile()
    assert store.secret.data["ca.crt"] != before["ca.crt"]
    assert store.bundle() == store.secret.data["ca.crt"]
    assert len(tls.served) == 2


async def test_deleted_secret_that_cannot_be_restored_is_reported_and_injection_continues() -> None:
    store, tls = Store(), RecordingTls()
    reconciler = trust(store, tls)
    await reconciler.reconcile()
    bundle = store.bundle()
    store.secret, store.may_create = None, False
    store.targets_by_name["one"] = configuration("one")
    with pytest.raises(SecretMissing):
        await trust(store).reconcile()
    with pytest.raises(TrustError, match="forbidden"):
        await reconciler.reconcile()
    assert store.bundle() == bundle
    assert len(tls.served) == 1


class Running:
    """`Trust.run` in virtual time. The certificates' clock follows the loop."""

    def __init__(self, store: Store, settings: TrustSettings = SETTINGS) -> None:
        self.loop = VirtualTimeLoop()
        self.problems: list[str] = []
        self.trust = Trust(
            store,
            ServingTls(),
            settings,
            clock=lambda: START + datetime.timedelta(seconds=self.loop.now - 1000),
            planner=plan_renewal_in_process,
            on_problem=self.problems.append,
        )

    def for_seconds(self, seconds: float, *actions: tuple[float, Callable[[], object]]) -> None:
        """Runs and performs the actions at their times. Asserts that no task is left."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for at, action in actions:
                loop.call_later(at, action)
            task = asyncio.create_task(self.trust.run())
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        try:
            self.loop.run(main())
        finally:
            self.loop.close()
        assert self.loop.errors == []


def test_change_is_reconciled_without_waiting_for_the_next_period() -> None:
    store = Store()
    store.watching = True
    running = Running(store)
    bundles: list[bytes] = []

    def reapply() -> None:
        store.targets_by_name["one"] = configuration("one")
        store.changed()

    running.for_seconds(100, (50, reapply), (50.5, lambda: bundles.append(store.bundle())))
    assert bundles == [store.bundle()] != [b""]


@pytest.mark.parametrize(("watching", "reads"), [(True, 3), (False, 60)])
def test_polling_is_used_only_without_watch(watching: bool, reads: int) -> None:
    store = Store()
    store.watching = watching
    Running(store).for_seconds(599)
    # The first pass and the pass that its own writes cause are included.
    assert reads - 2 <= store.reads <= reads + 2


def test_writer_that_reverts_changes_causes_few_patches_in_a_minute() -> None:
    store = Store()
    store.watching = True
    running = Running(store)

    def revert() -> None:
        running.loop.call_soon(reapply)

    def reapply() -> None:
        store.targets_by_name["one"] = configuration("one")
        store.changed()

    store.on_patch = revert
    running.for_seconds(60)
    assert 5 <= store.patches <= 10


def test_certificate_is_renewed_when_due_although_nothing_changes() -> None:
    store = Store()
    store.watching = True
    policy = CertificatePolicy(serving=datetime.timedelta(minutes=30), overlap=datetime.timedelta(0))
    running = Running(store, msgspec.structs.replace(SETTINGS, policy=policy, resync=1e6))
    versions: list[int] = []
    running.for_seconds(3600, *((at, lambda: versions.append(store.version)) for at in (10, 3500)))
    assert versions[0] == 1
    assert versions[1] >= 3


def test_problem_is_reported_once_and_retried_until_it_is_solved() -> None:
    store = Store()
    store.may_create = False
    running = Running(store)
    running.for_seconds(60, (33, lambda: setattr(store, "may_create", True)))
    assert running.problems == [str(SecretMissing("system", "own", "forbidden"))]
    assert store.secret is not None
