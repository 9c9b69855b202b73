"""Speed-ups that others have published, to be seen beside ours. Nothing is fitted to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    devices: int
    speedup: float
    source: str


PUBLISHED = (
    Point(8, 11.0, "MONAI on A100, BraTS: a whole job against one GPU, other changes included"),
    Point(32, 30.0, "MONAI's guide to distributed training"),
    Point(32, 12.0, "DistMIS, the lower of its figures"),
    Point(32, 14.0, "DistMIS, the higher of its figures"),
    Point(2, 1.8, "MACE, expected and not measured"),
    Point(4, 3.5, "MACE, expected and not measured"),
    Point(8, 6.5, "MACE, expected and not measured"),
    Point(2, 151 / 111, "CIFAR-10 script, one node"),
    Point(4, 151 / 96, "CIFAR-10 script, two nodes"),
)
