"""Metrics of FPGA programming, which the hook and the tool count on this host (`accelplane.fpga.record`)."""

from collections.abc import Iterator

from accelplane.fpga.record import OUTCOMES, Record, RecordError, read_all
from accelplane.host import Host
from accelplane.plugins.base import Sample


def programmings(host: Host) -> tuple[list[Sample], set[str]]:
    """Returns the metrics of all FMEs that were programmed since boot, and the errors of invalid records."""
    samples: list[Sample] = []
    problems: set[str] = set()
    try:
        for fme, record in read_all(host):
            if isinstance(record, RecordError):
                problems.add(str(record))
            else:
                samples += _samples(fme, record)
    except RecordError as error:
        problems.add(str(error))
    return samples, problems


def _samples(fme: str, record: Record) -> Iterator[Sample]:
    device = {"device": fme}
    for outcome in OUTCOMES:
        number = float(record.outcomes.get(outcome, 0))
        yield Sample("fpga_programmings_total", "Programmings of an FPGA", {**device, "outcome": outcome}, number)
    for error, number in record.errors.items():
        description = "Programmings of an FPGA that failed in the driver"
        yield Sample("fpga_programming_errors_total", description, {**device, "error": error}, float(number))
    yield Sample("fpga_programming_seconds_total", "Time spent programming an FPGA", device, record.seconds)
    if record.last is not None:
        description = "Time when the last programming of an FPGA ended"
        yield Sample("fpga_last_programming_timestamp_seconds", description, device, record.last.time)
