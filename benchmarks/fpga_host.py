"""Runs the FPGA hook and tool repeatedly on a host with a card; started by `benchmarks.fpga`.

This process stays as small as possible: the peak memory of a child includes that of its parent at the fork.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence


def main() -> None:
    programs, directory, count, first, second = sys.argv[1:]
    # In a private mount namespace, so that store, locks and records of the machine stay unchanged.
    for place in ("/srv", "/run"):
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    for afu in (first, second):
        subprocess.run([f"{programs}/fpga_tool", "-q", "-b", f"{directory}/{afu}.gbs", "install"], check=True)
    hook, states = [f"{programs}/intel-fpga-crihook"], [f"{directory}/{afu}.json" for afu in (second, first)]
    turns = [states[turn % 2] for turn in range(int(count))]
    runs = {
        "programming": _runs(hook, turns),
        "nothing": _runs(hook, turns[-1:] * int(count)),
        "info": _runs([f"{programs}/fpga_tool", "-b", f"{directory}/design.aocx", "info"], [os.devnull] * int(count)),
    }
    print(json.dumps(runs))


def _runs(command: Sequence[str], inputs: Sequence[str]) -> dict[str, object]:
    seconds: list[float] = []
    cpu: list[float] = []
    memory = 0
    for path in inputs:
        with open(path, "rb") as stdin:
            start = time.perf_counter()
            process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL)
            _pid, status, used = os.wait4(process.pid, 0)
            seconds.append(time.perf_counter() - start)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{command[0]}: exit code {process.returncode}, expected 0")
        cpu.append(used.ru_utime + used.ru_stime)
        memory = max(memory, used.ru_maxrss)
    return {"seconds": seconds, "cpu": cpu, "memory": memory}


if __name__ == "__main__":
    main()
