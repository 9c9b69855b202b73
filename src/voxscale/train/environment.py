"""What a run ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from voxscale.train.job import Job

_PACKAGES = ("voxscale", "torch", "monai", "numpy", "nibabel")


def describe_environment(job: Job) -> dict[str, Any]:
    """Versions, and what this rank computes with. No names of hosts or users."""
    on_gpu, host = job.device.type == "cuda", platform.uname()
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if on_gpu else None,
        "system": f"{host.system} {host.release} {host.machine}",
        "device": torch.cuda.get_device_name(job.device) if on_gpu else f"{host.machine} CPU",
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "backend": job.backend if job.world.size > 1 else None,
    }
