"""The Modules of KMM for one Onload resource: `onload`, and `sfc` if a kernel mapping requests it.

    module(onload, version, kmm)        the Module of onload
    sfc_module(onload, version, kmm)    the Module of sfc
    without_reload(made, live, kmm)     the Module with the fields of the existing one that must not change

Facts: the Modules of the Onload operator 3.0.1, the API of KMM 1.1 and 2.x.
"""

from collections.abc import Mapping, Sequence

import msgspec

from accelplane.kube.jsontypes import Json, JsonObject, as_mapping
from accelplane.kube.objects import Metadata
from accelplane.onload.models import KernelMapping, Onload
from accelplane.onload.names import KMM_VERSION, MODULE_COMPONENT, Names
from accelplane.onload.resources import Definition, Module

# Loading fails if another onload or sfc is loaded already, so that it is noticed.
FIRST_TIME = "--first-time"
_POLICY, _DEFAULT_POLICY = "imagePullPolicy", "IfNotPresent"


class KmmApi(msgspec.Struct, frozen=True):
    """Fields that the served version of KMM has."""

    in_tree_list: bool = False
    tolerations: bool = False

    @property
    def uses_worker_pods(self) -> bool:
        """Whether modules are loaded by pods that end afterwards, as in 2.x. A later change of them is harmless."""
        return self.in_tree_list or self.tolerations


def kmm_api(definition: Definition) -> KmmApi:
    """The fields of a definition of `Module`."""
    container = ("spec", "moduleLoader", "container")
    return KmmApi(
        in_tree_list=definition.has_field(KMM_VERSION, *container, "inTreeModulesToRemove"),
        tolerations=definition.has_field(KMM_VERSION, "spec", "tolerations"),
    )


def module(onload: Onload, version: str, kmm: KmmApi) -> Module:
    """The Module of `onload`."""
    parameters = onload.spec.onload.module_parameters
    mappings = [_mapping(each, build=True) for each in onload.spec.onload.kernel_mappings]
    container = _container(onload, version, "onload", parameters.onload if parameters else (), mappings)
    return _module(onload, names_of(onload).module, container, kmm)


def sfc_module(onload: Onload, version: str, kmm: KmmApi) -> Module:
    """The Module of `sfc`. It uses the images that are built for `onload`, and removes the driver of the kernel."""
    parameters = onload.spec.onload.module_parameters
    mappings = [_mapping(each, build=False) for each in onload.spec.onload.kernel_mappings if each.sfc is not None]
    container = _container(onload, version, "sfc", parameters.sfc if parameters else (), mappings)
    if kmm.in_tree_list:
        container["inTreeModulesToRemove"] = ["sfc"]
    else:
        container["inTreeModuleToRemove"] = "sfc"
    return _module(onload, names_of(onload).sfc_module, container, kmm)


def without_reload(made: Module, live: Module, kmm: KmmApi) -> Module:
    """The Module with the fields of the existing one of the same version whose change would reload the module.

    KMM would do so on all nodes simultaneously, also where applications use the module: 2.x if the pull policy differs,
    1.1, which runs the loader pods as DaemonSets, if the account or the pull secret differ as well.
    """
    loader, found = _loader(made), _loader(live)
    container, before = as_mapping(loader.get("container")) or {}, as_mapping(found.get("container")) or {}
    if container.get("version") != before.get("version"):
        return made
    spec = dict(made.spec)
    if (container.get(_POLICY) or _DEFAULT_POLICY) != (before.get(_POLICY) or _DEFAULT_POLICY):
        container = _with_field(container, _POLICY, before.get(_POLICY))
    loader = {**loader, "container": container}
    if not kmm.uses_worker_pods:
        loader = _with_field(loader, "serviceAccountName", found.get("serviceAccountName"))
        spec = _with_field(spec, "imageRepoSecret", live.spec.get("imageRepoSecret"))
    return msgspec.structs.replace(made, spec={**spec, "moduleLoader": loader})


def _loader(made: Module) -> Mapping[str, object]:
    return as_mapping(made.spec.get("moduleLoader")) or {}


def _with_field(fields: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    """The fields with another value, or without the field if the value is None."""
    others = {key: each for key, each in fields.items() if key != name}
    return others if value is None else {**others, name: value}


def names_of(onload: Onload) -> Names:
    """The names that belong to a resource."""
    return Names(onload.metadata.namespace, onload.metadata.name)


def _module(onload: Onload, name: str, container: JsonObject, kmm: KmmApi) -> Module:
    spec: JsonObject = {
        "selector": {**onload.spec.selector},
        "moduleLoader": {"serviceAccountName": onload.spec.service_account_name, "container": container},
    }
    if onload.spec.image_pull_secret is not None:
        spec["imageRepoSecret"] = {"name": onload.spec.image_pull_secret.name}
    if onload.spec.tolerations and kmm.tolerations:
        spec["tolerations"] = [*msgspec.to_builtins(onload.spec.tolerations)]
    names = names_of(onload)
    metadata = Metadata(name=name, namespace=names.namespace, labels=names.base_labels(MODULE_COMPONENT))
    return Module(metadata=metadata, spec=msgspec.convert(spec, dict[str, object]))


def _container(
    onload: Onload, version: str, name: str, parameters: Sequence[str], mappings: Sequence[JsonObject]
) -> JsonObject:
    container: JsonObject = {
        "modprobe": {"moduleName": name, "parameters": [FIRST_TIME, *parameters]},
        "version": version,
        "kernelMappings": [*mappings],
    }
    if onload.spec.onload.image_pull_policy:
        container["imagePullPolicy"] = onload.spec.onload.image_pull_policy
    return container


def _mapping(mapping: KernelMapping, *, build: bool) -> JsonObject:
    made: JsonObject = {"regexp": mapping.regexp, "containerImage": mapping.kernel_module_image}
    if build and mapping.build is not None:
        arguments: list[Json] = [{"name": each.name, "value": each.value} for each in mapping.build.build_args or ()]
        made["build"] = {
            "buildArgs": arguments,
            "dockerfileConfigMap": {"name": mapping.build.dockerfile_config_map.name},
        }
    return made
