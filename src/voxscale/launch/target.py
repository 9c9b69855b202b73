"""What a plan is for: the devices of this machine, or GPUs of nodes elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

from voxscale.config.schema import Config
from voxscale.config.site import Site
from voxscale.errors import ConfigError
from voxscale.launch.machine import gpu_name
from voxscale.launch.sbatch import Request, memory_mb
from voxscale.plan.costs import Costs
from voxscale.plan.devices import Device, find_device, known_devices, named_device
from voxscale.plan.fitting import Given
from voxscale.plan.predict import Layout
from voxscale.plan.resources import Machine, choose_devices


@dataclass(frozen=True)
class Room:
    """Bytes: of this machine's memory and /dev/shm, and free on the disk that a run will be on."""

    memory_bytes: int
    shared_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Target:
    """`machine` is this one, `site` where the run is to be. `name` is what its GPUs are called; none: they are here.

    `device` is what the table has of them, here or there.
    """

    machine: Machine
    site: Site
    name: str | None = None
    device: Device | None = None

    @property
    def is_here(self) -> bool:
        return self.name is None

    @property
    def has_site(self) -> bool:
        return self.site != Site()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is planned otherwise than the site seems to want."""
        gpus = self.site.gpus
        has_unasked = gpus.ask == "none" and (gpus.type or gpus.per_node)
        if not (has_unasked and self.is_here and not self.machine.gpus):
            return ()
        return ("the site's GPUs are not asked for (gpus.ask: none), so CPUs are planned: set gpus.ask for GPUs",)

    def is_such(self, device: str) -> bool:
        """Whether a device that calls itself so is one of those that are meant."""
        found = find_device(device)
        if self.device is not None:
            return found == self.device
        return _plain(self.name or "") in _plain(device)

    def node(self, devices: int) -> Machine:
        """What so many ranks have of a node."""
        of_site = self.site.cpus_per_device * devices
        if not self.is_here:
            return Machine(gpus=devices, cpus=of_site)
        return Machine(self.machine.gpus, min(self.machine.cpus, of_site) if self.has_site else self.machine.cpus)

    def layout(self, config: Config, nodes: int, devices: str) -> Layout:
        """As asked for; other than where a run is started, a cluster's devices need not be here."""
        batch = config.train.batch
        if devices == "auto":
            most = self.machine if self.is_here else self.node(self.site.gpus.per_node or 1)
            return Layout(nodes, choose_devices(devices, most, batch, nodes=nodes, preferred=config.train.devices)[0])
        return Layout(nodes, choose_devices(devices, Machine(0, self.machine.cpus), batch, nodes=nodes)[0])

    def given(self, layout: Layout, costs: Costs, room: Room) -> Given:
        """What there is, as far as it is known: of this machine, or as the site states it."""
        is_this_node = self.is_here and not self.has_site
        fits_here = is_this_node and layout.devices <= (self.machine.gpus or self.machine.cpus)
        stated = memory_mb(self.site, Request(layout.nodes, layout.devices))
        cpus = max(1, self.machine.cpus // layout.devices) if fits_here else self.site.cpus_per_device
        return Given(
            device_bytes=costs.device_bytes,
            node_bytes=stated << 20 if stated is not None else room.memory_bytes if fits_here else None,
            shared_bytes=room.shared_bytes if fits_here else None,
            cpus_per_device=cpus,
            devices_per_node=self.site.gpus.per_node if self.site.gpus.ask != "none" else None,
            is_elsewhere=self.has_site,
            disk_bytes=room.disk_bytes,
        )


def choose_target(named: str | None, site: Site, machine: Machine) -> Target:
    """The GPUs that `--device` names, else those of the site, else the devices of this machine.

    Raises where nothing can be said of them: they are not here, and not in the table.
    """
    asked = named or (site.gpus.type if site.gpus.ask != "none" else None)
    here = Target(machine, site, device=find_device(gpu_name()) if machine.gpus else None)
    if named is None and site.gpus.ask == "none":
        return here
    device = named_device(named) if named is not None else find_device(asked) if asked else None
    elsewhere = Target(machine, site, asked or "", device)
    if machine.gpus and elsewhere.is_such(gpu_name()):
        return here
    return elsewhere


def unknown_device(target: Target) -> ConfigError:
    """Nothing was measured on such a device, and the table does not have it."""
    what = f"gpus.type {target.name}" if target.name else "gpus.type: none"
    return ConfigError(
        f"site: found {what}, expected a GPU of this machine or one of {', '.join(known_devices())}",
        fix="run `voxscale plan` in a job on such a node, or name what comes nearest with --device",
    )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
