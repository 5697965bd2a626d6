"""Lets rounds be completed without members that are late, and goes on without those that fall far behind.

A round that waits for `grace_s` seconds is completed without the members that have not opened it; their work is in
their next deltas. They stay members, and the others wait for them again, for as long, in every round: so one that was
late once catches up. One that is always too slow would make all others keep ever more rounds for it, so it loses its
seat, and joins again where the others are. The last rounds of a run wait for all: their work has no next delta.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from atoll.link.net.member import Member
from atoll.link.net.views import Process

MOST_BEHIND: Final = 4
"""Rounds of one fragment that a member may lack."""
_TICK_S = 0.1


async def watch_late(member: Member, grace_s: float, lose: Callable[[Process, str], None]) -> None:
    """Look after rounds that wait, until this process cannot go on.

    Args:
        member: This process.
        grace_s: Seconds since a round was opened here, or since its members changed.
        lose: Called with a member that is too far behind, and why; the text continues "worker 3 ...".
    """
    protocol, owing, since_s, asked = member.protocol, tuple[Process, ...](), 0.0, 0
    while member.error is None:
        await asyncio.sleep(min(_TICK_S, grace_s / 5))
        now_s = time.perf_counter()
        if protocol.is_held_up:
            continue
        if owing != protocol.view.owing:  # some have come, or a pause has ended: all begin alike
            owing, since_s = protocol.view.owing, now_s
        for far in protocol.far_behind(MOST_BEHIND):
            lose(far, f"was more than {MOST_BEHIND} rounds of a fragment behind")
        if asked == protocol.view.number or now_s - since_s < grace_s:  # one proposal at a time
            continue
        waiting = [round_id for round_id in member.rounds.waiting_since(now_s - grace_s) if not round_id.last]
        if any(map(member.leave_behind, waiting)):
            asked = protocol.view.number
