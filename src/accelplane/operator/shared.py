"""Objects that custom resources of a kind share: service accounts of plugin pods with rights, and their role bindings.

They exist while a resource needs them: `gpu-manager-sa` for the resource manager of GPUs, which our images and those of
the Go project up to release 0.31 have, and `accelplane-dra-<family>` for claims. `accelplane-dra-<family>-drivers` is
the role with the drivers that the account may publish, for the admission policies of `deploy/dra/policies`. A binding
of this name for another account or role is not the operator's, and is reported.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import TypeVar

from accelplane.apiserver import AlreadyExists, NotFound, StatusError
from accelplane.apiserver.errors import ApiError
from accelplane.kube.client import Client
from accelplane.kube.objects import Metadata
from accelplane.kube.writebudget import WriteBudget
from accelplane.operator.daemonsets import dra
from accelplane.operator.daemonsets.rendering import GPU_MANAGER
from accelplane.operator.models import DevicePlugin, GpuSpec
from accelplane.operator.resources import (
    ClusterRole,
    ClusterRoleBinding,
    PolicyRule,
    RoleReference,
    ServiceAccount,
    Subject,
)
from accelplane.operator.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T", ServiceAccount, ClusterRole, ClusterRoleBinding)
Rules = Callable[[Collection[str]], list[PolicyRule]]

GPU_MANAGER_BINDING = "gpu-manager-rolebinding"
# No watch reports the deletion of a shared object: it would need further rights.
_CHECK_INTERVAL = 600.0


class BindingConflict(ApiError):
    """The binding has the name of the operator's, and is for another account or role."""


class RightsMissing(ApiError):
    """A resource needs rights that the operator may not grant."""


def shared_objects(client: Client, family: str, settings: Settings) -> Sequence["SharedObjects"]:
    """The objects that resources of a kind may need."""
    found: list[SharedObjects] = []
    if family == "gpu":
        found.append(
            SharedObjects(
                client,
                settings.namespace,
                account=GPU_MANAGER,
                binding=GPU_MANAGER_BINDING,
                role=settings.gpu_manager_role,
                needed_by=lambda plugin: isinstance(plugin.spec, GpuSpec) and plugin.spec.resource_manager,
            )
        )
    for status, role in ((False, settings.dra_role), (True, settings.dra_status_role)):
        if role:
            account = dra.account_of(family, status=status)
            for binding, bound, rules in (
                (account, role, None),
                (f"{account}-drivers", f"{account}-drivers", _status_rules if status else _slice_rules),
            ):
                found.append(
                    SharedObjects(
                        client,
                        settings.namespace,
                        account=account,
                        binding=binding,
                        role=bound,
                        needed_by=lambda plugin, account=account: (
                            dra.uses_dra(plugin) and dra.account(plugin) == account
                        ),
                        rules=rules,
                    )
                )
    return found


def _slice_rules(drivers: Collection[str]) -> list[PolicyRule]:
    """What the admission policies check. Without names, a rule would apply to all drivers."""
    names = sorted(drivers)
    return [PolicyRule(["resource.k8s.io"], ["resourceslices/driver"], names, ["publish"])] if names else []


def _status_rules(drivers: Collection[str]) -> list[PolicyRule]:
    """Also what the API server checks for the status of claims, since Kubernetes 1.36."""
    names = sorted(drivers)
    status = PolicyRule(["resource.k8s.io"], ["resourceclaims/driver"], names, ["associated-node:update"])
    return [*_slice_rules(drivers), status] if names else []


class SharedObjects:
    """An account and its binding: created if needed, and deleted once if not.

    With `rules`, in place of the account, the role of the binding, with the rules for the drivers of plugins.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        *,
        account: str,
        binding: str,
        role: str,
        needed_by: Callable[[DevicePlugin], bool],
        rules: Rules | None = None,
    ) -> None:
        self.needed_by = needed_by
        self._client = client
        self._namespace = namespace
        self._account = account
        self._binding = binding
        self._reference = RoleReference(role)
        self._subject = Subject(account, namespace)
        self._rules = rules
        self._budget = WriteBudget()
        self._absent = False

    async def reconcile(self, plugins: Collection[DevicePlugin], *, complete: bool = True) -> float:
        """Creates or deletes them for the plugins that need them. Returns the seconds until the next check.

        `complete`: no other plugin may need them. Raises `ApiError`.
        """
        if plugins:
            self._absent = False
            return await self._make(frozenset(map(dra.driver, plugins)), complete=complete)
        if not self._absent:
            try:
                await self._delete()
            except StatusError as error:
                if not error.permanent:
                    raise
                # An installation that never creates them may not have the right to delete them.
                log.warning("ClusterRoleBinding %s is no longer needed, and stays: %s", self._binding, error)
            self._absent = True
        return 0.0

    async def _delete(self) -> None:
        """Deletes the binding that `_make` creates, and the account. Objects of others with these names stay."""
        try:
            found = await self._client.get(ClusterRoleBinding, self._binding)
        except NotFound:
            return
        if found.roleRef != self._reference or found.subjects != [self._subject]:
            log.info("ClusterRoleBinding %s is for another account or role; it stays", self._binding)
            return
        # The account or role first: the binding is the evidence that it belongs to this operator.
        if self._rules is not None:
            if await self._client.delete(ClusterRole, self._binding):
                self._budget.record(ClusterRole)
        elif await self._client.delete(ServiceAccount, self._account, self._namespace):
            self._budget.record(ServiceAccount)
        metadata = found.metadata
        if await self._client.delete(
            ClusterRoleBinding, self._binding, uid=metadata.uid, resource_version=metadata.resourceVersion
        ):
            self._budget.record(ClusterRoleBinding)

    async def _make(self, drivers: frozenset[str], *, complete: bool) -> float:
        """Creates what does not exist. Older manifests do not have the rights to read. Raises `BindingConflict`."""
        if self._rules is not None:
            delay = await self._make_role(self._rules, drivers, complete=complete)
        else:
            account = ServiceAccount(metadata=Metadata(name=self._account, namespace=self._namespace))
            delay = await self._create(account) if await self._read(account) is None else 0.0
        binding = ClusterRoleBinding(
            metadata=Metadata(name=self._binding), roleRef=self._reference, subjects=[self._subject]
        )
        found = await self._read(binding)
        if found is None:
            delay = max(delay, await self._create(binding))
        elif found.roleRef != self._reference or self._subject not in (found.subjects or ()):
            # It may be that of another installation, such as the kustomization fractional_resources.
            raise BindingConflict(
                f"ClusterRoleBinding {self._binding}",
                f"found {_text(found)}, expected {_text(binding)}; delete it if nothing else uses it",
            )
        return delay or _CHECK_INTERVAL

    async def _make_role(self, rules: Rules, drivers: frozenset[str], *, complete: bool) -> float:
        role = ClusterRole(metadata=Metadata(name=self._binding), rules=rules(drivers))
        found = await self._read(role)
        if found is None:
            return await self._create(role)
        if not complete:
            drivers |= {name for rule in found.rules or () for name in rule.resourceNames}
        if found.rules != rules(drivers):
            if (delay := self._budget.delay(ClusterRole)) > 0:
                return delay
            found.rules = rules(drivers)
            await self._client.replace(found)
            self._budget.record(ClusterRole)
        return 0.0

    async def _create(self, desired: T) -> float:
        """Creates an object, unless another program deletes it again and again. Returns the seconds to wait."""
        kind = type(desired)
        if (delay := self._budget.delay(kind)) > 0:
            return delay
        try:
            await self._client.create(desired)
        except AlreadyExists:
            log.warning("%s %s exists and is not verified", kind.__name__, desired.metadata.name)
        else:
            self._budget.record(kind)
        return 0.0

    async def _read(self, desired: T) -> T | None:
        """The existing object, None if there is none or it must not be read."""
        try:
            return await self._client.get(type(desired), desired.metadata.name or "", desired.metadata.namespace or "")
        except NotFound:
            return None
        except StatusError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise
            return None


def _text(binding: ClusterRoleBinding) -> str:
    subjects = ", ".join(f"{each.kind} {each.namespace}/{each.name}" for each in binding.subjects or ())
    return f"role {binding.roleRef.name} for {subjects or 'no account'}"
