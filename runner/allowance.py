"""How much time may go into finding out whether another way of going on would be faster."""

PLAIN_TRY, DRAFT_TRY, PROBE = "plain", "draft", "probe"
UNKNOWN_TRIES = {PLAIN_TRY: 0.05, PROBE: 0.1}  # seconds that a first try is thought to cost
SHARE_FOR_TRIES = 0.01  # of all time
HORIZON = 120.0  # seconds after which tries and their costs are half forgotten


class Allowance:
    """Time that may be spent on finding out: a share of all time. Of rounds of several requests side by side each
    request has its part of the seconds."""

    def __init__(self) -> None:
        self._time, self._spent = 0.0, 0.0
        self._last: dict[tuple[int, str], float] = {}  # what a try cost

    def allows(self, batch: int, kind: str, first: float | None = None) -> bool:
        """Whether another try of `kind`, expected to cost what the last one did, is within the share. `first`: seconds
        that it is thought to cost if there was none."""
        unknown = UNKNOWN_TRIES[kind] if first is None else first
        expected = self._last.get((batch.bit_length(), kind), unknown)
        return self._spent + expected <= SHARE_FOR_TRIES * self._time

    def begin(self, batch: int, kind: str) -> None:
        self._last[batch.bit_length(), kind] = 0.0

    def spend(self, batch: int, kind: str, seconds: float) -> None:
        self._spent = max(0.0, self._spent + seconds)
        key = batch.bit_length(), kind
        self._last[key] = self._last.get(key, 0.0) + seconds

    def go_by(self, seconds: float) -> None:
        self._time += seconds
        if self._time > HORIZON:
            self._time, self._spent = self._time / 2, self._spent / 2
