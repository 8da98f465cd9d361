"""Configuration of DSA and IAA: files and environment variables, validated before anything is written.

The template of a device is the first of these files that exists: `<type>-<node>-<device>.conf`,
`<type>-<node>.conf`, `<type>.conf` in the configuration directory, and the built-in profile, where `<type>` is `dsa`
or `iaa` and `<device>` the kernel's name (`dsa3`, `iax1`).

The built-in profiles have one dedicated queue for user space in each of four groups. Those of DSA are called
`dpdk_<device number><queue>`, since DPDK takes only queues that begin so.
"""

import os
import re
from collections.abc import Mapping, Sequence

import msgspec

from accelplane.host.drivers import VFIO_PCI
from accelplane.provision.config import ConfigError, ConfigFile, find, quote, read
from accelplane.provision.idxd.template import FAMILIES, MAX_DEVICES, Setup, Template, read_template

IDXD = "idxd"
_PCI_IDS = "0b25 11fb 1212"
_PROFILES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "profiles")


class IdxdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of the devices of one type.

    The PCI functions of `pci_ids` (`0x0b25`) are bound to `driver`; those of IAA stay bound to idxd. `templates` are
    those of single devices by name. With `force`, queues with clients are disabled as well.
    """

    device_type: str
    driver: str
    pci_ids: Sequence[str]
    template: Template
    templates: Mapping[str, Template] = {}
    force: bool = False

    @property
    def family(self) -> str:
        return FAMILIES[self.device_type]

    @property
    def notes(self) -> list[str]:
        """The ignored parts of the files."""
        return [note for template in (self.template, *self.templates.values()) for note in template.notes]

    def setup(self, number: int) -> tuple[str, Setup | None]:
        """The file for the device of that number, and the setup in it."""
        template = self.templates.get(f"{self.family}{number}", self.template)
        return template.file, template.setup(number)


def read_config(config_dir: str, environment: Mapping[str, str], *, force: bool = False) -> IdxdConfig:
    """From the directory's files and DEVICE_TYPE, NODE_NAME, DSA_DRIVER and DSA_PCI_IDS, all optional.

    Raises `ConfigError`.
    """
    device_type = environment.get("DEVICE_TYPE", "").strip() or "dsa"
    if device_type not in FAMILIES:
        raise ConfigError("DEVICE_TYPE", 0, quote(device_type), "dsa or iaa")
    driver = environment.get("DSA_DRIVER", "").strip() or IDXD
    if driver not in (IDXD, VFIO_PCI):
        raise ConfigError("DSA_DRIVER", 0, quote(driver), f"{IDXD} or {VFIO_PCI}")
    node_name = environment.get("NODE_NAME", "")
    ids = (environment.get("DSA_PCI_IDS", "").strip() or _PCI_IDS).lower().split()
    for one in ids:
        if not re.fullmatch(r"(0x)?[0-9a-f]{4}", one):
            raise ConfigError("DSA_PCI_IDS", 0, quote(one), "PCI device ids such as 0b25, blanks between them")
    file = find(config_dir, device_type, node_name) or _read_profile(device_type)
    return IdxdConfig(
        device_type=device_type,
        driver=driver if device_type == "dsa" else IDXD,
        pci_ids=[f"0x{one.removeprefix('0x')}" for one in ids] if device_type == "dsa" else (),
        template=read_template(file, device_type),
        templates=_of_single_devices(config_dir, device_type, node_name) if node_name else {},
        force=force,
    )


def _read_profile(device_type: str) -> ConfigFile:
    path = os.path.join(_PROFILES, f"{device_type}.conf")
    file = read(path)
    if file is None:
        raise ConfigError(path, 0, "nothing", "the built-in profile, which belongs to this package")
    return file


def _of_single_devices(config_dir: str, device_type: str, node_name: str) -> dict[str, Template]:
    """The templates of devices that have their own on this node, by the devices' names."""
    prefix = f"{device_type}-{re.escape(node_name)}"
    form = re.compile(rf"{prefix}-({FAMILIES[device_type]}(?:0|[1-9][0-9]{{0,3}}))\.conf", re.ASCII)
    try:
        found = [match for name in sorted(os.listdir(config_dir)) if (match := form.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(
            config_dir, 0, f"a directory that cannot be read ({error.strerror})", "one that can"
        ) from None
    if len(found) > MAX_DEVICES:
        raise ConfigError(config_dir, 0, f"files for {len(found)} single devices", f"at most {MAX_DEVICES}")
    templates: dict[str, Template] = {}
    for match in found:
        if (file := read(os.path.join(config_dir, match[0]))) is not None:
            templates[match[1]] = read_template(file, device_type)
    return templates
