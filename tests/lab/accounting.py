"""The accounting of a lab: a private database and slurmdbd, so that accounts and QOS are enforced."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.debian import search_path

ACCOUNT = "lab"


def start(root: Path, start_daemon: Callable[..., Any]) -> None:
    """Start mariadbd, reachable through a socket in `root` only, and slurmdbd."""
    database = root / "db"
    database.mkdir()
    subprocess.run(
        [
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={database}", "--skip-test-db"),
            "--auth-root-authentication-method=socket",
        ],
        env={"PATH": search_path()},
        capture_output=True,
        timeout=120,
        check=True,
    )
    start_daemon(
        "mariadbd",
        *("mariadbd", "--no-defaults", "--user=root", f"--datadir={database}", f"--socket={root}/run/db"),
        *(f"--pid-file={root}/run/mariadbd.pid", "--skip-networking", "--innodb-flush-log-at-trx-commit=0"),
        "--innodb-lock-wait-timeout=900",
    )
    start_daemon("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=f"{root}/run/db")


def fill(run: Callable[..., Any]) -> None:
    """The account `lab` with root and nobody in it, and the QOS `normal`, which SLURM brings along."""
    for record in (
        ["cluster", "lab"],
        ["account", ACCOUNT, "Cluster=lab", "QOS=normal", "DefaultQOS=normal"],
        ["user", "root", f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}"],
        ["user", "nobody", f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}"],
    ):
        run("sacctmgr", "-i", "add", *record, check=False)
