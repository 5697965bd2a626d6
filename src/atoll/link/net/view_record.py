"""Encodes a view as the registry holds it: JSON, parsed strictly."""

from pydantic import TypeAdapter

from atoll.link.net.messages import Header, Number, SeatLife, parse
from atoll.link.net.views import View


class ViewRecord(Header):
    """Carries a view."""

    number: Number
    members: list[SeatLife]
    following: list[Number]
    late: list[tuple[Number, Number]]
    over: bool = False


_VIEW = TypeAdapter(ViewRecord)


def encode_view(view: View) -> bytes:
    """Return a view as JSON, for the registry."""
    following, late = sorted(view.following), sorted(view.late.items())
    record = ViewRecord(number=view.number, members=list(view.members), following=following, late=late, over=view.over)
    return record.model_dump_json().encode()


def decode_view(data: bytes) -> View:
    """Parse what the registry holds; ValueError if it is anything else."""
    record = parse(_VIEW, data)
    return View(record.number, dict(record.members), frozenset(record.following), dict(record.late), record.over)
