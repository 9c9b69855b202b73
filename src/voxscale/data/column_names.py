"""What the name of a column says it holds, however it is spelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from voxscale.config.horizons import TimeUnit

_UNITS: tuple[TimeUnit, ...] = ("days", "weeks", "months", "years")
_SPANS = ("survival", "os", "pfs", "dfs", "efs", "rfs", "dss", "fu")  # times only with a unit: OS alone is an event too
_TIMES = (
    *("time", "timetoevent", "timetodeath", "eventtime", "survivaltime", "overallsurvival", "overallsurvivaltime"),
    *("followup", "followuptime", "futime", "duration", "ostime", "pfstime", "dfstime", "efstime", "rfstime"),
)
# The first of each is plain: a column of that name counts, whatever others could be meant.
TIMES = (
    *_TIMES,
    *(f"{name}{link}{unit}" for name in (*_TIMES, *_SPANS) for link in ("", "in") for unit in _UNITS),
    *(f"{unit}toevent" for unit in _UNITS),
    "days",
)
EVENTS = (
    *("event", "events", "eventobserved", "eventstatus", "status", "vitalstatus", "mace", "dead", "death", "died"),
    *("deceased", "osevent", "osstatus", "pfsevent", "pfsstatus", "dfsevent", "dfsstatus"),
)
_ALIKE = 0.7
CLASSES = ("class", "classes", "diagnosis", "category", "grade", "label", "target")

_OUTCOME_PARTS = ("death", "deceased", "surviv", "followup", "censor", "mortality", "dateof", "timeto")
_OUTCOME_WORDS = {
    *("time", "times", "days", "duration", "event", "events", "date", "dead", "died", "alive", "mace"),
    *("os", "pfs", "dfs", "efs", "rfs", "dss", "fu"),
}
_FOLD_WORDS = {"fold", "folds", "kfold", "cvfold", "split", "splits"}
_SPLIT_NAMES = {"set", "subset", "dataset", "partition", "group", "cv", "train", "holdout"}  # age_group is none
_ID_WORDS = {"id", "ids", "mrn", "pid", "uid", "uuid", "guid", "ssn", "accession", "identifier"}
_NUMBER_WORDS = {
    *("number", "no", "nr", "num", "name", "code", "key", "index", "row", "unnamed", "case", "patient", "subject"),
}


def word_of(column: str) -> str:
    """The name without case, spaces and signs."""
    return re.sub(r"[\W_]+", "", column).casefold()


def columns_called(header: Sequence[str], usual: Sequence[str]) -> list[str]:
    """The columns with the plain name, which is the first; else those with any of the usual names."""
    plain = [column for column in header if word_of(column) == usual[0]]
    return plain or [column for column in header if word_of(column) in usual]


def nearest_usual(header: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column whose name is most like a usual one, if any is."""
    close = {
        column: difflib.SequenceMatcher(None, word, found[0]).ratio()
        for column in header
        if (found := difflib.get_close_matches(word := word_of(column), usual, n=1, cutoff=_ALIKE))
    }
    return max(close, key=lambda column: close[column], default=None)


def says_outcome(column: str) -> bool:
    """Whether it may tell how a case ended, or when."""
    word = word_of(column)
    return (
        word in TIMES
        or word in EVENTS
        or any(part in word for part in _OUTCOME_PARTS)
        or bool(_OUTCOME_WORDS & _words_in(column))
    )


def says_fold(column: str) -> bool:
    """Whether it can hardly be anything but a split."""
    return bool(_FOLD_WORDS & _words_in(column))


def says_split(column: str) -> bool:
    """Whether it may tell which part of a split a case is in."""
    return says_fold(column) or word_of(column).rstrip("0123456789") in _SPLIT_NAMES


def says_id(column: str) -> bool:
    return bool(_ID_WORDS & _words_in(column))


def says_number(column: str) -> bool:
    """Whether it may be an id, if it differs from row to row."""
    return bool(_NUMBER_WORDS & _words_in(column))


def unit_in(column: str) -> TimeUnit | None:
    """The unit of time that the name has in it."""
    word = word_of(column)
    return next((unit for unit in _UNITS if unit[:-1] in word), None)


def _words_in(column: str) -> set[str]:
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column)
    return set(re.findall(r"[^\W\d_]+", apart.casefold()))
