#!/usr/bin/env python3
"""Installs Accelplane without network, from the directory of the unpacked offline archive. Needs Python 3.9 or newer.

install.py verify [--key release.pub]       compare all files with SHA256SUMS, and its signature with a key
install.py load                             import the images into containerd of this node
install.py push REGISTRY                    push the images and charts, with their signatures, to a registry
install.py list                             print the names of manifests
install.py show [--registry REGISTRY] NAME  print a manifest
install.py apply [--registry REGISTRY] NAME apply a manifest with kubectl
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

# Compiled modules would be files that are not in SHA256SUMS.
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from registry import ADDRESS, Registry, RegistryError  # noqa: E402 - without a compiled module

HERE = Path(__file__).resolve().parent


class InstallError(Exception):
    """The message says what was found and what to do."""


def verify(key):
    """Compares every file with its checksum, and the checksums with their signature."""
    sums = HERE / "SHA256SUMS"
    if key:
        command = ["openssl", "dgst", "-sha256", "-verify", key, "-signature", str(HERE / "SHA256SUMS.der"), str(sums)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise InstallError(f"openssl: {error}; install it to verify the signature") from error
        if done.returncode:
            raise InstallError(f"SHA256SUMS: the signature does not fit to {key}: {done.stderr.strip()[:300]}")
        print(f"SHA256SUMS is signed by {key}")
    else:
        print("No --key is given: the signature is not verified", file=sys.stderr)
    lines = [line.partition("  ") for line in sums.read_text().splitlines()]
    expected = {name: digest for digest, _, name in lines}
    own = {"SHA256SUMS", "SHA256SUMS.der"}
    found = {str(file.relative_to(HERE)) for file in HERE.rglob("*") if file.is_symlink() or not file.is_dir()}
    for name in sorted(found - own - set(expected)):
        raise InstallError(f"{name}: not in SHA256SUMS; unpack the archive again")
    for name, digest in expected.items():
        if name not in found:
            raise InstallError(f"{name}: not found; unpack the archive again")
        if (HERE / name).is_symlink() or not (HERE / name).is_file() or _digest(HERE / name) != digest:
            raise InstallError(f"{name}: found other content than that of SHA256SUMS; do not use it")
    print(f"{len(expected)} files are unchanged")


def _digest(file):
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def load(command, namespace):
    """Imports all images into containerd, under their tags and digests."""
    words = [*shlex.split(command), "--namespace", namespace, "images", "import", "-"]
    if not command.split():
        raise InstallError("--ctr: found no program, expected ctr of containerd")
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE)
    except OSError as error:
        raise InstallError(f"{words[0]}: {error}; set --ctr to the program ctr of containerd") from error
    try:
        with tarfile.open(fileobj=process.stdin, mode="w|") as tar:
            for name in ("oci-layout", "index.json"):
                tar.add(HERE / "images" / name, arcname=name)
            for file in sorted((HERE / "images/blobs/sha256").iterdir()):
                tar.add(file, arcname=f"blobs/sha256/{file.name}")
        process.stdin.close()
    except BrokenPipeError:
        pass  # The exit status below says that the import has failed.
    except BaseException:
        # Without all blobs nothing may be imported.
        process.kill()
        process.wait()
        raise
    if process.wait():
        raise InstallError(f"{' '.join(words)}: failed with status {process.returncode}")


def push(address, plain_http, ca_file):
    """Pushes the images, and the charts to `charts/`. The tag of each is written after its signature."""
    registry = Registry(address, plain_http=plain_http, ca_file=ca_file)
    signatures = dict(_named("signatures"))
    artefacts = [(name, "images", entry) for name, entry in _named("images")]
    artefacts += [(f"charts/{name}", "charts/oci", entry) for name, entry in _named("charts/oci")]
    for reference, layout, entry in artefacts:
        name, _, tag = reference.partition(":")
        signature_tag = f"{entry['digest'].replace(':', '-')}.sig"
        signature = signatures.get(f"{name}:{signature_tag}")
        if not signature:
            raise InstallError(f"signatures: found none of {name}@{entry['digest']}; unpack the archive again")
        registry.push(name, HERE / layout, entry, [])
        registry.push(name, HERE / "signatures", signature, [signature_tag])
        registry.tag(name, HERE / layout, entry, tag)
        print(f"{address}/{name}:{tag}")


def _named(layout):
    """The entries of an OCI image layout that have a name and a tag."""
    for entry in json.loads((HERE / layout / "index.json").read_text())["manifests"]:
        reference = entry["annotations"].get("org.opencontainers.image.ref.name", "")
        if reference:
            yield reference, entry


def manifest(name, address):
    """The text of a manifest, with images of another registry."""
    names = sorted(str(file.relative_to(HERE / "manifests"))[:-5] for file in (HERE / "manifests").rglob("*.yaml"))
    if name not in names:
        raise InstallError(f"{name}: no such manifest, expected one of: {', '.join(names)}")
    text = (HERE / "manifests" / f"{name}.yaml").read_text()
    original = json.loads((HERE / "release.json").read_text())["registry"]
    if not address:
        return text
    if not ADDRESS.fullmatch(address):
        raise InstallError(f"--registry: found {address!a}, expected a host and path as in mirror.example/tools")
    return text.replace(f"{original}/", f"{address}/").replace(f"image-vendor={original}", f"image-vendor={address}")


def apply(name, address, command):
    """Applies a manifest with kubectl."""
    # Server-side: the definitions are too long for the annotation of client-side apply.
    words = [*shlex.split(command), "apply", "--server-side", "--filename", "-"]
    try:
        done = subprocess.run(words, input=manifest(name, address), text=True, check=False)
    except OSError as error:
        raise InstallError(f"{words[0]}: {error}; set --kubectl") from error
    if done.returncode:
        raise InstallError(f"{' '.join(words)}: failed with status {done.returncode}")


def main():
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify").add_argument("--key", default="", help="public key that you trust")
    importing = commands.add_parser("load")
    importing.add_argument("--ctr", default="ctr", help="the program ctr, with options")
    importing.add_argument("--namespace", default="k8s.io")
    pushing = commands.add_parser("push")
    pushing.add_argument("registry", help="registry and path; credentials: REGISTRY_USER and REGISTRY_PASSWORD")
    pushing.add_argument("--plain-http", action="store_true")
    pushing.add_argument("--ca-file", default="")
    commands.add_parser("list")
    for word in ("show", "apply"):
        one = commands.add_parser(word)
        one.add_argument("name")
        one.add_argument("--registry", default="", help="registry and path of the images")
        if word == "apply":
            one.add_argument("--kubectl", default="kubectl", help="the program kubectl, with options")
    given = parser.parse_args()
    try:
        if given.command == "verify":
            verify(given.key)
        elif given.command == "load":
            load(given.ctr, given.namespace)
        elif given.command == "push":
            push(given.registry, given.plain_http, given.ca_file)
        elif given.command == "list":
            for file in sorted((HERE / "manifests").rglob("*.yaml")):
                print(str(file.relative_to(HERE / "manifests"))[:-5])
        elif given.command == "show":
            print(manifest(given.name, given.registry), end="")
        else:
            apply(given.name, given.registry, given.kubectl)
    except (InstallError, RegistryError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
