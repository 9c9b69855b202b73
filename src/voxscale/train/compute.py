"""How the network is run on its device: precision, memory layout, compiled or not. None of it knows the task."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from voxscale.config.schema import Train
from voxscale.data.build import default_store
from voxscale.errors import InfrastructureError

COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's code goes there too
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Compute:
    """One way of running a network. Parameters stay float32 in all of them."""

    device: torch.device
    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False

    @classmethod
    def of(cls, train: Train, device: torch.device) -> Compute:
        """What the config says; `auto` that has not been settled means the plain way."""
        precision = "fp32" if train.precision == "auto" else train.precision
        return cls(device, precision, train.channels_last is True, train.compile is True)

    def lay_out(self, model: torch.nn.Module) -> None:
        """Bring the parameters into the layout, in place; their values stay."""
        model.to(memory_format=self._layout)  # type: ignore[call-overload]

    def trainable(self, model: torch.nn.Module) -> torch.nn.Module:
        """What a training step calls: the model, or a compiled form that shares its parameters."""
        if not self.compile:
            return model
        _own_compiled_code()
        compiled: torch.nn.Module = torch.compile(model, dynamic=False)  # type: ignore[assignment]
        return compiled

    def run(self, model: torch.nn.Module, image: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        """The network's outputs for a batch, in whatever precision it computes."""
        autocast = _AUTOCAST[self.precision]
        with torch.autocast(self.device.type, autocast, enabled=autocast is not None):
            output: torch.Tensor = model(image.contiguous(memory_format=self._layout), *features)
        return output

    def scaler(self) -> torch.amp.GradScaler:
        """Keeps gradients within half precision's range; does nothing for other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    @property
    def _layout(self) -> torch.memory_format:
        return torch.channels_last_3d if self.channels_last else torch.contiguous_format


def _own_compiled_code() -> None:
    """Let the compiler keep its work where others cannot write, unless the user has named a place.

    It unpickles what it finds there, and by itself takes a folder among temporary ones whose name all can guess.
    """
    if os.environ.get(COMPILED_CODE):
        return
    folder = default_store(os.environ).with_name("compiled") / platform.node()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # refused of a folder that is another user's
    except OSError as error:
        raise InfrastructureError(
            f"{folder}: compiled code cannot be kept there: {error.strerror}",
            fix=f"set {COMPILED_CODE} to a folder of your own, or train.compile=false",
        ) from error
    os.environ[COMPILED_CODE] = str(folder)


@contextmanager
def buffers_untouched(model: torch.nn.Module) -> Iterator[None]:
    """For a pass that must leave no trace in running statistics."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    model.load_state_dict(buffers, strict=False)


def keep_freed_memory() -> bool:
    """Let this process use the memory that it frees again, instead of giving it back; whether the C library can.

    glibc gives tensors of more than 32 MB back to the system, which clears every page of them again in each step:
    a third of the time of a step on large patches. Results are the same to the bit.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_max = -1, -4
    return set_option is not None and all([set_option(trim_threshold, -1), set_option(mmap_max, 0)])
