"""What the shell of a job does when it is told to stop, reaches its time limit, or has lost a rank."""

from __future__ import annotations

PAGE_MODULE = "voxscale.report.write"  # run with a folder, it writes the page to look at


def save_at_limit(saved: str) -> tuple[str, ...]:
    return (
        *_AT_LIMIT,
        "limit=ahead",
        f"saved=$({saved})",
        'trap \'[ "$limit" = ahead ] && limit=reached; kill -USR1 "$step" 2>/dev/null\' USR1',
        "trap 'limit=cancelled' TERM",
    )


def queue_again(saved: str) -> tuple[str, ...]:
    return (
        'if [ "$limit" = reached ] && [ "$code" -eq 75 ] && [ -z "${VOXSCALE_ATTEMPT:-}" ]; then',
        f'  if [ "$({saved})" != "$saved" ]; then scontrol requeue "$SLURM_JOB_ID"',
        '  else echo "error: nothing new was saved before the time limit, so the job is not queued again" >&2; fi',
        "fi",
    )


def start_again(restarts: int) -> tuple[str, ...]:
    return (
        "# A rank that was lost without a word: queued again, so often, the job goes on from the last checkpoint.",
        'lost=("$run/logs/$SLURM_JOB_ID"-*/lost)',
        f'if [ -e "$reports/lost" ] && [ "${{#lost[@]}}" -le {restarts} ] && [ -z "${{VOXSCALE_ATTEMPT:-}}" ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    )


_AT_LIMIT = (
    "# Before the time limit SLURM signals this shell: the ranks save, then the job is queued again. Cancelled,",
    "# preempted or requeued it gets SIGTERM, as the ranks do: it waits until they have saved; the rest is SLURM's.",
)
WRITE_PAGE = (
    "# The page to look at, unless the run goes on later; whether it can be written changes nothing else.",
    f'[ "$code" -eq 75 ] || "${{python[@]}}" -m {PAGE_MODULE} "$run"',
)
STOP_WHEN_TOLD = (
    "# Interrupted inside an allocation: srun itself would kill the ranks at once.",
    """trap 'scancel -s TERM "$SLURM_JOB_ID.$(cat "$reports/step")" || kill -TERM "$step"' USR1""",
    "trap : TERM  # the ranks are told by SLURM; wait for them",
)
