"""The commands of `accelplane` that parse their flags themselves, as Go programs do. They do not need click."""

import importlib
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn


class Program(NamedTuple):
    """The module below `accelplane.cli` with the function `main`, and the help text.

    `main` gets the words after the command, and the name of a program that is also a drop-in.
    """

    module: str
    help: str
    drop_in: bool = False


PROGRAMS: Mapping[str, Program] = {
    "node": Program("node", "Run the agent with all plugins."),
    "labels": Program("labels", "Print hardware labels, or write them to the Node."),
    "clients": Program(
        "clients", "Serve the use of GPUs by containers to the agent. Needs the host's PID namespace and SYS_PTRACE."
    ),
    "operator": Program("operator", "Run the operator, or render custom resources (render FILE).", drop_in=True),
    "fpga": Program("fpgatool", "Inspect FPGA cards, install bitstreams, program cards.", drop_in=True),
    "fleet": Program("fleet", "Serve the fleet page, or a simulated one (demo)."),
    "webhook sgx": Program("sgxwebhook", "Add SGX devices and settings to pods that request EPC.", drop_in=True),
    "webhook fpga": Program(
        "fpgawebhook", "Replace names of FPGA functions in pods by resources and settings.", drop_in=True
    ),
    "onload profile": Program("onloadprofile", "Print Onload profiles as ConfigMaps.", drop_in=True),
}


def run(command: str) -> NoReturn:
    """Runs the command with the process's arguments, and exits. Imports its module only."""
    program = PROGRAMS[command]
    main = importlib.import_module(f"accelplane.cli.{program.module}").main
    words = sys.argv[1 + len(command.split()) :]
    sys.exit(main(words, f"accelplane {command}") if program.drop_in else main(words))
