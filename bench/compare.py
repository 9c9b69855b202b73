"""What became slower from one `make bench` to another: ratios alone, as times differ from machine to machine.

    python bench/compare.py OLD.json NEW.json [--least 0.05] [--json]

Compared are the ratios of bench/ratios.py that both files have. Ends with 1 if any became worse by more than `--least`.
"""

from __future__ import annotations

import argparse
import json
import sys
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
    rows = compare(read(options.old), read(options.new), least=options.least)
    print(json.dumps({"rows": rows}) if options.json else render(rows))
    return 1 if any(row["verdict"] == "worse" for row in rows) else 0


def read(path: Path) -> dict[tuple[str, str], float]:
    """The ratios in a file that `bench/all.py` wrote, by benchmark and name."""
    benches = json.loads(path.read_text())["benches"]
    return {
        (name, key): value
        for name, each in benches.items()
        if name in BENCHES and each["result"]
        for key, value in BENCHES[name].found(each["result"]).items()
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


def render(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "nothing to compare: no ratio is in both files"
    lines = [f"{'':<32}{'old':>9}{'new':>9}{'better by':>11}"]
    lines += [
        f"{row['name']:<32}{row['old']:>9.3f}{row['new']:>9.3f}{row['change']:>+11.1%}  {row['verdict']}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
