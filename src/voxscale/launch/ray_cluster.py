"""A Ray cluster as it was found: its nodes, what a program may hold of them, and whether its head is still there."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from voxscale.errors import InfrastructureError
from voxscale.launch.ray_access import ANSWER_S, parse_address


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster and what Ray may give of it."""

    id: str
    host: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Share:
    """What a program holds of its node; nothing if it is a driver that asks Ray for what it needs."""

    cpus: float
    gpus: float = 0.0

    def __str__(self) -> str:
        if not self.cpus and not self.gpus:
            return "nothing"
        gpus = f"{self.gpus:g} GPU{'' if self.gpus == 1 else 's'} and " if self.gpus else ""
        return f"{gpus}{self.cpus:g} CPU{'' if self.cpus == 1 else 's'}"

    def fits(self, node: RayNode) -> int:
        """How many of them a node has room for. A share of a GPU is of one: of 0.3 there are three on each."""
        rooms = [_times(node.cpus, self.cpus)] if self.cpus else []
        if self.gpus:
            shared = 0 < self.gpus < 1
            rooms.append(int(node.gpus) * _times(1.0, self.gpus) if shared else _times(node.gpus, self.gpus))
        return min(rooms, default=1)


def _times(have: float, want: float) -> int:
    return int(have / want + 1e-9)


@dataclass(frozen=True)
class RayCluster:
    """The cluster that this process is part of, as it was found."""

    address: str
    nodes: tuple[RayNode, ...]
    is_ours: bool = False  # started here, and gone with this process

    @property
    def answers(self) -> bool:
        """Whether the head is there; where it is not, Ray itself hangs, and after a minute ends this process."""
        try:
            socket.create_connection(parse_address(self.address), timeout=ANSWER_S).close()
        except OSError:
            return False
        return True

    def refuse_if_gone(self) -> None:
        if not self.answers:
            raise LostHeadError(
                f"the head of the Ray cluster at {self.address} is gone",
                fix="start the same command again"
                if self.is_ours
                else "start the cluster, then the same command again",
            )


class LostHeadError(InfrastructureError):
    """There is no Ray any more."""
