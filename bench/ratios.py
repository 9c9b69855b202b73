"""Every benchmark: how it is run, and which of the ratios that it prints count, with their goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """A ratio of which less is better, or more; `goal` is what it is to reach, where there is one."""

    less: bool
    goal: float | None = None
    is_time: bool = False  # seconds: held to a goal, but never compared between machines

    def meets(self, value: float) -> bool:
        return self.goal is None or (value <= self.goal if self.less else value >= self.goal)

    def change(self, old: float, new: float) -> float:
        """How much better it has become, relative to what it was; below 0: worse.

        What is to be as small as possible is compared with its goal if it was below that: from 0.1 % to 0.3 % of a time
        is noise where 2 % are allowed.
        """
        whole = max(old, self.goal or 0.0) if self.less else old
        return (old - new if self.less else new - old) / (whole or 1.0)


@dataclass(frozen=True)
class Bench:
    script: str
    ratios: Mapping[str, Ratio]
    words: tuple[str, ...] = ()
    full: tuple[str, ...] | None = None  # words of the whole; None: the same
    quick: bool = True  # part of the quick subset
    told: tuple[str, ...] = ()  # what stands in the table beside the ratios, and is held to nothing

    def command(self, *, whole: bool) -> list[str]:
        words = self.words if not whole or self.full is None else self.full
        return [f"bench/{self.script}.py", *words, "--json"]

    def found(self, result: Mapping[str, Any]) -> dict[str, float]:
        """The ratios that a run has printed: `rank.total_s` is that key, or what its parts lead to."""
        return self._values(result, self.ratios)

    def beside(self, result: Mapping[str, Any]) -> dict[str, float]:
        """What is told beside them."""
        return self._values(result, self.told)

    @staticmethod
    def _values(result: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
        values = {name: result.get(name, reduce(_inside, name.split("."), result)) for name in names}
        return {name: float(value) for name, value in values.items() if value is not None}


def _inside(content: Any, key: str) -> Any:
    return content.get(key) if isinstance(content, Mapping) else None


def less(goal: float | None = None) -> Ratio:
    return Ratio(less=True, goal=goal)


def seconds(goal: float) -> Ratio:
    return Ratio(less=True, goal=goal, is_time=True)


def more(goal: float | None = None) -> Ratio:
    return Ratio(less=False, goal=goal)


BENCHES = {
    "step": Bench(
        "step",
        {
            "ratio.1": less(1.03),
            "ratio.2": less(1.03),
            "overhead.1": less(1.03),
            "overhead.2": less(1.03),
            "speedup.kept": more(0.97),
            "speedup.ours": more(),
        },
        words=("--rounds", "3"),
        full=("--rounds", "7"),
    ),
    "variants": Bench(
        "step",
        {},
        words=("--variants", "all", "--rounds", "2"),
        full=("--variants", "all", "--rounds", "5"),
        quick=False,
        told=tuple(
            f"ratio.{name}"
            for name in (
                *("static_graph", "bucket_1mb", "bucket_5mb", "no_bucket_view", "pinned"),
                *("threads_2", "workers_2", "prefetch_1"),
            )
        ),
    ),
    "plan": Bench(
        "plan", {"off.step_s": less(0.15), "off.node_mb": less(0.15)}, words=("--steps", "24"), full=("--steps", "40")
    ),
    "startup": Bench("startup", {"help.ratio": less(1.3), "first_step_s": seconds(1)}),
    "patches": Bench(
        "patches",
        {
            "ratio.cache": more(10),
            "ratio.cache_to_host": more(),
            "ratio.persistent": more(5),
            "ratio.light_to_bare": less(1.2),
            "ratio.full_to_bare": less(7),
            "first_batch.ratio": more(20),
            "disk_mb_per_case": less(30),
            "memory.doubled_ratio": less(1.1),
        },
        words=("--data", "data/brats-like", "--patch", "128", "128", "128", "--threads", "1"),
    ),
    "checkpoint": Bench("checkpoint", {"cost": less(0.02)}),
    "train_job": Bench(
        "train_job",
        {"ratio": more(1.3), "ratio.with_prepare": more()},
        words=("--rounds", "3", "--epochs", "1", "--no-limit"),
        full=(),
        told=("gain.startup_s", "gain.data_s", "gain.compute_and_loss_s"),
    ),
    "stream": Bench("stream", {"rank.total_s": seconds(2), "rank.peak_mb": less(200)}, quick=False),
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
    "quality": Bench("quality", {f"dice.{region}": more(0.85) for region in ("TC", "WT", "ET")}, quick=False),
    "launch": Bench("launch", {"ratio": less(1.1), "ratio_from_command": less()}, quick=False),
    "search": Bench(
        "search",
        {"ratio.makespan": less(1.15), "ratio.speed": more(1.3), "ratio.memory": less(0.5)},
        quick=False,
    ),
    "asha": Bench("search", {"mean.share_of_steps": less()}, words=("--asha",), quick=False),
    "distmis": Bench("distmis", {"ratio": more()}, words=("--points", "8"), quick=False),
}
