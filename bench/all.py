"""All benchmarks one after another, on a quiet machine: `make bench`, or with `FULL=1` the long ones too.

    python bench/all.py [--full] [--only step,startup] [--out results.json]

Prints a table of their ratios, each with its goal. The file holds what each has printed, with the machine and the
commands; `bench/compare.py OLD NEW` says what became slower from one such file to another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ratios import BENCHES

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the long ones too")
    parser.add_argument("--only", help="names, with commas between them")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results.json")
    options = parser.parse_args()
    names = (
        options.only.split(",") if options.only else [n for n, each in BENCHES.items() if each.quick or options.full]
    )
    results: dict[str, Any] = {}
    for name in names:
        command = BENCHES[name].command(whole=options.full)
        print(f"{' '.join(command)}", file=sys.stderr, flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            result = json.loads(done.stdout)
        except ValueError:
            result = None
        results[name] = {
            "command": "python " + " ".join(command),
            "exit_code": done.returncode,
            "took_s": round(time.monotonic() - began, 1),
            "result": result,
        }
    content = {"machine": describe_machine(), "benches": results}
    options.out.write_text(json.dumps(content, indent=2) + "\n")
    print(render(content))
    return 0 if all(each["result"] is not None for each in results.values()) else 1


def describe_machine() -> dict[str, Any]:
    import torch

    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": next(iter(models), platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpus": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def render(content: dict[str, Any]) -> str:
    """A Markdown table, as bench/README.md holds it."""
    machine = content["machine"]
    lines = [
        f"{machine['cpus']} CPUs ({machine['processor']}), {machine['memory_gb']} GB, {machine['gpus']} GPUs; "
        f"Python {machine['python']}, torch {machine['torch']}",
        "",
        "| benchmark | ratio | measured | goal | |",
        "|---|---|---|---|---|",
    ]
    for name, each in content["benches"].items():
        if each["result"] is None:
            lines.append(f"| {name} | | failed with {each['exit_code']} | | |")
            continue
        bench = BENCHES[name]
        for key, value in bench.found(each["result"]).items():
            ratio = bench.ratios[key]
            goal = "" if ratio.goal is None else f"{'≤' if ratio.less else '≥'} {ratio.goal:g}"
            met = "" if ratio.goal is None else "reached" if ratio.meets(value) else "**missed**"
            lines.append(f"| {name} | `{key}` | {value:.3g} | {goal} | {met} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
