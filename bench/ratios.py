"""Every benchmark: how it is run, and which of the ratios that it prints count, with their goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """A ratio of which less is better, or more; `goal` is what it is to reach, where there is one."""

    less: bool
    goal: float | None = None

    def meets(self, value: float) -> bool:
        return self.goal is None or (value <= self.goal if self.less else value >= self.goal)

    def change(self, old: float, new: float) -> float:
        """How much better it has become, relative to what it was; below 0: worse."""
        return (old - new if self.less else new - old) / old


@dataclass(frozen=True)
class Bench:
    script: str
    ratios: Mapping[str, Ratio]
    words: tuple[str, ...] = ()
    full: tuple[str, ...] | None = None  # words of the whole; None: the same
    quick: bool = True  # part of the quick subset

    def command(self, *, whole: bool) -> list[str]:
        words = self.words if not whole or self.full is None else self.full
        return [f"bench/{self.script}.py", *words, "--json"]

    def found(self, result: Mapping[str, Any]) -> dict[str, float]:
        """The ratios that a run has printed."""
        return {name: float(result[name]) for name in self.ratios if result.get(name) is not None}


def less(goal: float | None = None) -> Ratio:
    return Ratio(less=True, goal=goal)


def more(goal: float | None = None) -> Ratio:
    return Ratio(less=False, goal=goal)


BENCHES = {
    "step": Bench(
        "step",
        {"ratio.1": less(1.03), "ratio.2": less(1.03), "speedup.kept": more(0.97), "speedup.ours": more()},
        words=("--rounds", "3"),
        full=("--rounds", "7"),
    ),
    "plan": Bench("plan", {"off.step_s": less(0.15), "off.node_mb": less(0.15)}),
    "startup": Bench("startup", {"help.ratio": less(1.3)}),
    "patches": Bench(
        "patches",
        {
            "ratio.cache": more(10),
            "ratio.cache_to_host": more(),
            "ratio.persistent": more(5),
            "ratio.light_to_bare": less(1.2),
            "ratio.full_to_bare": less(7),
            "first_batch.ratio": more(20),
        },
        words=("--data", "data/brats-like", "--patch", "128", "128", "128", "--threads", "1"),
    ),
    "checkpoint": Bench("checkpoint", {"cost": less(0.02)}),
    "train_job": Bench("train_job", {"ratio": more(1.3), "ratio.with_prepare": more()}, ("--rounds", "1"), ()),
    "stream": Bench("stream", {}, ("--cases", "1000000"), quick=False),
    "windows": Bench(
        "windows",
        {
            "layer.time_ratio": less(1.05),
            "layer.memory_ratio": less(0.5),
            "unet.time_ratio": less(1.05),
            "unet.memory_ratio": less(0.5),
        },
        words=("--threads", "1"),
        quick=False,
    ),
    "quality": Bench("quality", {}, quick=False),
    "launch": Bench("launch", {"ratio": less(1.1), "ratio_from_command": less()}, quick=False),
    "search": Bench(
        "search",
        {"ratio.makespan": less(1.15), "ratio.speed": more(1.3), "ratio.memory": less(0.5)},
        quick=False,
    ),
    "asha": Bench("search", {"mean.share_of_steps": less()}, words=("--asha",), quick=False),
    "distmis": Bench("distmis", {"ratio": more()}, words=("--points", "8"), quick=False),
}
