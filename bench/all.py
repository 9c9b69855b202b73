"""All benchmarks one after another, on a quiet machine: `make bench`, or with `FULL=1` the long ones too.

    python bench/all.py [--full] [--only step,startup] [--out results.json] [--write]
    python bench/all.py --of quick.json long.json --write

Prints a table of their ratios, each with its goal, and ends with 1 if one was missed or not measured, or a benchmark
has failed. The file holds what each has printed, with the machine and the commands; `bench/compare.py OLD NEW` says
what became slower from one such file to another. `--write` puts the table into bench/README.md, in place of the last
one; with `--of` nothing is run, and the table is that of earlier runs on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratios import BENCHES

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "bench" / "README.md"
BEGIN, END = "<!-- written by bench/all.py --write -->", "<!-- end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the long ones too")
    parser.add_argument("--only", help="names, with commas between them")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results.json")
    parser.add_argument("--of", type=Path, nargs="+", metavar="FILE", help="run nothing: the table of earlier runs")
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    options = parser.parse_args()
    if options.of:
        content = together([json.loads(file.read_text()) for file in options.of])
    else:
        content = run(chosen(options.only, full=options.full), full=options.full)
        options.out.write_text(json.dumps(content, indent=2) + "\n")
    table = render(content)
    print(table)
    if options.write:
        README.write_text(with_table(README.read_text(), table))
    wanting = list(wanting_in(content))
    print(*(f"missed: {name}" for name in wanting), sep="\n", end="\n" * bool(wanting), file=sys.stderr)
    return 1 if wanting else 0


def together(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs as one: of a benchmark that was run more than once, the last."""
    machines = [{**content["machine"], "load": None} for content in contents]
    if any(machine != machines[0] for machine in machines):
        raise SystemExit("--of: found runs on several machines, expected one: ratios differ from machine to machine")
    benches = {name: each for content in contents for name, each in content["benches"].items()}
    ordered = {name: benches[name] for name in BENCHES if name in benches}
    load = max(content["machine"]["load"] for content in contents)
    return {"machine": {**machines[0], "load": load}, "benches": ordered}


def wanting_in(content: Mapping[str, Any]) -> Iterator[str]:
    """Goals that were missed or not measured, and benchmarks that failed."""
    for name, each in content["benches"].items():
        if each["result"] is None:
            yield f"{name} failed"
            continue
        found = BENCHES[name].found(each["result"])
        for key, ratio in BENCHES[name].ratios.items():
            if ratio.goal is None or (key in found and ratio.meets(found[key])):
                continue
            value = f"{found[key]:.3g}" if key in found else "not measured"
            yield f"{name} {key}: {value}, expected {'at most' if ratio.less else 'at least'} {ratio.goal:g}"


def chosen(only: str | None, *, full: bool) -> list[str]:
    if only is None:
        return [name for name, each in BENCHES.items() if each.quick or full]
    names = only.split(",")
    if unknown := [name for name in names if name not in BENCHES]:
        raise SystemExit(f"--only: found {', '.join(unknown)}, expected some of {', '.join(BENCHES)}")
    return names


def run(names: Sequence[str], *, full: bool) -> dict[str, Any]:
    """What the benchmarks have printed, and the machine as it was before."""
    machine, results = describe_machine(), {}
    for name in names:
        command = BENCHES[name].command(whole=full)
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
    return {"machine": machine, "benches": results}


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


def render(content: Mapping[str, Any]) -> str:
    """A Markdown table, the machine above it and the commands below."""
    machine, benches = content["machine"], content["benches"]
    minutes = sum(each["took_s"] for each in benches.values()) / 60
    lines = [
        f"{machine['cpus']} CPUs ({machine['processor']}), {machine['memory_gb']} GB, {machine['gpus']} GPUs; "
        f"Python {machine['python']}, torch {machine['torch']}; load before it began {machine['load']}; "
        f"{minutes:.1f} minutes in all.",
        "",
        "| benchmark | ratio | measured | goal | |",
        "|---|---|---|---|---|",
    ]
    for name, each in benches.items():
        lines += rows_of(name, each)
    commands = [f"{each['command']}  # {each['took_s']:.0f} s" for each in benches.values()]
    return "\n".join([*lines, "", "```bash", *commands, "```"])


def rows_of(name: str, each: Mapping[str, Any]) -> Iterator[str]:
    """Rows of the table: of every ratio that a benchmark is to print, whether it has or not, and of what it tells."""
    if each["result"] is None:
        yield f"| {name} | | **failed with {each['exit_code']}** | | |"
        return
    found = BENCHES[name].found(each["result"])
    for key, ratio in BENCHES[name].ratios.items():
        goal = "" if ratio.goal is None else f"{'≤' if ratio.less else '≥'} {ratio.goal:g}"
        if key not in found:
            yield f"| {name} | `{key}` | not measured | {goal} | |"
            continue
        met = "" if ratio.goal is None else "reached" if ratio.meets(found[key]) else "**missed**"
        yield f"| {name} | `{key}` | {found[key]:.3g} | {goal} | {met} |"
    for key, value in BENCHES[name].beside(each["result"]).items():
        yield f"| {name} | `{key}` | {value:.3g} | | |"


def with_table(text: str, table: str) -> str:
    """The page with the table between the two marks; they are put at its end where it has none yet."""
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n## The last run\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    sys.exit(main())
