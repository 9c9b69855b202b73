"""Malformed input of every kind, a table of what came of it, and all that is wrong: `cd tests && python -m fuzz`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from chaos.report import render
from fuzz.kinds import KINDS, fuzz_kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="in all, shared out over the kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, action="append", help="its share alone")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = [fuzz_kind(kind, Path(folder), inputs=asked.inputs, seed=asked.seed) for kind in asked.only or KINDS]
    if asked.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        print(render(reports), *(wrong for report in reports for wrong in report.wrong), sep="\n")
    return 1 if any(report.wrong for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
