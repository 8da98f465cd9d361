"""Another program that changes the operator's objects, and an API server that records the writes of the operator."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kubeapi import KubeApi, Object
from operatorscenarios import NAMESPACE, duplicate

from accelplane.apiserver.clock import loop_time
from accelplane.kube.testing.handlers import Handlers
from accelplane.operator.shared import GPU_MANAGER_BINDING

DAEMONSET = "intel-gpu-plugin-mine"
SECRET, WEBHOOKS = "webhook-certificate", "webhooks"
_OTHERS: tuple[list[Object], ...] = (
    [],
    [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "x", "uid": "1", "controller": True}],
    [
        {
            "apiVersion": "deviceplugin.intel.com/v1",
            "kind": "QatDevicePlugin",
            "name": "x",
            "uid": "2",
            "controller": True,
        }
    ],
)
Key = tuple[str, str, str]


class ObservedApi(KubeApi):
    """Records when the program wrote which object, and which objects of others it touched."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: defaultdict[Key, list[float]] = defaultdict(list)
        self.foreign: list[str] = []
        self._handling = False
        self._handlers = _Observed(self)

    def store(self, plural: str, thing: Object) -> Object:
        self._observe((plural, thing["metadata"].get("namespace", ""), thing["metadata"]["name"]))
        return super().store(plural, thing)

    def remove(self, plural: str, name: str, namespace: str = "") -> None:
        self._observe((plural, namespace, name))
        super().remove(plural, name, namespace)

    def handle(self, work: Callable[[], Any]) -> Any:
        """Handles a request: its writes are those of the program, other writes those of the test."""
        self._handling = True
        try:
            return work()
        finally:
            self._handling = False

    def most_writes_in_a_minute(self) -> tuple[int, Key | None]:
        most: tuple[int, Key | None] = (0, None)
        for key, times in self.writes.items():
            for index, start in enumerate(times):
                count = sum(1 for each in times[index:] if each < start + 60)
                most = max(most, (count, key), key=lambda each: each[0])
        return most

    def _observe(self, key: Key) -> None:
        if not self._handling:
            return
        self.writes[key].append(loop_time())
        known = self.objects.get(key)
        if known is not None and not _is_of_the_operator(key[0], known):
            self.foreign.append("/".join(key))


class _Observed(Handlers):
    def __init__(self, api: ObservedApi) -> None:
        super().__init__(api, lambda thing: api.admit(thing))  # noqa: PLW0108 - a test sets `admit` later
        self._api = api

    def handle(self, request: Any) -> tuple[int, Object]:
        return self._api.handle(lambda: super(_Observed, self).handle(request))


def _is_of_the_operator(plural: str, thing: Object) -> bool:
    match plural:
        case "daemonsets":
            owners = [each for each in thing["metadata"].get("ownerReferences") or () if each.get("controller")]
            return [(each["kind"], each["name"]) for each in owners] in (
                [("GpuDevicePlugin", "mine")],
                [("QatDevicePlugin", "mine")],
            )
        case "clusterrolebindings":
            return thing["roleRef"]["name"] == "inteldeviceplugins-gpu-manager-role" and thing["subjects"] == [
                {"kind": "ServiceAccount", "name": "gpu-manager-sa", "namespace": NAMESPACE}
            ]
        case _:
            return True


class Opponent:
    """The actions of another program, each on the objects as they are. `count` is the number of all actions."""

    def __init__(self, api: ObservedApi) -> None:
        self.api = api
        self.count = 0

    def act(self, name: str) -> None:
        self.count += 1
        ACTIONS[name](self)

    def stop(self) -> None:
        """Deletes the objects of the other program, and everything that it set in those of users."""
        for each in list(self.api.all("daemonsets")):
            if not _is_of_the_operator("daemonsets", each):
                self.api.remove("daemonsets", each["metadata"]["name"], NAMESPACE)
            elif each.get("status"):
                self.api.put("daemonsets", {name: part for name, part in each.items() if name != "status"})
        if (binding := self.api.get("clusterrolebindings", GPU_MANAGER_BINDING)) and not _is_of_the_operator(
            "clusterrolebindings", binding
        ):
            self.api.remove("clusterrolebindings", GPU_MANAGER_BINDING)

    def daemonset(self) -> Object | None:
        """A copy, to edit."""
        return copy.deepcopy(self.api.get("daemonsets", DAEMONSET, NAMESPACE))

    def edit(self, change: Callable[[Object], object]) -> None:
        if found := self.daemonset():
            change(found)
            self.api.put("daemonsets", found)

    def edit_resource(self, plural: str, change: Callable[[Object], object], *, generation: int = 0) -> None:
        found = copy.deepcopy(self.api.get(plural, "mine"))
        if found:
            change(found)
            found["metadata"]["generation"] += generation
            self.api.put(plural, found)

    def delete(self) -> None:
        if self.daemonset():
            self.api.remove("daemonsets", DAEMONSET, NAMESPACE)

    def replace(self) -> None:
        """Deletes the DaemonSet, and creates one of the same name with another owner or none."""
        owners = _OTHERS[self.count % len(_OTHERS)]
        if (found := self.daemonset()) and _is_of_the_operator("daemonsets", found):
            foreign = duplicate(found, DAEMONSET)
            foreign["metadata"]["ownerReferences"] = copy.deepcopy(owners)
            self.delete()
            self.api.put("daemonsets", foreign)

    def replace_and_delete(self) -> None:
        found = self.daemonset()
        (self.replace if found and _is_of_the_operator("daemonsets", found) else self.delete)()

    def copy(self) -> None:
        if (found := self.daemonset()) and not self.api.get("daemonsets", "x", NAMESPACE):
            copied = duplicate(found, "x")
            copied["metadata"]["creationTimestamp"] = "2030-01-01T00:00:00Z"
            self.api.put("daemonsets", copied)

    def recreate_resource(self) -> None:
        """The resource gets another UID."""
        found = copy.deepcopy(self.api.get("gpudeviceplugins", "mine"))
        if not found:
            return
        self.api.remove("gpudeviceplugins", "mine")
        found.pop("status", None)
        self.api.put("gpudeviceplugins", found | {"metadata": {"name": "mine", "generation": 1}})

    def write_config(self) -> None:
        found = copy.deepcopy(self.api.get("configmaps", "functions", NAMESPACE))
        assert found
        found["data"]["qat.conf"] = f"{self.count % 2}"
        self.api.put("configmaps", found)

    def delete_shared(self) -> None:
        for plural, name, namespace in (
            ("clusterrolebindings", GPU_MANAGER_BINDING, ""),
            ("serviceaccounts", "gpu-manager-sa", NAMESPACE),
        ):
            if self.api.get(plural, name, namespace):
                self.api.remove(plural, name, namespace)
        self.set_args("-bad")  # which the operator notices

    def replace_binding(self) -> None:
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpu-manager-role"}
        subject = {"kind": "ServiceAccount", "name": "gpu-manager-sa", "namespace": "default"}
        if self.api.get("clusterrolebindings", GPU_MANAGER_BINDING):
            self.api.remove("clusterrolebindings", GPU_MANAGER_BINDING)
        self.api.put(
            "clusterrolebindings", {"metadata": {"name": GPU_MANAGER_BINDING}, "roleRef": role, "subjects": [subject]}
        )
        self.set_args("-bad")

    def set_args(self, *args: str) -> None:
        def change(found: Object) -> None:
            found["spec"]["template"]["spec"]["containers"][0]["args"] = list(args)

        self.edit(change)

    def set_another_field(self) -> None:
        """Sets one field after the other."""

        def change(found: Object) -> None:
            spec, pod = found["spec"], found["spec"]["template"]["spec"]
            container, index = pod["containers"][0], self.count % 6
            [
                lambda: container.update(args=["-bad"]),
                lambda: container.update(image="other"),
                lambda: pod.update(nodeSelector={"a": "b"}),
                found["metadata"]["labels"].clear,
                lambda: container["securityContext"].update(readOnlyRootFilesystem=False),
                lambda: spec.pop("updateStrategy", None),
            ][index]()

        self.edit(change)

    def clear_status(self) -> None:
        def change(found: Object) -> None:
            found["status"] = {"desiredNumberScheduled": 7, "numberReady": 7}

        self.edit_resource("gpudeviceplugins", change)

    def count_pods(self) -> None:
        """The DaemonSet's status changes."""
        self.edit(lambda found: found.update(status={"desiredNumberScheduled": 9, "numberReady": self.count % 9}))

    def set_owner_references(self, *references: Object) -> None:
        self.edit(lambda found: found["metadata"].update(ownerReferences=copy.deepcopy(list(references))))

    def set_former_owner(self) -> None:
        def change(found: Object) -> None:
            for each in found["metadata"]["ownerReferences"]:
                each["uid"] = "former"

        self.edit(change)

    def empty_secret(self) -> None:
        if found := copy.deepcopy(self.api.get("secrets", SECRET, NAMESPACE)):
            self.api.put("secrets", found | {"data": {}})

    def remove_bundle(self) -> None:
        found = copy.deepcopy(self.api.get("mutatingwebhookconfigurations", WEBHOOKS))
        assert found
        found["webhooks"][0]["clientConfig"].pop("caBundle", None)
        self.api.put("mutatingwebhookconfigurations", found)


ACTIONS: dict[str, Callable[[Opponent], None]] = {
    "edits a field": lambda self: self.set_args("-bad"),
    "edits other fields": Opponent.set_another_field,
    "removes the label": lambda self: self.edit(lambda found: found["metadata"].update(labels={})),
    "deletes": Opponent.delete,
    "replaces": Opponent.replace,
    "replaces and deletes": Opponent.replace_and_delete,
    "removes the owner": lambda self: self.set_owner_references(),
    "sets another owner": lambda self: self.set_owner_references(*_OTHERS[1]),
    "sets a former owner": Opponent.set_former_owner,
    "copies": Opponent.copy,
    "edits the resource": lambda self: self.edit_resource(
        "gpudeviceplugins", lambda found: found["spec"].update(logLevel=self.count % 2), generation=1
    ),
    "creates the resource again": Opponent.recreate_resource,
    "edits the ConfigMap": Opponent.write_config,
    "edits the status": Opponent.clear_status,
    "changes the DaemonSet's status": Opponent.count_pods,
    "deletes shared objects": Opponent.delete_shared,
    "replaces the binding": Opponent.replace_binding,
    "empties the Secret": Opponent.empty_secret,
    "removes the bundle": Opponent.remove_bundle,
}
