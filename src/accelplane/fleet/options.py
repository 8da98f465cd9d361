"""The options of the fleet."""

from typing import Literal

from msgspec import Struct


class FleetOptions(Struct, frozen=True, kw_only=True):
    """The options of `Fleet`.

    With `pods="all"` assigned pods are watched too: holders are known on nodes without an agent's pages.
    Agents are pods with the labels of `objects.AGENT_LABELS`, in one of `agent_namespaces` and with one of the service
    accounts `agent_accounts`; an empty tuple admits all. `loopback_agents` permits loopback addresses, for tests. With
    `agent_ca`, a file in PEM, agents are reached by HTTPS and verified under `agent_server_name`; only then the token
    in the file `agent_token` is sent. `resource_prefixes` adds resources of other plugins, such as `example.com/`. The
    use of devices is read every `use_interval` seconds, not at all with 0.
    """

    pods: Literal["waiting", "all"] = "waiting"
    quotas: bool = True
    device_plugins: bool = True
    events: bool = False
    agent_namespaces: tuple[str, ...] = ("kube-system",)
    agent_accounts: tuple[str, ...] = ("accelplane-node",)
    agent_ca: str = ""
    agent_server_name: str = "accelplane-agent"
    agent_token: str = ""
    loopback_agents: bool = False
    resource_prefixes: tuple[str, ...] = ()
    use_interval: int = 60


class PageOptions(Struct, frozen=True, kw_only=True):
    """The options of the listeners and the pages.

    `address` is plain, for requests with a name of this machine unless `any_host`, and `secure_address` has TLS with
    the certificate of `tls_directory` and needs authorization; an empty address disables a listener. Tokens must be
    valid for one of the `audiences`, without any for the API server. With `proxy_ca`, a file in PEM, proxies with a
    certificate of this authority, and with one of the `proxy_names` if there are any, may name the user in header
    fields.
    """

    address: str = "127.0.0.1:8080"
    any_host: bool = False
    secure_address: str = ""
    health_address: str = ":8081"
    tls_directory: str = ""
    allow_tls13: bool = True
    audiences: tuple[str, ...] = ("accelplane-fleet",)
    proxy_ca: str = ""
    proxy_names: tuple[str, ...] = ()
    grafana_url: str = ""
