"""What a job asks for where nobody states it: what the plan recommends, if something is known of the config."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from voxscale.config.schema import Config, PerDevice
from voxscale.config.site import seconds_of
from voxscale.config.training import RatePerDevice
from voxscale.data.build import store_root
from voxscale.errors import ConfigError, VoxscaleError
from voxscale.launch.cluster import Cluster
from voxscale.launch.partitions import render_time
from voxscale.launch.planning import forecast_run
from voxscale.launch.sbatch import Placement, Planned, Request, memory_of
from voxscale.plan.forecast import Forecast


def plan_request(
    config: Config, root: Path, environ: Mapping[str, str], place: Placement, request: Request, cluster: Cluster
) -> Request:
    """The request with what the plan asks for, within what the partition has. Nothing is measured, nothing refused.

    A time is only asked for where a job that reaches it is queued again, memory only of nodes that are shared, and
    fewer devices than a node has where nobody asks for any.
    """
    site = place.site
    wants_time = site.time is None and site.requeue
    wants_memory = site.memory is None and not site.exclusive
    chooses = _may_choose(config, place)
    kept = store_root(config.data, environ) / "costs"
    if not (wants_time or wants_memory or chooses) or not kept.is_dir():
        return request
    forecast = _forecast(config, root, environ, place, request, fewer=chooses)
    if forecast is None:
        return request
    asked = forecast.request if chooses else forecast.as_asked
    partitions = cluster.chosen(site)
    times = [cluster.max_time_s(site, each) for each in partitions]
    memory_mb = min([round(memory_of(asked.memory)), *(each.most_memory_mb for each in partitions)])
    time_s = min([seconds_of(asked.time), *(limit for limit in times if limit is not None)])
    planned = Planned(
        memory_mb if wants_memory else None,
        render_time(time_s) if wants_time else None,
        _basis(forecast),
        fewer_than=request.devices if asked.devices < request.devices else None,
    )
    if planned.is_empty:
        return request
    request = replace(request, nodes=asked.nodes, devices=asked.devices, planned=planned)
    print(f"asking for {planned.as_text(request.devices)}", file=sys.stderr)
    return request


def _forecast(
    config: Config, root: Path, environ: Mapping[str, str], place: Placement, request: Request, *, fewer: bool
) -> Forecast | None:
    """Of what is requested; of half as many devices, and so on, where that cannot work and `fewer` may be asked for."""
    devices, refused = request.devices, ""
    while devices:
        try:
            return forecast_run(
                config,
                environ,
                place.site,
                nodes=request.nodes,
                devices=str(devices),
                probe=False,
                count=False,
                folder=root,
            )
        except ConfigError as error:
            refused = refused or error.message.splitlines()[0]
        except VoxscaleError:
            break
        devices = devices // 2 if fewer else 0
    if refused:
        print(f"warning: `voxscale plan` says: {refused}", file=sys.stderr)
    return None


def _may_choose(config: Config, place: Placement) -> bool:
    """Whether nobody says how many devices to use, all of a node are not taken anyway, and no result depends on it."""
    train, rate = config.train, config.optimizer.rate
    is_stated = place.nodes is not None or place.devices != "auto" or train.devices != "auto" or place.site.exclusive
    counts = isinstance(train.batch, PerDevice) or isinstance(rate, RatePerDevice) or config.data.cache.share == "rank"
    return not (is_stated or counts)


def _basis(forecast: Forecast) -> str:
    what = {"probe": "measured steps", "table": "published figures"}[forecast.costs.basis]
    return f"{what}, confidence {forecast.times.confidence}"
