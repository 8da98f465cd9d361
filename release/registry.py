"""A client of OCI registries with the standard library only: the installer of the offline archive uses this file too.

Specification: OCI Distribution 1.1. Blobs are uploaded in one request; blobs that the registry has are not sent again.
"""

import base64
import hashlib
import http.client
import json
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

# A host and a path. The host has a dot or a port, or is localhost: without them, other programs take it for a path.
ADDRESS = re.compile(
    r"(?:localhost|(?=[^/]*[.:])[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
)
_TIMEOUT = 120
_MAX_ANSWER = 8 * 1024 * 1024
_ACCEPT = ", ".join(
    f"application/vnd.{kind}"
    for kind in (
        "oci.image.index.v1+json",
        "oci.image.manifest.v1+json",
        "docker.distribution.manifest.list.v2+json",
        "docker.distribution.manifest.v2+json",
    )
)


class RegistryError(Exception):
    """A request that the registry did not answer as expected."""


class Registry:
    """A registry and a path in it, such as `mirror.example:5000/tools`.

    Credentials are those of the variables REGISTRY_USER and REGISTRY_PASSWORD. Plain HTTP is used for loopback
    addresses and with `plain_http`.
    """

    def __init__(self, address: str, *, plain_http: bool = False, ca_file: str = "") -> None:
        """Connects with the first request. Raises `RegistryError` if the address is not valid."""
        if not ADDRESS.fullmatch(address):
            raise RegistryError(
                f"registry: found {address!a}, expected a host and path without scheme, as in mirror.example/tools"
            )
        self.host, _, self.path = address.partition("/")
        name = self.host.partition(":")[0]
        # The images of docker.io are served by another host.
        host = "registry-1.docker.io" if self.host == "docker.io" else self.host
        self.base = f"{'http' if plain_http or name in {'localhost', '127.0.0.1'} else 'https'}://{host}"
        self._context = ssl.create_default_context(cafile=ca_file or None)
        user, password = os.environ.get("REGISTRY_USER", ""), os.environ.get("REGISTRY_PASSWORD", "")
        self._basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._authorization: dict[str, str] = {}

    def repository(self, name: str) -> str:
        """The path of an image in the registry."""
        return f"{self.path}/{name}" if self.path else name

    def manifest(self, name: str, reference: str) -> tuple[bytes, str]:
        """The manifest of a tag or digest, and its media type. A digest is compared with the content."""
        url = f"/v2/{self.repository(name)}/manifests/{quote(reference, safe=':')}"
        status, headers, content = self._request("GET", url, name, {"Accept": _ACCEPT})
        if status != 200:
            raise self._error("GET", url, status, content)
        if reference.startswith("sha256:") and f"sha256:{hashlib.sha256(content).hexdigest()}" != reference:
            raise RegistryError(f"{self.host}{url}: found content with another digest")
        return content, headers.get("content-type", "").partition(";")[0]

    def digest(self, name: str, tag: str) -> str:
        """The digest of the manifest of a tag; empty if there is none."""
        url = f"/v2/{self.repository(name)}/manifests/{quote(tag, safe='')}"
        status, _, content = self._request("GET", url, name, {"Accept": _ACCEPT})
        # Registries answer 401 or 403 for a repository that does not exist yet. Wrong credentials fail with the upload.
        if status in {401, 403, 404}:
            return ""
        if status != 200:
            raise self._error("GET", url, status, content)
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    def blob(self, name: str, digest: str, size: int = _MAX_ANSWER) -> bytes:
        """A blob of at most `size` bytes, which is compared with its digest."""
        url = f"/v2/{self.repository(name)}/blobs/{digest}"
        status, headers, content = self._request("GET", url, name, {}, limit=size)
        if status in {301, 302, 303, 307, 308} and "location" in headers:
            location = urljoin(f"{self.base}{url}", headers["location"])
            status, _, content = self._request("GET", location, "", {}, limit=size)
        if status != 200:
            raise self._error("GET", url, status, content)
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            raise RegistryError(f"{self.host}{url}: found content with another digest")
        return content

    def push(self, name: str, layout: Path, descriptor: Mapping[str, Any], tags: Iterable[str]) -> None:
        """Pushes a manifest or index of an OCI image layout with everything that it refers to."""
        content = self._push_manifest(name, layout, descriptor)
        for tag in tags:
            self._put_manifest(name, tag, content, str(descriptor["mediaType"]))

    def tag(self, name: str, layout: Path, descriptor: Mapping[str, Any], tag: str) -> None:
        """Gives a manifest or index that `push` has pushed a tag."""
        self._put_manifest(name, tag, _file(layout, descriptor["digest"]).read_bytes(), str(descriptor["mediaType"]))

    def _push_manifest(self, name: str, layout: Path, descriptor: Mapping[str, Any]) -> bytes:
        content = _file(layout, descriptor["digest"]).read_bytes()
        parsed = json.loads(content)
        for child in parsed.get("manifests", []):
            self._push_manifest(name, layout, child)
        for child in (*parsed.get("layers", []), *([parsed["config"]] if "config" in parsed else [])):
            self._push_blob(name, _file(layout, child["digest"]), child["digest"])
        self._put_manifest(name, descriptor["digest"], content, str(descriptor["mediaType"]))
        return content

    def _push_blob(self, name: str, file: Path, digest: str) -> None:
        path = f"/v2/{self.repository(name)}/blobs"
        status, _, _ = self._request("HEAD", f"{path}/{digest}", name, {}, push=True)
        if status == 200:
            return
        status, headers, content = self._request("POST", f"{path}/uploads/", name, {"Content-Length": "0"}, push=True)
        if status != 202 or "location" not in headers:
            raise self._error("POST", f"{path}/uploads/", status, content)
        location = urljoin(f"{self.base}{path}/uploads/", headers["location"])
        target = f"{location}{'&' if '?' in location else '?'}{urlencode({'digest': digest})}"
        sent = {"Content-Type": "application/octet-stream", "Content-Length": str(file.stat().st_size)}
        status, _, content = self._request("PUT", target, name, sent, body=file, push=True)
        if status != 201:
            raise self._error("PUT", target, status, content)

    def _put_manifest(self, name: str, reference: str, content: bytes, media_type: str) -> None:
        url = f"/v2/{self.repository(name)}/manifests/{quote(reference, safe=':')}"
        status, _, answer = self._request("PUT", url, name, {"Content-Type": media_type}, body=content, push=True)
        if status != 201:
            raise self._error("PUT", url, status, answer)

    def _request(
        self, method: str, url: str, name: str, headers: Mapping[str, str], *, body: Any = None, push: bool = False,
        limit: int = _MAX_ANSWER,
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        status, answered, content = self._send(method, url, name, headers, body=body, limit=limit)
        if status == 401 and name:
            self._authenticate(name, answered.get("www-authenticate", ""), push=push)
            status, answered, content = self._send(method, url, name, headers, body=body, limit=limit)
        return status, answered, content

    def _send(
        self, method: str, url: str, name: str, headers: Mapping[str, str], *, body: Any, limit: int
    ) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(urljoin(self.base, url))
        if parts.scheme != "https" and self.base.startswith("https:"):
            # The answer to an upload or a redirect: tokens and contents would be sent in plain text.
            raise RegistryError(f"{self.host}: found the address {parts.scheme}://{parts.netloc}, expected https")
        same = parts.netloc == urlsplit(self.base).netloc
        authorization = {"Authorization": self._authorization[name]} if same and name in self._authorization else {}
        connect = http.client.HTTPConnection
        if parts.scheme == "https":
            connection: Any = http.client.HTTPSConnection(parts.netloc, timeout=_TIMEOUT, context=self._context)
        else:
            connection = connect(parts.netloc, timeout=_TIMEOUT)
        try:
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            if isinstance(body, Path):
                with body.open("rb") as stream:
                    connection.request(method, target, body=stream, headers={**headers, **authorization})
                    answer = connection.getresponse()
            else:
                connection.request(method, target, body=body, headers={**headers, **authorization})
                answer = connection.getresponse()
            # An error has a text of its own, which may be longer than the blob.
            limit = limit if answer.status == 200 else _MAX_ANSWER
            content = answer.read(limit + 1)
            if len(content) > limit:
                raise RegistryError(f"{method} {self.host}{parts.path}: found more than {limit} bytes in the answer")
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, content
        except (OSError, http.client.HTTPException) as error:
            raise RegistryError(f"{method} {parts.scheme}://{parts.netloc}{parts.path}: {error}") from error
        finally:
            connection.close()

    def _authenticate(self, name: str, challenge: str, *, push: bool) -> None:
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._basic:
            self._authorization[name] = f"Basic {self._basic}"
            return
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if scheme.lower() != "bearer" or "realm" not in fields:
            raise RegistryError(f"{self.host}: credentials are required; set REGISTRY_USER and REGISTRY_PASSWORD")
        scope = f"repository:{self.repository(name)}:{'pull,push' if push else 'pull'}"
        query = urlencode({"service": fields.get("service", ""), "scope": scope})
        realm = urlsplit(fields["realm"])
        if realm.scheme != "https" and not self.base.startswith("http:"):
            raise RegistryError(f"{self.host}: found the token service {fields['realm']}, expected an https address")
        connect = http.client.HTTPSConnection if realm.scheme == "https" else http.client.HTTPConnection
        options = {"context": self._context} if realm.scheme == "https" else {}
        connection = connect(realm.netloc, timeout=_TIMEOUT, **options)  # pyright: ignore[reportArgumentType]
        try:
            headers = {"Authorization": f"Basic {self._basic}"} if self._basic else {}
            connection.request("GET", f"{realm.path}?{query}", headers=headers)
            answer = connection.getresponse()
            found = json.loads(answer.read(_MAX_ANSWER)) if answer.status == 200 else {}
            token = found.get("token") or found.get("access_token")
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            raise RegistryError(f"{fields['realm']}: {error}") from error
        finally:
            connection.close()
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise RegistryError(f"{fields['realm']}: found no token; check REGISTRY_USER and REGISTRY_PASSWORD")
        self._authorization[name] = f"Bearer {token}"

    def _error(self, method: str, url: str, status: int, content: bytes) -> RegistryError:
        text = content[:300].decode(errors="replace").strip()
        return RegistryError(f"{method} {self.host}{urlsplit(url).path}: found status {status}: {text}")


def _file(layout: Path, digest: str) -> Path:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise RegistryError(f"{layout}: found digest {digest!a}, expected sha256: and 64 digits")
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")
