"""The network of a test cluster: the control machine is the switch of the nodes, and the host has a port of it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from .build import ClusterError
from .machine import Machine
from .node import Node
from .settings import Addresses


class Network:
    """Cables and routes. `nodes` are those of the cluster by their names, also ones that are added later."""

    def __init__(self, addresses: Addresses, control: Machine, nodes: Mapping[str, Node], host_port: str) -> None:
        self._addresses = addresses
        self._control = control
        self._nodes = nodes
        self._host_port = host_port

    def start(self) -> None:
        """Make the switch on the control machine, which is running, and connect the host to it."""
        _ip(f"link add {self._host_port} type veth peer name host netns {self._control.pid}")
        _ip(f"address add {self._addresses.host}/24 dev {self._host_port}", f"link set {self._host_port} up")
        _ip_on(
            self._control,
            "link set lo up",
            f"link add switch address {self._addresses.hardware(0)} type bridge",
            "link set host master switch up",
            f"address add {self._addresses.control}/24 dev switch",
            "link set switch up",
        )

    def plug_cable(self, node: Node) -> None:
        """Connect a freshly booted machine to the switch."""
        port = f"port{node.position}"
        _ip(
            f"link add {port} netns {self._control.pid} type veth "
            f"peer name eth0 address {self._addresses.hardware(node.position)} netns {node.pid}"
        )
        _ip_on(self._control, f"link set {port} master switch up")
        _ip_on(node, "link set lo up", f"address add {node.address}/24 dev eth0", "link set eth0 up")
        for each in self._nodes.values():
            if each.powered:
                self.route(each)

    def route(self, node: Node) -> None:
        """Set the machine's routes to the pods of other nodes; the kernel drops them on disconnect."""
        others = [other for other in self._nodes.values() if other is not node]
        _ip_on(
            node,
            f"route replace default via {self._addresses.control}",
            *(f"route replace {self._addresses.pods(other.position)} via {other.address}" for other in others),
        )
        pods = self._addresses.pods(node.position)
        _ip_on(self._control, f"route replace {pods} via {node.address}")


def _ip_on(machine: Machine, *commands: str) -> None:
    """Run commands of ip in the network of the machine."""
    _ip(*commands, enter=["nsenter", f"--net=/proc/{machine.pid}/ns/net"])


def _ip(*commands: str, enter: Sequence[str] = ()) -> None:
    result = subprocess.run(
        [*enter, "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ClusterError(f"ip: {'; '.join(commands)}: {result.stderr.strip()}")
