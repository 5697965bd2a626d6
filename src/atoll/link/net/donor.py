"""Gives a joiner what all workers have alike, fragment by fragment.

A donor's training thread copies a fragment after it has applied all rounds up to the step at which the joiner was
admitted. The copy is sent once every member has applied the same rounds: then no flush can change them any more.
"""

from collections.abc import Callable

from atoll.link.base import FragmentState
from atoll.link.net.messages import Ask
from atoll.link.net.protocol import Protocol
from atoll.link.net.views import Decision, Process


class Donor:
    """Answers the joiners that have asked this process.

    Args:
        protocol: Tells which rounds all members have applied.
        give: Sends a state to a process.
    """

    def __init__(self, protocol: Protocol, give: Callable[[Process, FragmentState], None]) -> None:
        self.is_over = False
        """Whether this worker has completed a last exchange: a joiner with a state that holds it would wait in vain."""
        self._protocol = protocol
        self._give = give
        self._asked: dict[tuple[Process, int], int] = {}  # joiner, fragment -> boundary
        self._copies: list[FragmentState] = []

    def ask(self, joiner: Process, asked: Ask) -> None:
        """Note what a joiner needs."""
        view = self._protocol.view
        if view.has(joiner) and joiner.seat in view.following:
            self._asked |= {(joiner, fragment): asked.boundary for fragment in asked.fragments}

    def wanted(self, applied: int) -> list[int]:
        """Return the fragments to copy, by a worker that has applied all rounds up to this step; from any thread."""
        if self.is_over:
            return []
        copied = {copy.fragment for copy in list(self._copies)}
        asked = {fragment for (_, fragment), boundary in list(self._asked.items()) if boundary <= applied}
        return sorted(asked - copied)

    def add(self, copies: list[FragmentState]) -> None:
        """Keep copies until they can be given."""
        self._copies += copies
        self.give_settled()

    def forget(self, fragment: int) -> None:
        """Forget who has asked for a fragment that there is not."""
        self._asked = {key: boundary for key, boundary in self._asked.items() if key[1] != fragment}

    def give_settled(self) -> None:
        """Give the copies of which every member has applied all rounds."""
        for copy in [copy for copy in self._copies if self._protocol.is_settled(copy.applied)]:
            self._copies.remove(copy)
            for (joiner, fragment), boundary in list(self._asked.items()):
                if fragment == copy.fragment and boundary <= copy.applied:
                    del self._asked[joiner, fragment]
                    self._give(joiner, copy)

    def adopt(self, decision: Decision) -> None:
        """Forget joiners that are no longer members."""
        self._asked = {key: boundary for key, boundary in self._asked.items() if decision.view.has(key[0])}
        if not self._asked:
            self._copies = []
