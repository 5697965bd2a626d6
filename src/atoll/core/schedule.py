"""Decides when each fragment is sent and applied: integers in, integers out.

The step number is an argument, so any step can be asked about: the loop, the planner and a property test cannot
disagree. Steps are counted from 1: step t is the t-th completed inner step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from atoll._util.checks import check_whole
from atoll.errors import ConfigError


class Due(NamedTuple):
    """Lists the fragments that are sent and applied after one inner step, in ascending order."""

    send: tuple[int, ...]
    """Fragments whose delta leaves now."""
    apply: tuple[int, ...]
    """Fragments whose round, sent `delay` steps ago, is applied now (after the sends)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Spreads sends evenly over the period; each apply follows its send by `delay` inner steps."""

    period: int
    """Inner steps between two sends of the same fragment (H in the papers)."""
    fragments: int
    """How many fragments take turns (P)."""
    delay: int
    """Inner steps between a fragment's send and its apply (tau); 0 to period."""

    def __post_init__(self) -> None:
        check_whole("period", self.period)
        check_whole("fragments", self.fragments)
        check_whole("delay", self.delay, least=0)
        if self.delay > self.period:
            raise ConfigError(
                f"delay must be between 0 and period ({self.period}), got {self.delay}: "
                "a round must be applied no later than the next one of its fragment is sent"
            )

    def offset(self, fragment: int) -> int:
        """Return the inner steps by which this fragment trails fragment 0 (t_p): 0 to period - 1."""
        return fragment * self.period // self.fragments

    def first_send(self, fragment: int) -> int:
        """Return the step after which this fragment is first sent: it has trained a full period then."""
        return self.period + self.offset(fragment)

    def is_send(self, fragment: int, step: int) -> bool:
        """Return whether this fragment is sent after this step."""
        since = step - self.first_send(fragment)
        return since >= 0 and since % self.period == 0

    def next_send(self, fragment: int, step: int) -> int:
        """Return the first step after this one at which this fragment is sent."""
        first = self.first_send(fragment)
        return first + self.period * max(0, (step - first) // self.period + 1)

    def sends(self, fragment: int, after: int, until: int) -> range:
        """Return the steps at which this fragment is sent, after one step and until another, which is included."""
        return range(self.next_send(fragment, after), until + 1, self.period)

    def due(self, step: int) -> Due:
        """Return what is sent and applied after this step, the same for every worker with this schedule."""
        everyone = range(self.fragments)
        return Due(
            send=tuple(f for f in everyone if self.is_send(f, step)),
            apply=tuple(f for f in everyone if self.is_send(f, step - self.delay)),
        )
