"""`accelplane fleet`: the page of a cluster's accelerators, and `accelplane fleet demo` with a simulated cluster."""

import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accelplane.cli import logflags
from accelplane.cli.clusterprogram import Values, address_of, run_in_cluster
from accelplane.cli.goflags import Flag, parse_or_exit, with_defaults
from accelplane.cli.untilsignal import until_signal
from accelplane.http.listening import is_own_host
from accelplane.processes import raise_file_limit

if TYPE_CHECKING:
    from accelplane.fleet.options import FleetOptions, PageOptions

PROGRAM = "accelplane fleet"
DEMO = "accelplane fleet demo"
_MAX_NODES = 10_000

FLAGS = (
    Flag("address", "127.0.0.1:8080", "address of the pages without TLS and without authorization, as host:port; 0 "
         "disables it"),
    Flag("allow-unauthenticated", False, "permit an -address that is not a loopback address, and any name in the URL: "
         "everyone who reaches the address sees all names"),
    Flag("secure-address", "", "address of the pages with TLS for authorized users, such as :8443"),
    Flag("tls-dir", "", "directory of tls.crt and tls.key for -secure-address; changes are loaded without a restart"),
    Flag("audience", "accelplane-fleet", "audiences of accepted tokens, separated by commas; empty: that of the API "
         "server", repeated=True),
    Flag("requestheader-client-ca", "", "file of the authority (PEM) whose clients may name the user in the header "
         "fields X-Remote-User and X-Remote-Group"),
    Flag("requestheader-allowed-names", "", "common names of these clients, separated by commas; empty: all",
         repeated=True),
    Flag("health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0 disables them"),
    Flag("grafana-url", "", "address of Grafana with the dashboards of this project, or of a dashboard for a "
         "device with {node}, {plugin} and {device} as placeholders"),
    Flag("pods", "waiting", "watched pods: waiting, or all for clusters where agents have no pages"),
    Flag("quotas", True, "show what ResourceQuotas leave, if they may be read"),
    Flag("device-plugins", True, "show the status of the operator's device plugin resources, if they may be read"),
    Flag("events", False, "write an Event when a device becomes unhealthy and when it has recovered"),
    Flag("agent-namespaces", "kube-system", "namespaces of the agents, separated by commas; empty: all", repeated=True),
    Flag("agent-accounts", "accelplane-node", "service accounts of the agents, separated by commas; empty: all",
         repeated=True),
    Flag("agent-ca", "", "file of the authority (PEM) of the agents' certificates; empty: agents are read without TLS"),
    Flag("agent-server-name", "accelplane-agent", "name in the agents' certificates"),
    Flag("agent-token", "", "file of the token that is sent to agents; needs -agent-ca"),
    Flag("resource-prefixes", "", "prefixes of resources of other plugins, such as example.com/, separated by commas",
         repeated=True),
    Flag("use-interval", 60, "seconds between two readings of the use of a device; 0 disables them", unsigned=True),
    Flag("kubeconfig", "", "kubeconfig file, only required outside a cluster"),
    *logflags.FLAGS,
)  # fmt: skip

DEMO_FLAGS = (
    Flag("address", "127.0.0.1:0", "address of the pages as host:port; with port 0 the kernel selects one"),
    Flag("nodes", 200, "number of simulated nodes", unsigned=True),
    Flag("changes", 3, "changed devices in each second", unsigned=True),
)


def main(words: Sequence[str]) -> int:
    """Entry point of the command. Returns 1 for a fatal error and 2 for a wrong flag."""
    if words[:1] == ["demo"]:
        return _demo(words[1:])
    return run_in_cluster(PROGRAM, FLAGS, words, _run, lenient=False)


async def _run(values: Values) -> None:
    from accelplane.fleet.program import run  # noqa: PLC0415 - after the flags are checked
    from accelplane.kube.client import load_config  # noqa: PLC0415 - as above

    chosen = fleet_options(values), page_options(values)
    _check_files(values)
    raise_file_limit()  # there is a connection to each agent
    # Snapshots of large clusters have millions of objects without cycles, which pages would often traverse.
    gc.set_threshold(50_000)
    await run(*chosen, load_config(str(values["kubeconfig"])))


def _check_files(values: Values) -> None:
    """Raises `ValueError` for a missing file, which would be the state of each agent otherwise."""
    for flag in ("agent-ca", "agent-token"):
        if values[flag] and not os.path.isfile(str(values[flag])):
            raise ValueError(f"-{flag}: found no file {values[flag]}, expected the mounted file of a volume")


def fleet_options(values: Values) -> "FleetOptions":
    """The options of watches and agents. Raises `ValueError` naming the wrong flag."""
    from accelplane.fleet.options import FleetOptions  # noqa: PLC0415

    pods = str(values["pods"])
    if pods not in ("waiting", "all"):
        raise ValueError(f"-pods: found {pods!a}, expected waiting or all")
    if values["agent-token"] and not values["agent-ca"]:
        raise ValueError("-agent-token: found without -agent-ca, expected both: only verified agents get a token")
    prefixes = _split(values, "resource-prefixes")
    for prefix in prefixes:
        if not prefix.endswith("/"):
            raise ValueError(f"-resource-prefixes: found {prefix!a}, expected a domain and /, such as example.com/")
    return FleetOptions(
        pods="all" if pods == "all" else "waiting",
        quotas=bool(values["quotas"]),
        device_plugins=bool(values["device-plugins"]),
        events=bool(values["events"]),
        agent_namespaces=_split(values, "agent-namespaces"),
        agent_accounts=_split(values, "agent-accounts"),
        agent_ca=str(values["agent-ca"]),
        agent_server_name=str(values["agent-server-name"]),
        agent_token=str(values["agent-token"]),
        resource_prefixes=prefixes,
        use_interval=int(values["use-interval"]),
    )


def page_options(values: Values) -> "PageOptions":
    """The options of listeners and pages. Raises `ValueError` naming the wrong flag."""
    from accelplane.fleet.options import PageOptions  # noqa: PLC0415

    secure, directory = _address(values, "secure-address"), str(values["tls-dir"])
    if bool(secure) != bool(directory):
        raise ValueError("-secure-address and -tls-dir: found one of them, expected both or none")
    plain = _address(values, "address")
    if plain and not values["allow-unauthenticated"] and not is_own_host(plain):
        raise ValueError(
            f"-address: found {plain}, expected a loopback address such as 127.0.0.1:8080: these pages have neither "
            "TLS nor authentication; use -secure-address, or -allow-unauthenticated if everyone may see all names"
        )
    if not plain and not secure:
        raise ValueError("-address: found 0 and no -secure-address, expected at least one address of the pages")
    grafana = str(values["grafana-url"])
    if grafana and not grafana.startswith(("https://", "http://")):
        raise ValueError(f"-grafana-url: found {grafana!a}, expected https://…")
    if values["requestheader-client-ca"] and not secure:
        raise ValueError("-requestheader-client-ca: found without -secure-address, expected both: they need TLS")
    return PageOptions(
        address=plain,
        any_host=bool(values["allow-unauthenticated"]),
        secure_address=secure,
        health_address=_address(values, "health-probe-bind-address"),
        tls_directory=directory,
        audiences=_split(values, "audience"),
        proxy_ca=str(values["requestheader-client-ca"]),
        proxy_names=_split(values, "requestheader-allowed-names"),
        grafana_url=grafana,
    )


def _address(values: Values, name: str) -> str:
    """Raises `ValueError`."""
    return "" if values[name] in ("", "0") else address_of(values, name)


def _split(values: Values, name: str) -> tuple[str, ...]:
    return tuple(word for each in str(values[name]).split(",") if (word := each.strip()))


def _demo(words: Sequence[str]) -> int:
    values = with_defaults(DEMO_FLAGS, parse_or_exit(DEMO, DEMO_FLAGS, words), {})
    nodes = int(values["nodes"])
    if not 1 <= nodes <= _MAX_NODES:
        sys.stderr.write(f"{DEMO}: -nodes: found {nodes}, expected a number from 1 to {_MAX_NODES}\n")
        return 2
    try:
        asyncio.run(_run_demo(str(values["address"]), nodes, int(values["changes"])))
    except OSError as error:
        sys.stderr.write(f"{DEMO}: -address {values['address']}: {error.strerror or error}; choose another one\n")
        return 1
    except ValueError as error:
        sys.stderr.write(f"{DEMO}: {error}\n")
        return 1
    return 0


async def _run_demo(address: str, nodes: int, changes: int) -> None:
    """Serves a simulated fleet until SIGINT or SIGTERM. Raises `OSError` and `ValueError`."""
    from accelplane.fleet.serve import listen, open_gate  # noqa: PLC0415
    from accelplane.fleet.simulated import SimulatedFleet  # noqa: PLC0415
    from accelplane.fleet.web.site import Screens  # noqa: PLC0415

    view = SimulatedFleet(nodes)
    view.read_use()
    screens = Screens(view)

    async def serve() -> None:
        async with listen(screens, open_gate(address), address) as port:
            host = address.rpartition(":")[0] or "127.0.0.1"
            noun = "node" if nodes == 1 else "nodes"
            print(f"A simulated fleet of {nodes} {noun}: http://{host}:{port}/  (Ctrl-C ends it)", flush=True)
            await view.run(changes=changes)

    await until_signal(serve())
