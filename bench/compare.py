"""What became slower from one `make bench` to another: ratios alone, as times differ from machine to machine.

    python bench/compare.py OLD.json NEW.json [--least 0.05] [--json]

Compared are the ratios of bench/ratios.py that both files have. Ends with 1 if any became worse by more than `--least`,
or if a benchmark that gave ratios before has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratios import BENCHES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--least", type=float, default=0.05, help="the relative change that counts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    old, new = read(options.old), read(options.new)
    rows = compare(ratios_in(old), ratios_in(new), least=options.least)
    failed = sorted(name for name, _ in ratios_in(old) if name in new and new[name]["result"] is None)
    failed = list(dict.fromkeys(failed))
    print(json.dumps({"rows": rows, "failed": failed}) if options.json else render(rows, failed))
    return 1 if failed or any(row["verdict"] == "worse" for row in rows) else 0


def read(path: Path) -> dict[str, Any]:
    """The benchmarks in a file that `bench/all.py` wrote."""
    try:
        benches: dict[str, Any] = json.loads(path.read_text())["benches"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: expected a file that bench/all.py --out wrote; {error}") from error
    return benches


def ratios_in(benches: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """What is compared, by benchmark and name: no times, as these differ from machine to machine."""
    return {
        (name, key): value
        for name, each in benches.items()
        if name in BENCHES and each["result"]
        for key, value in BENCHES[name].found(each["result"]).items()
        if not BENCHES[name].ratios[key].is_time
    }


def compare(
    old: dict[tuple[str, str], float], new: dict[tuple[str, str], float], *, least: float
) -> list[dict[str, Any]]:
    """A row of each ratio that both have, the worst change first."""
    rows = []
    for name, key in old.keys() & new.keys():
        before, after = old[name, key], new[name, key]
        change = BENCHES[name].ratios[key].change(before, after)
        verdict = "worse" if change < -least else "better" if change > least else "same"
        rows.append({"name": f"{name} {key}", "old": before, "new": after, "change": change, "verdict": verdict})
    return sorted(rows, key=lambda row: (row["change"], row["name"]))


def render(rows: list[dict[str, Any]], failed: list[str]) -> str:
    said = [f"{name}: failed" for name in failed]
    if not rows:
        return "\n".join([*said, "nothing to compare: no ratio is in both files"])
    lines = [f"{'':<32}{'old':>9}{'new':>9}{'better by':>11}"]
    lines += [
        f"{row['name']:<32}{row['old']:>9.3f}{row['new']:>9.3f}{row['change']:>+11.1%}  {row['verdict']}"
        for row in rows
    ]
    return "\n".join([*lines, *said])


if __name__ == "__main__":
    sys.exit(main())
