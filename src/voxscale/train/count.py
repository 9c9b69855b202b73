"""Count what a network does to a patch, and what it keeps meanwhile, without computing anything.

Tensors here have a shape and no content: a network that needs a large GPU is counted on any machine in seconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from voxscale.config.schema import Config
from voxscale.data.outcomes import Outcomes
from voxscale.plan.devices import Network
from voxscale.plan.plan import Plan
from voxscale.tasks import Task
from voxscale.train.job import build_network
from voxscale.train.optimize import build_optimizer, optimizer_tensors

_PATCHES = 2  # some normalisations refuse one


def count_network(config: Config, plan: Plan, task: Task, outcomes: Outcomes | None = None) -> Network:
    """Count a run's network at its patch size."""
    model = build_network(config, plan, task, outcomes)
    inputs, target = _shapes(plan, outcomes)
    forward, backward, calls, kept = _count_pass(model, task, inputs, target, None)
    *_, kept_half = _count_pass(model, task, inputs, target, torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Network(
        forward_operations=forward / _PATCHES,
        backward_operations=backward / _PATCHES,
        calls=calls,
        kept_bytes=sum(kept) // _PATCHES,
        kept_half_bytes=sum(kept_half) // _PATCHES,
        largest_bytes=max(kept, default=0) // _PATCHES,
        passing_bytes=_count_passing(model, inputs, None) // _PATCHES,
        passing_half_bytes=_count_passing(model, inputs, torch.bfloat16) // _PATCHES,
        weights_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        optimizer_bytes=round(sum(parameter.nbytes for parameter in trained) * _state_per_weight(config)),
    )


def _shapes(plan: Plan, outcomes: Outcomes | None) -> tuple[list[tuple[int, ...]], tuple[tuple[int, ...], torch.dtype]]:
    """Of what the network gets, and of what it is to give."""
    image = (_PATCHES, plan.channels, *plan.patch)
    if outcomes is None:
        return [image], ((_PATCHES, *plan.patch), torch.uint8)
    features, targets = outcomes.features.shape[1], outcomes.targets.shape[1]
    return [image, (_PATCHES, features)], ((_PATCHES, targets), torch.float64)


def _count_pass(
    model: torch.nn.Module,
    task: Task,
    inputs: list[tuple[int, ...]],
    target: tuple[tuple[int, ...], torch.dtype],
    cast: torch.dtype | None,
) -> tuple[int, int, int, list[int]]:
    """Operations of the way forward and of the way back, the calls of both, and bytes of each tensor kept between."""
    with FakeTensorMode(allow_non_fake_inputs=True) as shapes, _Calls() as calls:  # type: ignore[no-untyped-call]
        state: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: shapes.from_tensor(each) for name, each in state}
        own = {each.untyped_storage()._cdata for each in weights.values()}
        given = [torch.empty(shape) for shape in inputs]
        wanted = torch.empty(target[0], dtype=target[1])
        with FlopCounterMode(display=False) as forward, _keeping(own) as kept:
            with torch.autocast("cpu", cast, enabled=cast is not None):
                output = functional_call(model, weights, tuple(given))
            rows = task.loss_rows(output, wanted)
        with FlopCounterMode(display=False) as backward:
            rows.sum().backward()  # type: ignore[no-untyped-call]
        sizes = [storage.nbytes() for storage in kept.values()]
    return forward.get_total_flops(), backward.get_total_flops(), calls.count, sizes


def _count_passing(model: torch.nn.Module, inputs: list[tuple[int, ...]], cast: torch.dtype | None) -> int:
    """The most bytes that there are at once where nothing is kept for the way back, the inputs included."""
    model.eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as shapes, torch.no_grad():
        state: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: shapes.from_tensor(each) for name, each in state}
        with _Living() as living, torch.autocast("cpu", cast, enabled=cast is not None):
            functional_call(model, weights, tuple(torch.empty(shape) for shape in inputs))
    return int(living.most)


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes, at any time, of the tensors that operations have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            for tensor in (each for each in tree_leaves(made) if isinstance(each, torch.Tensor)):
                storage = tensor.untyped_storage()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return made

    def _add(self, size: int) -> None:
        self._now += size
        self.most = max(self.most, self._now)


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that a device would be asked for, each of any size; views are none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@contextmanager
def _keeping(own: set[int]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """The memory of what autograd keeps in the body, each once; but for the weights, `own`, which are there anyway."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def _state_per_weight(config: Config) -> float:
    """Bytes that the optimizer keeps for each byte of weights: of a real step on a small matrix."""
    weights = torch.nn.Parameter(torch.zeros(256, 256))
    optimizer = build_optimizer(config, [weights])
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    return sum(tensor.nbytes for tensor in optimizer_tensors(optimizer).values()) / weights.nbytes
