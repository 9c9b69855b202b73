"""How busy a GPU is, asked of the library that comes with NVIDIA's driver: no Python package is needed for it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


@cache
def open_nvml() -> Any:
    """The library, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def busy_percent(nvml: Any, uuid: str) -> int | None:
    """The share of the last moments in which the GPU of this UUID computed; None where it does not say.

    By its UUID, as CUDA_VISIBLE_DEVICES may number GPUs anew.
    """
    if nvml is None:
        return None
    device, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # of computing, and of memory
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) != 0:
        return None
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) != 0:
        return None
    return int(rates[0])
