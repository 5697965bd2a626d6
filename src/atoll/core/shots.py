"""How a round travels: in one shot between up to three members, in two shots between more. Integers only.

One shot: every member sends its payload to every other. Two shots: the vector is cut into parts, one or more per
member; each member gets everybody's payload of its own parts, takes their mean, encodes that like a delta, and sends it
to all. It costs 2 (M-1)/M payloads instead of M-1, and all decode the same bytes (`core.cargo`).
"""

from atoll._util.checks import check_whole

ONE_SHOT_MEMBERS = 3
"""Up to here one shot costs no more bytes than 1.5 times two, takes one latency instead of two, and rounds once."""


def shots(members: int) -> int:
    """How often a round of this many members crosses the link: 0 for one alone, 1 or 2."""
    check_whole("members", members)
    return 0 if members == 1 else 1 if members <= ONE_SHOT_MEMBERS else 2


def sent_bytes(payload_bytes: int, members: int) -> int:
    """What one member puts on its link in a round, in bytes, headers aside.

    More than three: a slice for every other one to reduce, then a reduced slice to all; together 2 (M-1)/M payloads,
    here rounded up to a whole byte.
    """
    check_whole("payload_bytes", payload_bytes, least=0)
    if shots(members) < 2:
        return (members - 1) * payload_bytes
    return -(-2 * (members - 1) * payload_bytes // members)
