"""Synthetic datasets: plain pairs of volumes, small ones in the very format of BraTS, BTCV, DistMIS and CIFAR-10, and a
cohort with outcomes.

Each is a pure function of its size and seed, appears whole or not at all, and holds a record of what it was made from.
"""

from voxscale.data.synthetic.cifar10 import write_cifar10
from voxscale.data.synthetic.cohort import write_cohort
from voxscale.data.synthetic.folder import LIKE, ensure_like, ensure_synthetic
from voxscale.data.synthetic.pairs import make_volume

__all__ = ["LIKE", "ensure_like", "ensure_synthetic", "make_volume", "write_cifar10", "write_cohort"]
