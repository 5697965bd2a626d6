"""Keeps how far each member of a run has applied its rounds."""

from collections.abc import Mapping, Sequence

from atoll.link.net.views import Decision, Era, Process, Told, View


class AppliedSteps:
    """Keeps the step up to which each member has applied all rounds, as far as it has said so.

    Args:
        me: This process.
        step: The step after which it starts or resumes; None for a process that joins a run under way.
    """

    def __init__(self, me: Process, step: int | None) -> None:
        self._me = me
        self._said: dict[Process, int] = {} if step is None else {me: step}
        self._admitted: dict[Process, int] = {}
        """The same as of the last flush; of a joiner that waits for its state, the step at which it was admitted."""

    @property
    def own(self) -> int | None:
        """The step of this member; None as long as it waits for the shared state."""
        return self._said.get(self._me)

    def said(self, member: Process) -> int:
        """Return the step that a member has said; -1 if it has said none."""
        return self._said.get(member, -1)

    def of(self, member: Process) -> int:
        """Return the step that a member has said, or else that of the last flush; -1 if it has neither."""
        return self._said.get(member, self._admitted.get(member, -1))

    def has_caught_up(self, member: Process, eras: Sequence[Era]) -> bool:
        """Return whether a member has applied all rounds that were made before it owed payloads."""
        if not eras or member in eras[0].owing:  # all have applied what was made before
            return True
        first = next((era.first_step for era in eras if member in era.owing), None)
        return first is not None and self.said(member) >= first - 1

    def note_own(self, step: int) -> None:
        """Note that this member has applied all rounds up to a step."""
        self._said[self._me] = step

    def note(self, member: Process, step: int) -> None:
        """Note what another member has said; messages may come in another order than they were sent."""
        self._said[member] = max(step, self.said(member))

    def keep(self, view: View) -> None:
        """Forget all but the members of a view."""
        self._said = {member: step for member, step in self._said.items() if view.has(member)}

    def take(self, decision: Decision, told: Mapping[Process, Told]) -> None:
        """Take what a flush has found."""
        self._admitted = dict(decision.applied)
        for member, one in told.items():
            if member != self._me and one.applied is not None:
                self.note(member, one.applied)
