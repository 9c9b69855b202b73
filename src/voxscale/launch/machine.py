"""Look at this machine: how many GPUs and CPUs this process may use."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from voxscale.plan.resources import Machine


def look_at_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """GPUs as torch sees them (so CUDA_VISIBLE_DEVICES and a job's share count), CPUs by affinity and a job's share."""
    cpus = min(len(os.sched_getaffinity(0)), _share_of_job(environ))
    if not _has_gpu_driver():
        return Machine(gpus=0, cpus=cpus)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(gpus=gpus, cpus=cpus)


def _share_of_job(environ: Mapping[str, str]) -> int:
    """The CPUs that a SLURM job has of this node; not every site binds its processes to them."""
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    on_this_node = environ.get("SLURMD_NODENAME") is not None
    return max(1, int(text)) if on_this_node and re.fullmatch(r"\d{1,6}", text) else sys.maxsize


def _has_gpu_driver() -> bool:
    """Without a driver there is no need to wait for torch to find no GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def processor_name() -> str:
    """What this machine's CPUs call themselves, or their kind where they do not."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.machine()


def gpu_name() -> str:
    """What the first GPU calls itself."""
    import torch

    return torch.cuda.get_device_name(0)
