"""How many trials a Ray cluster has room for, while its nodes come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from voxscale.launch.ray import RayNode, Share, ask_nodes, look_at_nodes, read_answer

_ASK_S = 3.0  # between two questions for the cluster's nodes


class Room:
    """The nodes that trials may run on. One that joins later is asked first whether it can run any."""

    def __init__(self, share: Share, folder: Path, known: Sequence[RayNode], say: Callable[[str], None]) -> None:
        self._share, self._folder, self._say = share, folder, say
        self._found: dict[str, str] = {node.id: "" for node in known}  # what keeps a node from taking part
        self._asked: dict[RayNode, Any] = {}
        self._capacity, self._looked = 0, -math.inf

    def trials(self) -> int:
        """How many may run at once now."""
        if time.monotonic() - self._looked >= _ASK_S:
            nodes = look_at_nodes()
            self._ask(nodes)
            self._capacity = capacity(self._share, [node for node in nodes if self._found.get(node.id) == ""])
            self._looked = time.monotonic()
        return self._capacity

    @property
    def avoided(self) -> Collection[str]:
        """Nodes that cannot run a trial, or have not yet said that they can."""
        return {*(node for node, finding in self._found.items() if finding), *(node.id for node in self._asked)}

    def _ask(self, nodes: Sequence[RayNode]) -> None:
        new = [node for node in nodes if node.id not in self._found and node not in self._asked]
        self._asked |= ask_nodes(new, self._folder)
        for node, answer in list(self._asked.items()):
            if (finding := read_answer(node, answer, self._folder, wait_s=0)) is not None:
                self._found[node.id] = finding
                del self._asked[node]
                if finding:
                    self._say(f"warning: {finding}; the search goes on without it")


def capacity(share: Share, nodes: Sequence[RayNode]) -> int:
    """How many trials there is room for at once."""
    return sum(share.fits(node) for node in nodes)


def render_idle(num_nodes: int, at_once: int) -> str:
    """What is said of nodes that have nothing to do, as there are more of them than trials at once."""
    idle = num_nodes - at_once
    return f", on one node, so that {idle} of {num_nodes} nodes stay idle" if idle > 0 else ""
