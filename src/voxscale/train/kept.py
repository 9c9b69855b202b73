"""What a network keeps of its patches for the way back, counted before anything is computed.

Tensors without content go through it, which takes milliseconds and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.func import functional_call

from voxscale.errors import ConfigError
from voxscale.memory import given_memory
from voxscale.train.job import Job, OfOutcomes


def refuse_too_large(job: Job, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where the memory that there is here would not even hold what the ranks' networks keep.

    GPUs refuse by themselves; on CPUs the kernel would end some process, not always one of ours.
    """
    if job.device.type != "cpu" or job.config.train.deterministic == "exact":  # which computes one sample at a time
        return
    plan, memory = job.plan, given_memory(environ)
    kept = kept_bytes(job, plan.micro_batch)
    if kept is None or kept * job.world.local_size <= memory:
        return
    each, per_rank = kept / plan.micro_batch, plan.micro_batch * plan.accumulate
    fitting = [n for n in range(1, plan.micro_batch) if per_rank % n == 0 and n * each * job.world.local_size < memory]
    ranks = f"{job.world.local_size} ranks need" if job.world.local_size > 1 else "a rank needs"
    raise ConfigError(
        f"{ranks} {kept * job.world.local_size / 2**30:.1f} GB for {plan.micro_batch} "
        f"patch{'es' if plan.micro_batch > 1 else ''} of {' × '.join(map(str, plan.patch))} at once and more for all "
        f"else, expected less than the {memory / 2**30:.1f} GB that there are here",
        fix=f"set train.micro_batch={fitting[-1]} or less, which gives the same result"
        if fitting
        else "choose smaller patches.size, or a smaller network",
    )


def kept_bytes(job: Job, patches: int) -> int | None:
    """At least so many bytes are kept of so many patches; None of a network that needs their content."""
    shapes: list[tuple[int, ...]] = [(patches, job.plan.channels, *job.plan.patch)]
    if isinstance(job.target, OfOutcomes):
        shapes.append((patches, job.target.outcomes.features.shape[1]))
    state = {**dict(job.model.named_parameters()), **dict(job.model.named_buffers())}
    weights = {name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for name, tensor in state.items()}
    own = {tensor.untyped_storage()._cdata for tensor in weights.values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(job.model, weights, tuple(torch.empty(shape, device="meta") for shape in shapes))
    except Exception:  # whatever a network of one's own does: the first step will show
        return None
    halves = 1 if job.compute.precision == "fp32" else 2
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own) // halves
