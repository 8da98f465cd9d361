#!/bin/bash
# Creates output/99-sfc-machineconfig.yaml: OpenShift nodes that use the sfc module of an image from their start.
#
#     create_machine_config.sh OPENSHIFT_VERSION MODULE_IMAGE NODE_TYPE
#
# In the image, ${KERNEL_FULL_VERSION} is not replaced: it needs the kernel version of the nodes. Needs butane.
set -euo pipefail

usage() {
    echo "usage: $0 OPENSHIFT_VERSION MODULE_IMAGE NODE_TYPE" >&2
    echo "for example: $0 4.12.0 registry/onload-module:8.1.2.26-4.18.0-372.49.1.el8_6.x86_64 worker" >&2
    exit 1
}

fail() {
    echo "$0: $*" >&2
    exit 1
}

[ $# -eq 3 ] || usage
[[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "OpenShift version: found '$1', expected for example 4.12.0"
[[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$ ]] || fail "module image: found '$2', expected the reference of an image"
[[ $3 =~ ^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$ ]] || fail "node type: found '$3', expected for example worker"

cd "$(dirname "$0")"
mkdir -p output
result=output/99-sfc-machineconfig.yaml
trap 'rm -f "$result.part"' EXIT
sed -e "s|SED_OPENSHIFT_VERSION|$1|g" -e "s|SED_ONLOAD_MODULE_IMAGE|$2|g" -e "s|SED_NODE_TYPE|$3|g" \
    99-sfc-machineconfig.bu | ${BUTANE:-butane} --strict >"$result.part"
mv "$result.part" "$result"
echo "$PWD/$result"
