"""Look at this machine: how many GPUs and CPUs this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from voxscale.plan.resources import Machine


def look_at_machine() -> Machine:
    """GPUs as torch sees them (so CUDA_VISIBLE_DEVICES and a job's share count), CPUs by affinity."""
    cpus = len(os.sched_getaffinity(0))
    if not _has_gpu_driver():
        return Machine(gpus=0, cpus=cpus)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(gpus=gpus, cpus=cpus)


def _has_gpu_driver() -> bool:
    """Without a driver there is no need to wait for torch to find no GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()
