"""Takes a process out of a run: at the run's end, or while the others go on."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from atoll.errors import ExcludedError

if TYPE_CHECKING:  # the report knows the reasons, and needs no gRPC
    from atoll.link.net.member import Member

FINISHED: Final = "has finished"
"""The reason of a worker that leaves at the end of a run."""
STOPPED: Final = "was stopped, and may come back"
"""The reason of a worker that was interrupted."""
_CLOSE_S = 10.0  # for the others to have applied the rounds of a worker that leaves
_FINISH_S = 600.0  # for the same at the end of a run, over a slow line; those that die or are silent do not count
_END_S = 3.0  # for the registry to answer
_SETTLED_S = 0.02


async def leave(member: "Member", reason: str | None, *, over: bool) -> None:
    """Close a member; in order, once all others have applied the rounds that this one has."""
    until = time.monotonic() + (_FINISH_S if over else _CLOSE_S)
    while reason is None and member.error is None and time.monotonic() < until:
        if member.rounds.all_complete and member.protocol.is_settled(member.rounds.newest_step):
            break
        await asyncio.sleep(_SETTLED_S)
    excluded = member.error if over and isinstance(member.error, ExcludedError) else None
    if over:
        await _end_run(member)
    await close(member, reason or FINISHED)
    if excluded is not None:
        advice = "its model may differ from theirs: copy it from the folder of another worker"
        raise ExcludedError(f"{excluded}; {advice}", worker=excluded.worker)


async def _end_run(member: "Member") -> None:
    """Let the registry know that nobody can join any more; another worker may have."""
    until, membership, proposed = time.monotonic() + _END_S, member.membership, 0
    while member.error is None and not membership.view.over and time.monotonic() < until:
        if membership.view.number >= proposed:  # another view came first
            proposed = membership.view.number + 1
            membership.propose(membership.view.ending())
        await asyncio.sleep(_SETTLED_S)


async def drain(member: "Member", reason: str) -> None:
    """Close a member whose run goes on, once the rounds that it has opened are complete."""
    until = time.monotonic() + _CLOSE_S
    while member.error is None and time.monotonic() < until and not member.rounds.all_complete:
        await asyncio.sleep(_SETTLED_S)
    await close(member, reason)


async def close(member: "Member", reason: str) -> None:
    """Close the connections and the registry's side of a member; the reason goes to all peers."""
    await member.peers.close(reason)
    await member.membership.close()
    member.rounds.close()
