"""What a job asks for where nobody states it: the time and memory of the plan, if something is known of the config."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from voxscale.config.schema import Config
from voxscale.config.site import Site, seconds_of
from voxscale.data.build import store_root
from voxscale.errors import ConfigError, VoxscaleError
from voxscale.launch.cluster import Cluster
from voxscale.launch.partitions import render_time
from voxscale.launch.planning import forecast_run
from voxscale.launch.sbatch import Planned, Request, memory_of
from voxscale.plan.forecast import Forecast


def plan_request(
    config: Config, environ: Mapping[str, str], site: Site, request: Request, cluster: Cluster
) -> Planned | None:
    """What the plan asks for, within what the partition has. Nothing is measured for it, and nothing refused.

    A time is only asked for where a job that reaches it is queued again, memory only of nodes that are shared.
    """
    wants_time = site.time is None and site.requeue
    wants_memory = site.memory is None and not site.exclusive
    kept = store_root(config.data, environ) / "costs"
    if not (wants_time or wants_memory) or not kept.is_dir():
        return None
    try:
        forecast = forecast_run(
            config, environ, site, nodes=request.nodes, devices=str(request.devices), probe=False, count=False
        )
    except ConfigError as error:
        print(f"warning: `voxscale plan` says: {error.message.splitlines()[0]}", file=sys.stderr)
        return None
    except VoxscaleError:
        return None
    partitions = cluster.chosen(site)
    memory_mb = min([round(memory_of(forecast.as_asked.memory)), *(each.most_memory_mb for each in partitions)])
    limits = [limit for each in partitions if (limit := each.max_time_s) is not None]
    time_s = min([seconds_of(forecast.as_asked.time), *limits])
    planned = Planned(
        memory_mb if wants_memory else None, render_time(time_s) if wants_time else None, _basis(forecast)
    )
    print(f"asking for {planned.as_text()}", file=sys.stderr)
    return planned


def _basis(forecast: Forecast) -> str:
    what = {"probe": "measured steps", "table": "published figures"}[forecast.costs.basis]
    return f"{what}, confidence {forecast.times.confidence}"
