"""Sockets of agents."""

import os

from gadgets import GADGET

from accelplane.kubelet.server import ResourceServer
from accelplane.node.agent import Agent

OTHER = "other.example.com/gadget"


def plugins_dir(directory: str) -> str:
    return os.path.join(directory, "device-plugins")


def own_socket(directory: str, resource: str = GADGET) -> str:
    return os.path.join(plugins_dir(directory), resource.replace("/", "-") + ".sock")


def server(agent: Agent, plugin: str = "table", resource: str = "gadget") -> ResourceServer:
    return agent.runners[plugin].publisher.served[resource].server
