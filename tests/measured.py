"""What a step costs one CPU rank, as if it had been measured."""

from __future__ import annotations

from voxscale.plan.costs import Costs

COSTS = Costs(
    basis="probe",
    device="x86_64 CPU",
    on_gpu=False,
    world_size=1,
    nodes=1,
    threads=1,
    cpus=64,
    computing="fp32",
    micro_batch=4,
    accumulate=1,
    global_batch=4,
    data_s=0.1,
    compute_s=2.0,
    communication_s=0.0,
    load_s=0.4,
    spread=0.0,
    validate_case_s=3.0,
    weights_bytes=100,
    gradient_bytes=100,
    optimizer_bytes=200,
    rest_bytes=1000,
    training_bytes=1000 + 400 + 800,
    validating_bytes=1000 + 400 + 500,
    device_training_bytes=None,
    device_validating_bytes=None,
    device_bytes=None,
    all_reduce_gb_s=None,
)
