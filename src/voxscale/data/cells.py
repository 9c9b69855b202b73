"""Cells of a table as numbers. Every parser raises ValueError for a cell that it does not take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LARGEST = 1e30  # of which the square is a number still, and which 32 bits hold
_EMPTY = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "-", "?"}  # as R, pandas and spreadsheets write it
_TRUTHS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}


def as_number(cell: str) -> float:
    """A number, finite or not."""
    if "_" in cell or not cell.isascii():  # Python takes the one for a separator, and digits of any script
        raise ValueError(cell)
    return float(cell)


def finite(cell: str) -> float:
    value = as_number(cell)
    if not abs(value) <= LARGEST:
        raise ValueError(cell)
    return value


def not_negative(cell: str) -> float:
    value = finite(cell)
    if value < 0:
        raise ValueError(cell)
    return value


def zero_or_one(cell: str) -> float:
    try:
        return _TRUTHS[cell.casefold()]
    except KeyError:
        raise ValueError(cell) from None


def is_empty(cell: str) -> bool:
    return cell.casefold() in _EMPTY


def is_number(cell: str) -> bool:
    return _is(as_number, cell)


def is_finite(cell: str) -> bool:
    return _is(finite, cell)


def are_numbers(cells: Sequence[str]) -> bool:
    """Whether most are, so that the others would have to be.

    With a decimal comma they are meant to be: no parser takes them, but words they are not.
    """
    return sum(is_number(cell.replace(",", ".", 1)) for cell in cells) * 2 > len(cells)


def _is(parse: Callable[[str], float], cell: str) -> bool:
    try:
        parse(cell)
    except ValueError:
        return False
    return True


def at_most(largest: float) -> str:
    """What `finite` takes, in words."""
    return f"a finite number of at most {largest:g}"
