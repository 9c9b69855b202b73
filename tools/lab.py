"""A SLURM cluster on this machine for trying things by hand: `python tools/lab.py up ROOT 4`, `… down ROOT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from lab.conf import Shape
from lab.slurm import SlurmLab, down_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument("root", type=Path)
    parser.add_argument("nodes", type=int, nargs="?", default=4)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd: accounts and QOS are enforced")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if arguments.verb == "down":
        sys.exit(0 if down_at(root) else f"no lab runs in {root}")
    lab = SlurmLab(root, Shape(nodes=arguments.nodes), accounting=arguments.accounting, keep=True).up()
    print(*(f"export {name}={value}" for name, value in lab.environ.items()), sep="\n")


if __name__ == "__main__":
    main()
