"""Values of devices in words: units, heat colours and plots of the last hour."""

from collections.abc import Mapping, Sequence

from .html import Element, element

_UNITS = (
    ("_celsius", "°C"), ("_watts", "W"), ("_joules_total", "J"), ("_hertz", "Hz"), ("_bytes", "B"), ("_volts", "V"),
    ("_amperes", "A"), ("_rpm", "rpm"), ("_seconds_total", "s"), ("_seconds", "s"), ("_transfers_per_second", "T/s"),
    ("_bytes_per_second", "B/s"), ("_lanes", "lanes"), ("_ratio", ""), ("_total", ""),
)  # fmt: skip
_ACRONYMS = frozenset({"dlb", "fpga", "gpu", "nic", "npu", "pci", "qat", "sgx"})
# Two values of a link have the same words without these.
_QUANTITIES: Mapping[str, str] = {"T/s": "speed", "lanes": "width"}
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_BINARY = (("Ti", 2.0**40), ("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10))
_HEATS = 5
_WIDTH, _HEIGHT = 240, 48


def unit_of(name: str) -> tuple[str, str]:
    """The name of a metric in words, and its unit."""
    base, unit = name.removeprefix("accelplane_"), ""
    for suffix, symbol in _UNITS:
        if base.endswith(suffix):
            base, unit = base.removesuffix(suffix), symbol
            break
    words = base.removeprefix("device_").split("_")
    if unit in _QUANTITIES:
        words.append(_QUANTITIES[unit])
    words = [word.upper() if word in _ACRONYMS else word for word in words]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]]), unit


def si(value: float | None, unit: str) -> str:
    """A value with its unit: binary prefixes for bytes, decimal ones for frequencies, rates and energy."""
    if value is None:
        return "-"
    prefixes = _BINARY if unit == "B" else _PREFIXES if unit in ("Hz", "B/s", "T/s", "J") else ()
    for prefix, factor in prefixes:
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
    return f"{number} {unit}".strip()


def measured(value: float | None, unit: str) -> Element | str:
    """A power or a temperature, in a cell of current values."""
    return "-" if value is None else element("td", f"{value:.0f} {unit}", class_="use")


def heat(share: float | None) -> Element | str:
    """A busy share from 0 to 1, in a cell whose colour shows it."""
    if share is None:
        return "-"
    return element("td", f"{share:.0%}", class_=f"use heat{min(_HEATS - 1, int(share * _HEATS))}")


def plot(title: str, values: Sequence[float | None], unit: str, *, highest: float = 0.0) -> Element | None:
    """A line over the values of the last hour, None without two of them. The axis ends at `highest`, or above it."""
    known = [(minute, value) for minute, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return None
    top = max(highest, *(value for _, value in known)) or 1.0
    step = _WIDTH / (len(values) - 1)
    points = " ".join(f"{minute * step:.1f},{_HEIGHT - 1 - value / top * (_HEIGHT - 2):.1f}" for minute, value in known)
    lowest, most = (si(round(edge(value for _, value in known), 2), unit) for edge in (min, max))
    words = f"{title} in the last hour: {lowest} to {most}"
    return element(
        "figure",
        element("figcaption", words),
        element(
            "svg",
            element("polyline", points=points, fill="none", stroke="currentColor", stroke_width="1.5"),
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=words, preserveAspectRatio="none",
        ),
        class_="plot",
    )  # fmt: skip
