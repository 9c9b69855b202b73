"""What is counted without computing is what computing does and keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from voxscale.config.load import make_config
from voxscale.plan.plan import make_plan
from voxscale.tasks import build_task
from voxscale.train.count import count_network
from voxscale.train.job import build_network


class Labelled:
    labels = (0, 1)


@pytest.mark.parametrize("model", [{"name": "unet", "channels": [4, 8]}, {"name": "segresnet", "channels": [8, 16]}])
def test_counted_is_what_a_real_pass_does_and_keeps(
    write_config: Callable[..., Path], model: dict[str, object]
) -> None:
    content = yaml.safe_load(write_config(model=model).read_text())
    config = make_config(content, name="c", base=Path())
    plan = make_plan(config, num_train=9, num_val=3, world_size=1, channels=1, labels=(0, 1))
    task = build_task(config, Labelled())
    counted = count_network(config, plan, task)

    network = build_network(config, plan, task)
    weights = {id(each) for each in network.parameters()}
    kept: dict[int, tuple[torch.Tensor, int]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    image, label = torch.rand(2, 1, *plan.patch), torch.zeros((2, *plan.patch), dtype=torch.uint8)
    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        rows = task.loss_rows(network(image), label)
    with FlopCounterMode(display=False) as backward:
        rows.sum().backward()
    assert counted.forward_operations == forward.get_total_flops() / 2 > 0
    assert counted.backward_operations == backward.get_total_flops() / 2 > 0
    assert counted.kept_bytes == pytest.approx(sum(size for _, size in kept.values()) / 2, rel=0.02)
    assert counted.kept_bytes / 2 < counted.kept_half_bytes < 0.8 * counted.kept_bytes
    assert counted.weights_bytes == sum(each.nbytes for each in network.state_dict().values())
    assert counted.optimizer_bytes == pytest.approx(2 * counted.gradient_bytes, rel=1e-3), "Adam keeps two of each"
    assert counted.passing_bytes / 2 <= counted.passing_half_bytes < counted.passing_bytes < counted.kept_bytes
    assert counted.passing_bytes > 2 * counted.largest_bytes, "at least what an operation takes, and what it gives"
    assert counted.calls > 20
