"""Building blocks for a training loop of your own: no run folder, no config. `from voxscale import …` offers the same.

Each works in a world of one and under torchrun, with the same result. Joining the ranks (`init_process_group`) and
sharing gradients (`DistributedDataParallel`) stay with torch and with you.
"""

from voxscale.blocks.checkpoints import load_checkpoint, save_checkpoint
from voxscale.blocks.cohort import Cohort, SurvivalCase, survival_cases
from voxscale.blocks.datasets import DistributedLoader, Share, distributed_loader
from voxscale.blocks.patches import Patches, open_store, patch_loader
from voxscale.blocks.rows import gather_rows
from voxscale.data.loader import Batch
from voxscale.parallel import World, leave
from voxscale.tasks.cox import cox_loss

__all__ = [
    "Batch",
    "Cohort",
    "DistributedLoader",
    "Patches",
    "Share",
    "SurvivalCase",
    "World",
    "cox_loss",
    "distributed_loader",
    "gather_rows",
    "leave",
    "load_checkpoint",
    "open_store",
    "patch_loader",
    "save_checkpoint",
    "survival_cases",
]
