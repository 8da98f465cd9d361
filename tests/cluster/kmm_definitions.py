"""The API of Kernel Module Management: its kinds, and the validation of its webhook.

The schemas have the fields, defaults and rules that section 17 of the specification of the Onload operator lists. The
webhook is a ValidatingAdmissionPolicy: the API server evaluates the same rules itself.
"""

from __future__ import annotations

from typing import Any

from .kmm_decisions import Generation

Object = dict[str, Any]

GROUP = "kmm.sigs.x-k8s.io"
VERSION = "v1beta1"
MODULES = f"/apis/{GROUP}/{VERSION}/modules"
NODE_CONFIGS = f"/apis/{GROUP}/{VERSION}/nodemodulesconfigs"
POLICY = "kmm-webhook"
REJECT_ALL = "kmm-webhook-rejects-all"

_STRING: Object = {"type": "string"}
_STRINGS: Object = {"type": "array", "items": _STRING}
_ANY: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_LOCAL: Object = {"type": "object", "properties": {"name": _STRING}, "x-kubernetes-map-type": "atomic"}
_COUNT: Object = {"type": "integer", "format": "int32"}
_COUNTS: Object = {
    "type": "object",
    "properties": {"nodesMatchingSelectorNumber": _COUNT, "desiredNumber": _COUNT, "availableNumber": _COUNT},
}
_BUILD: Object = {
    "type": "object",
    "required": ["dockerfileConfigMap"],
    "properties": {
        "buildArgs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "value"],
                "properties": {"name": _STRING, "value": _STRING},
            },
        },
        "dockerfileConfigMap": _LOCAL,
        "secrets": {"type": "array", "items": _LOCAL},
        "baseImageRegistryTLS": _ANY,
    },
}


def definitions(generation: Generation) -> list[Object]:
    """The CustomResourceDefinitions of a generation."""
    module = _definition("Module", "modules", "Namespaced", _module(generation), [])
    if generation == 1:
        return [module]
    node_config = {"spec": _node_modules(boot=False), "status": _node_modules(boot=True)}
    return [module, _definition("NodeModulesConfig", "nodemodulesconfigs", "Cluster", node_config, ["nmc"])]


def webhook(generation: Generation) -> list[Object]:
    """The admission policy with the validation of KMM's webhook."""
    mappings = "object.spec.moduleLoader.container.kernelMappings"
    modprobe = "object.spec.moduleLoader.container.modprobe"
    # A regular expression that does not compile is an evaluation error, which rejects the request.
    rules = {
        f"{mappings}.all(m, has(m.regexp) && m.regexp != '' ? (!has(m.literal) || m.literal == '') : "
        "(has(m.literal) && m.literal != ''))": "each kernel mapping needs either regexp or literal",
        f"{mappings}.all(m, !has(m.regexp) || ('x'.matches(m.regexp) ? true : true))": "invalid regexp",
        f"{mappings}.all(m, (has(m.containerImage) && m.containerImage != '') || "
        "(has(object.spec.moduleLoader.container.containerImage) && "
        "object.spec.moduleLoader.container.containerImage != ''))": "each kernel mapping needs an image",
        f"!(has({modprobe}.moduleName) && has({modprobe}.rawArgs))": "moduleName and rawArgs are exclusive",
    }
    if generation == 2:
        version = "(has({0}.spec.moduleLoader.container.version) ? {0}.spec.moduleLoader.container.version : '')"
        new, old = version.format("object"), version.format("oldObject")
        rules |= {
            "object.metadata.name.size() + object.metadata.namespace.size() <= 40": "name and namespace are too long",
            f"oldObject == null || ({new} == '') == ({old} == '')": "version cannot change from or to empty",
            f"{mappings}.all(m, !has(m.containerImage) || m.containerImage == '' || "
            "m.containerImage.split('/')[m.containerImage.split('/').size() - 1].matches('[:@]'))": (
                "a container image needs a tag or digest"
            ),
            f"!has({modprobe}) || !has(object.spec.moduleLoader.container.inTreeModuleToRemove) || "
            "!has(object.spec.moduleLoader.container.inTreeModulesToRemove)": (
                "inTreeModuleToRemove and inTreeModulesToRemove are exclusive"
            ),
        }
    validations = [
        {"expression": f"!has(object.spec.moduleLoader) || ({expression})", "message": message}
        for expression, message in rules.items()
    ]
    return _policy(POLICY, validations)


def rejecting_webhook() -> list[Object]:
    """An admission policy that rejects every creation and change of a Module."""
    return _policy(REJECT_ALL, [{"expression": "false", "message": "rejected by the test"}])


def _policy(name: str, validations: list[Object]) -> list[Object]:
    kind = "ValidatingAdmissionPolicy"
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["modules"],
    }
    spec = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}, "validations": validations}
    version = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    binding = {"policyName": name, "validationActions": ["Deny"]}
    return [{**version, "kind": kind, "spec": spec}, {**version, "kind": f"{kind}Binding", "spec": binding}]


def _definition(kind: str, plural: str, scope: str, properties: Object, short: list[str]) -> Object:
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List", "shortNames": short}
    schema = {"type": "object", "properties": {"apiVersion": _STRING, "kind": _STRING, "metadata": {"type": "object"}}}
    schema["properties"] |= properties
    served = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": scope, "names": names, "versions": [served]},
    }


def _modprobe(generation: Generation) -> Object:
    fields: Object = {
        "moduleName": _STRING,
        "dirName": {"type": "string", "default": "/opt"},
        "parameters": _STRINGS,
        "args": {"type": "object", "properties": {"load": _STRINGS, "unload": _STRINGS}},
        "rawArgs": {"type": "object", "properties": {"load": _STRINGS, "unload": _STRINGS}},
        "firmwarePath": _STRING,
        "modulesLoadingOrder": _STRINGS,
    }
    required = ["moduleName"] if generation == 1 else []
    return _structure(fields, required)


def _module(generation: Generation) -> Object:
    removal: Object = {"inTreeModuleToRemove": _STRING}
    if generation == 2:
        removal["inTreeModulesToRemove"] = _STRINGS
    mapping = _structure(
        {"regexp": _STRING, "literal": _STRING, "containerImage": _STRING, "build": _BUILD, **removal},
        ["containerImage"] if generation == 1 else [],
    )
    container = _structure(
        {
            "containerImage": _STRING,
            "imagePullPolicy": _STRING,
            "version": _STRING,
            "modprobe": _modprobe(generation),
            "kernelMappings": {"type": "array", "minItems": 1, "items": mapping},
            **removal,
        },
        ["kernelMappings", "modprobe"],
    )
    loader = _structure({"serviceAccountName": _STRING, "container": container}, ["container"])
    spec: Object = {
        "selector": {"type": "object", "additionalProperties": _STRING},
        "moduleLoader": loader,
        "devicePlugin": _ANY,
        "imageRepoSecret": _LOCAL,
    }
    if generation == 2:
        spec |= {"tolerations": {"type": "array", "items": _ANY}, "imageRebuildTriggerGeneration": {"type": "integer"}}
    required = ["selector", "moduleLoader"] if generation == 1 else ["selector"]
    status = _structure({"moduleLoader": _COUNTS, "devicePlugin": _COUNTS}, [])
    return {"spec": _structure(spec, required), "status": status}


def _node_modules(*, boot: bool) -> Object:
    config = _structure(
        {
            "kernelVersion": _STRING,
            "containerImage": _STRING,
            "imagePullPolicy": _STRING,
            "insecurePull": {"type": "boolean"},
            "inTreeModulesToRemove": _STRINGS,
            "modprobe": _modprobe(2),
        },
        ["kernelVersion", "containerImage"],
    )
    fields: Object = {
        "name": _STRING,
        "namespace": _STRING,
        "serviceAccountName": {"type": "string", "default": "default"},
        "imageRepoSecret": _LOCAL,
        "tolerations": {"type": "array", "items": _ANY},
        "version": _STRING,
        "config": config,
    }
    if boot:
        fields["bootId"] = _STRING
    modules = {"type": "array", "items": _structure(fields, ["name", "namespace", "config"])}
    return _structure({"modules": modules}, [])


def _structure(properties: Object, required: list[str]) -> Object:
    schema: Object = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema
