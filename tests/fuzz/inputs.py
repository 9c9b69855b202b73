"""Inputs that are tried one by one in a child process, which may neither hang, nor eat the memory, nor die."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from chaos.report import Report
from voxscale.errors import DataError, VoxscaleError

REFUSED, UNCHANGED, AS_STATED = "refused", "unchanged", "as stated"
_LIMIT_S = 10.0  # of computing; of waiting, or on a machine that others use too, three times as much
_LIMIT_BYTES = 2**28
_BATCH = 250
_MOST_SIGNS = 2000  # in a line of a message
_NO_RULE = re.compile(  # what Python says of itself is no rule that a user could follow
    r"NoneType|object is not|object has no attribute|<memory at|<[\w.]+ object at|recursion|too (big|large) to convert"
    r"|embedded null|codec can't encode|index out of range|unhashable|positional argument|surrogates not allowed"
)


class Wrong(Exception):
    """What should not have come of an input."""


class _Hang(BaseException):
    """Not an Exception, so that nobody takes it for a fault of the input."""


@dataclass(frozen=True)
class Input:
    """One malformed input.

    `read` reads it as voxscale does, and returns what came of it where it is accepted; it raises Wrong for what is not
    as it should be. Each line of a refusal has to match `named`. `must` is the only right outcome, if there is one.
    """

    kind: str
    read: Callable[[], str]
    named: str
    refusal: type[VoxscaleError] = DataError
    must: str = ""


Make = Callable[[random.Random, Path], Input]


def try_inputs(name: str, root: Path, make: Make, *, inputs: int, seed: int) -> Report:
    """Make and read so many inputs. Each depends on the seed and its number alone, so that one can be tried again."""
    report = Report(name)
    root.mkdir(parents=True, exist_ok=True)
    with report.timed():
        while report.tried < inputs:
            _try_batch(report, root, make, range(report.tried, min(report.tried + _BATCH, inputs)), seed)
    return report


def _try_batch(report: Report, root: Path, make: Make, numbers: range, seed: int) -> None:
    """Until the end of the batch, or the death of the child that reads it."""
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _be_child(its, root, make, numbers, seed)
    os.close(its)
    lines = _lines(ours, child)
    number, kind = "", ""
    for number, kind in lines:
        report.tried += 1
        report.count(kind.partition(":")[0])
        outcome, wrong = next(lines, ("died", ""))
        report.count(outcome)
        if wrong:
            report.wrong.append(f"seed {seed}, number {number}, {kind}: {wrong}")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        by = signal.Signals(os.WTERMSIG(status)).name
        report.wrong.append(f"seed {seed}, number {number}, {kind}: the process died by {by}")
    elif status:
        raise RuntimeError(f"seed {seed}: the input after number {number or numbers.start - 1} cannot be made")


def _lines(pipe: int, child: int) -> Iterator[tuple[str, str]]:
    """What the child writes; one that no signal of its own can interrupt is killed."""
    held = b""
    with os.fdopen(pipe, "rb", buffering=0) as stream:
        while True:
            if not select.select([stream], [], [], 6 * _LIMIT_S)[0]:
                os.kill(child, signal.SIGKILL)
            if not (more := stream.read(1 << 16)):
                return
            *whole, held = (held + more).split(b"\n")
            for line in whole:
                first, second = json.loads(line)
                yield first, second


def _be_child(pipe: int, root: Path, make: Make, numbers: range, seed: int) -> None:
    status = 1
    try:
        warnings.simplefilter("ignore")
        limit = _data_bytes() + _LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        for number in numbers:
            one = make(random.Random(f"{seed}/{number}"), root)
            os.write(pipe, json.dumps([str(number), one.kind]).encode() + b"\n")
            os.write(pipe, json.dumps(_outcome(one)).encode() + b"\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _data_bytes() -> int:
    """What this process has of the memory that RLIMIT_DATA counts."""
    return int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def _outcome(one: Input) -> tuple[str, str]:
    """(What came of it, what is wrong with that)."""
    try:
        with _limited():
            outcome = one.read()
    except one.refusal as error:
        return REFUSED, _faults_of(error, one)
    except Wrong as wrong:
        return "wrong", _short(str(wrong))
    except _Hang:
        return "wrong", f"took more than {_LIMIT_S:g} s"
    except BaseException as error:
        return "wrong", f"{type(error).__name__}: {_short(str(error))}{_place(error)}"
    return outcome, f"{outcome}, expected {one.must}" if one.must not in ("", outcome) else ""


def _faults_of(error: VoxscaleError, one: Input) -> str:
    if one.must not in ("", REFUSED):
        return f"refused, expected {one.must}: {_short(error.message)}"
    for line in error.message.split("\n"):
        if len(line) > _MOST_SIGNS:
            return f"a message of {len(line)} characters: {_short(line)}"
        if not re.search(one.named, line):
            return f"a message that does not say where: {_short(line)}"
        if _NO_RULE.search(line):
            return f"a message without a rule: {_short(line)}"
    return "" if error.fix else f"a message without a fix: {_short(error.message)}"


@contextmanager
def _limited() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Hang

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, _LIMIT_S), signal.ITIMER_REAL: (signal.SIGALRM, 3 * _LIMIT_S)}
    for timer, (number, limit_s) in timers.items():
        signal.signal(number, interrupt)
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)


def _place(error: BaseException) -> str:
    """The last line of voxscale's own that the error went through."""
    places, trace = [""], error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/voxscale/" in file:
            places.append(f" at {file.rpartition('/voxscale/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return places[-1]


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]} … {text[-90:]}"


def mutated(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """(Kind, content with one part of it damaged)."""
    kind = chance.choice(
        ["bits flipped", "cut off", "a part zeroed", "a part repeated", "a part lost", "rubbish put in"]
    )
    at, length = chance.randrange(len(content)), chance.choice([1, 2, 4, 16, 64, 300])
    part, rest = content[at : at + length], content[at + length :]
    match kind:
        case "bits flipped":
            changed = bytearray(content)
            for _ in range(chance.choice([1, 1, 1, 2, 8])):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            return kind, bytes(changed)
        case "cut off":
            return kind, content[:at]
        case "a part zeroed":
            return kind, content[:at] + bytes(len(part)) + rest
        case "a part repeated":
            return kind, content[:at] + part * chance.choice([2, 3, 50]) + rest
        case "a part lost":
            return kind, content[:at] + rest
    return kind, content[:at] + chance.randbytes(length) + content[at:]
