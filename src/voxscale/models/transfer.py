"""Weights taken over from another run, and the encoder held as it is for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from voxscale.errors import ConfigError

_SHOWN = 3


@dataclass(frozen=True)
class Transfer:
    """What came over and what did not. Names are those below the encoder, or of the source for what was left there.

    `part` is `encoder`, or `network` where a network has no part of that name. `differing` holds the shapes found
    and expected.
    """

    part: str
    loaded: tuple[str, ...]
    differing: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def reasons(self) -> list[str]:
        """Why something was not taken over, a line for each kind."""
        shapes = [
            f"{name} (found {_shape(found)}, expected {_shape(expected)})"
            for name, (found, expected) in self.differing.items()
        ]
        found = (
            ("of another shape", shapes),
            ("not in the source", self.missing),
            (f"left in the source, no part of this {self.part}", self.left),
        )
        return [f"{len(names)} {kind}: {_some(names)}" for kind, names in found if names]

    def as_text(self) -> str:
        """One line for a console."""
        total = len(self.loaded) + len(self.differing) + len(self.missing)
        return "; ".join([f"{self.part}: {len(self.loaded)} of {total} tensors taken over", *self.reasons])

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "loaded": list(self.loaded),
            "differing": [
                {"name": name, "found": list(found), "expected": list(expected)}
                for name, (found, expected) in self.differing.items()
            ],
            "missing": list(self.missing),
            "left": list(self.left),
        }


def take_encoder(model: nn.Module, source: Mapping[str, torch.Tensor]) -> Transfer:
    """Copy into the model's encoder whatever fits by name and shape from the state dict of a run of any task.

    Tensors of the source may be named as in a whole network, or below `encoder.`. Where no weight of a layer fits,
    nothing is changed and ConfigError tells why. A network without a part `encoder` takes over all that fits.
    """
    part, target = _encoder_of(model)
    state = (target if target is not None else model).state_dict()
    origin = {name: _found_as(name, source) for name in state}
    found = {name: source[key] for name, key in origin.items() if key is not None}
    fitting = {name: tensor for name, tensor in found.items() if tensor.shape == state[name].shape}
    transfer = Transfer(
        part=part,
        loaded=tuple(fitting),
        differing={
            name: (tuple(tensor.shape), tuple(state[name].shape))
            for name, tensor in found.items()
            if name not in fitting
        },
        missing=tuple(name for name in state if name not in found),
        left=tuple(sorted(source.keys() - set(origin.values()))),
    )
    # Scalars fit anywhere: activations' slopes, counters of batches. They make no encoder.
    if not any(tensor.dim() > 1 for tensor in fitting.values()):
        raise ConfigError.from_findings(
            [f"train.init_from: found no layer that fits the {part}", *transfer.reasons],
            fix="set model as in that run, or name a run with this model",
        )
    with torch.no_grad():
        for name, tensor in fitting.items():
            state[name].copy_(tensor)
    return transfer


def freeze_encoder(model: nn.Module, frozen: bool) -> None:
    """Hold the encoder's weights and running statistics, or let them go; never the head.

    DDP asks once, when it is put around a model, which weights get gradients: put it around anew after each call.
    """
    _, encoder = _encoder_of(model)
    if encoder is None:
        raise ConfigError(
            "train.freeze: found a network without a part called encoder, expected one",
            fix="leave train.freeze out, or call that part of your network `encoder`",
        )
    encoder.requires_grad_(not frozen)
    # Every model.train() comes by here, whoever calls it. Not a matter of each norm: SyncBatchNorm would replace it.
    if frozen:
        encoder.__dict__["train"] = partial(_train_but_statistics, encoder)
    else:
        encoder.__dict__.pop("train", None)
    encoder.train(model.training)


def _train_but_statistics(encoder: nn.Module, mode: bool = True) -> nn.Module:
    type(encoder).train(encoder, mode)
    for module in encoder.modules():
        if getattr(module, "running_mean", None) is not None:
            module.training = False
    return encoder


def _encoder_of(model: nn.Module) -> tuple[str, nn.Module | None]:
    encoder = getattr(model, "encoder", None)
    return ("encoder", encoder) if isinstance(encoder, nn.Module) else ("network", None)


def _found_as(name: str, source: Mapping[str, torch.Tensor]) -> str | None:
    return next((key for key in (f"encoder.{name}", name) if key in source), None)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a number"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
