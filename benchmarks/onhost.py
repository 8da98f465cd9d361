"""Runs the FPGA hook and tool again and again where there is a card; `benchmarks.fpga` starts this in such a place.

In as small a process as there can be: what a child is said to have used at most includes its parent's when it began.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence


def main() -> None:
    programs, directory, count, first, second = sys.argv[1:]
    # In its own mount namespace, so that the machine's store, locks and records stay unchanged.
    for place in ("/srv", "/run"):
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    for afu in (first, second):
        subprocess.run([f"{programs}/fpga_tool", "-q", "-b", f"{directory}/{afu}.gbs", "install"], check=True)
    hook, states = [f"{programs}/intel-fpga-crihook"], [f"{directory}/{afu}.json" for afu in (second, first)]
    turns = [states[turn % 2] for turn in range(int(count))]
    answers = {
        "programming": _runs(hook, turns),
        "nothing": _runs(hook, turns[-1:] * int(count)),
        "info": _runs([f"{programs}/fpga_tool", "-b", f"{directory}/design.aocx", "info"], [os.devnull] * int(count)),
    }
    print(json.dumps(answers))


def _runs(command: Sequence[str], inputs: Sequence[str]) -> dict[str, object]:
    took: list[float] = []
    busy: list[float] = []
    memory = 0
    for path in inputs:
        with open(path, "rb") as stdin:
            start = time.perf_counter()
            process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL)
            _pid, status, used = os.wait4(process.pid, 0)
            took.append(time.perf_counter() - start)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{command[0]}: ended with {process.returncode}")
        busy.append(used.ru_utime + used.ru_stime)
        memory = max(memory, used.ru_maxrss)
    return {"took": took, "busy": busy, "memory": memory}


if __name__ == "__main__":
    main()
