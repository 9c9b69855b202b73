"""A forecast in words."""

from __future__ import annotations

from voxscale.plan.forecast import Forecast, Request

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def render_forecast(forecast: Forecast) -> str:
    """What `voxscale plan` prints."""
    times, memory, step = forecast.times, forecast.memory, forecast.times.step
    world = forecast.layout.world_size
    lines = [
        f"on {forecast.layout} ({world} device{'s' if world > 1 else ''})",
        f"  time      {duration(times.total_s)} in total: {forecast.plan.num_steps} steps of {duration(step.step_s)}, "
        f"an epoch {duration(times.epoch_s)}, a validation {duration(times.validation_s)}, measuring the best "
        f"{duration(times.end_s)}",
        f"  a step    computing {_share(step.compute_s, step.step_s)}, data {_share(step.data_s, step.step_s)}, "
        f"communication {_share(step.communication_s, step.step_s) if forecast.tells_sharing else 'not known'}",
        f"  memory    {size(memory.device)} for the network of a device: weights {size(memory.weights)}, gradients "
        f"{size(memory.gradients)}, optimizer {size(memory.optimizer)}, activations {size(memory.activations)}"
        + (f", driver and workspaces {size(memory.workspace)}" if memory.workspace else "")
        + (f", cases {size(memory.cached)}" if memory.cached else ""),
        f"            {size(memory.node)} of each node"
        + (f", {size(memory.shared)} of it shared" if memory.shared else ""),
        f"  disk      {', '.join(f'{name} {size(amount)}' for name, amount in forecast.disk.items())}",
        f"  cost      {times.device_hours:.2f} device-hours",
        "",
        "  devices  patches/s  speed-up  efficiency   data  compute  communication  total",
    ]
    first = forecast.curve[0].patches_per_s
    for row in forecast.curve:
        gain, count, part = row.patches_per_s / first, row.layout.world_size, row.step
        mark = "  ← recommended" if row.layout == forecast.recommended else ""
        lines.append(
            f"  {row.layout!s:>7}  {row.patches_per_s:>9.3g}  {gain:>7.2f}×  {gain / count:>9.0%}  "
            f"{part.data_s / part.step_s:>5.0%}  {part.compute_s / part.step_s:>7.0%}  "
            f"{f'{part.communication_s / part.step_s:.0%}' if forecast.tells_sharing else 'not known':>13}  "
            f"{duration(row.total_s)}{mark}"
        )
    lines += ["", f"ask for   {_in_words(forecast.request)}"]
    if forecast.as_asked != forecast.request:
        lines.append(f"as asked  {_in_words(forecast.as_asked)}")
    lines.append(f"rests on  {_basis(forecast)}")
    lines += [f"assumed   {assumption}" for assumption in forecast.assumptions]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in forecast.warnings)])


def _in_words(request: Request) -> str:
    return (
        f"--nodes {request.nodes} --devices {request.devices}, --cpus-per-task={request.cpus_per_task} "
        f"--mem={request.memory} --time={request.time}"
    )


def _basis(forecast: Forecast) -> str:
    costs = forecast.costs
    ranks = f"{costs.world_size} rank{'s' if costs.world_size > 1 else ''}"
    what = {
        "probe": f"steps measured on {ranks} {'here' if forecast.is_here else 'elsewhere'} ({costs.device}, "
        f"{costs.threads} thread{'s' if costs.threads > 1 else ''}, {costs.computing})"
        f"{', kept from earlier' if forecast.is_kept else ''}",
        "table": f"published figures of the {costs.device}: nothing was measured on it",
    }[costs.basis]
    between = forecast.links.between
    nodes = "" if forecast.layout.nodes == 1 else f", {between.gb_s:g} GB/s between nodes ({between.basis})"
    return f"{what}{nodes}; confidence {forecast.times.confidence}"


def duration(seconds: float) -> str:
    """About how long, in two units at most: 1 h 20 min, 35 s, 0.21 s, 73 µs."""
    if 0 < seconds < 1e-4:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit, name in _UNITS:
        if seconds >= unit:
            whole, rest = divmod(seconds, unit)
            smaller = {"d": (3600, "h"), "h": (60, "min"), "min": (1, "s")}[name]
            return f"{whole:.0f} {name} {rest // smaller[0]:.0f} {smaller[1]}"
    return f"{seconds:.0f} s"


def size(amount: float) -> str:
    for unit, name in ((2**40, "TB"), (2**30, "GB"), (2**20, "MB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount / 1024:.0f} kB"


def _share(part: float, whole: float) -> str:
    return f"{duration(part)} ({part / whole:.0%})"
