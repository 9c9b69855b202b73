"""How busy a GPU is: what is asked of the driver's library, and how its answers are read. No GPU is here to measure."""

from __future__ import annotations

import ctypes

import pytest

from voxscale.train.nvml import busy_percent, open_nvml


class Library:
    """Answers as nvml.h says: 0 for success, results through pointers, a struct of two unsigned ints for rates."""

    def __init__(self, *, found: int = 0, told: int = 0) -> None:
        self.asked: list[bytes] = []
        self._found, self._told = found, told

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: object) -> int:  # noqa: N802
        self.asked.append(uuid)
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 0x1234
        return self._found

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: object) -> int:  # noqa: N802
        assert device.value == 0x1234
        both = ctypes.cast(rates, ctypes.POINTER(ctypes.c_uint))
        both[0], both[1] = 93, 40
        return self._told


@pytest.mark.parametrize("uuid", ["5c1b-00", "GPU-5c1b-00"])
def test_a_gpu_is_asked_for_by_its_uuid(uuid: str) -> None:
    library = Library()
    assert busy_percent(library, uuid) == 93
    assert library.asked == [b"GPU-5c1b-00"]


@pytest.mark.parametrize("library", [None, Library(found=6), Library(told=3)])
def test_what_the_driver_does_not_say_is_not_known(library: Library | None) -> None:
    assert busy_percent(library, "5c1b-00") is None


def test_of_a_gpu_that_is_not_here_nothing_is_known() -> None:
    """Whether this machine has a driver or not."""
    assert busy_percent(open_nvml(), "5c1b-00") is None
