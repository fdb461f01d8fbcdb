"""The processes that take turns in the bench."""

import os
from dataclasses import dataclass

import pytest

from tests.bench.seats import Seat


@dataclass(frozen=True, slots=True)
class Start:
    """Makes a list with one number."""

    number: int

    def __call__(self) -> list[int]:
        if self.number < 0:
            raise ValueError("no negative numbers here")
        return [self.number]


@dataclass(frozen=True, slots=True)
class Append:
    """Adds a number, and tells the sum and whose process did it."""

    number: int

    def run(self, numbers: list[int]) -> tuple[int, int]:
        numbers.append(self.number)
        return sum(numbers), os.getpid()


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends the process without a word."""

    def run(self, _numbers: list[int]) -> None:
        os._exit(3)


def test_a_subject_keeps_its_state_in_a_process_of_its_own() -> None:
    with Seat(Start(1)) as one, Seat(Start(10)) as ten:
        assert one.do(Append(2))[0] == 3
        assert ten.do(Append(2))[0] == 12
        total, owner = one.do(Append(3))
        assert total == 6
        assert owner not in {os.getpid(), ten.do(Append(0))[1]}


def test_what_goes_wrong_in_a_seat_is_told() -> None:
    with pytest.raises(RuntimeError, match="no negative numbers here"):
        Seat(Start(-1))
    with Seat(Start(1)) as seat, pytest.raises(RuntimeError, match="ended with exit code 3"):
        seat.do(Leave())
