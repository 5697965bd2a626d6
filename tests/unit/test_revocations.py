"""The list of revoked certificates: signed by the run's authority, strict, and never shorter than before."""

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.link.net.credentials import Gate
from atoll.link.net.identity import MOST_GENERATIONS, Authority, Bearer
from atoll.link.net.revocations import LONGEST, REVOKED, Revocations, revoke

RUN = "x-1a2b3c4d"
AUTHORITY = Authority.new(RUN)
SEAT = Bearer(RUN, "worker", 3)
ONCE = revoke(AUTHORITY, Revocations(RUN), SEAT)


def refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Revocations.verify(content, AUTHORITY.pem)


def signed(text: str) -> bytes:
    """A list that the authority has signed, whatever it says."""
    return text.encode() + b"signature " + base64.b64encode(AUTHORITY.sign(text.encode())) + b"\n"


def test_a_list_is_read_as_it_was_signed() -> None:
    known = revoke(AUTHORITY, revoke(AUTHORITY, ONCE, Bearer(RUN, "registry")), SEAT)
    assert Revocations.verify(known.content, AUTHORITY.pem) == known
    assert known.least == {("worker", 3): 2, ("registry", 0): 1}


def test_it_revokes_what_was_issued_before_and_nothing_else() -> None:
    assert ONCE.has(SEAT) and not ONCE.has(Bearer(RUN, "worker", 3, generation=1))
    assert not ONCE.has(Bearer(RUN, "worker", 2)) and not ONCE.has(Bearer(RUN, "observer", 3))
    assert not Revocations(RUN).has(SEAT)
    assert ONCE.accepted(SEAT).generation == 1 and ONCE.accepted(Bearer(RUN, "worker", 2)).generation == 0


@given(st.data())
def test_a_changed_list_is_refused(data: st.DataObject) -> None:
    content = bytearray(ONCE.content)
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"."):
        Revocations.verify(bytes(content), AUTHORITY.pem)


@given(st.integers(0, len(ONCE.content) - 1))
def test_a_list_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        Revocations.verify(ONCE.content[:length], AUTHORITY.pem)


@given(st.binary(max_size=300))
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Revocations.verify(content, AUTHORITY.pem)


def test_another_authority_cannot_sign_it() -> None:
    refused(revoke(Authority.new(RUN), Revocations(RUN), SEAT).content, "not signed by the authority")


def test_a_list_is_bounded_and_strict() -> None:
    refused(b"x" * (LONGEST + 1), "the most")
    head = f"atoll revocations 1\nrun {RUN}\n"
    assert Revocations.verify(signed(head), AUTHORITY.pem).least == {}
    for line in ("worker-03 1", "worker-3 0", "worker-3 100", "boss-3 1", "worker-3  1", "", f"worker-{'9' * 5000} 1"):
        refused(signed(f"{head}{line}\n"), "no entry")
    refused(signed(f"{head}worker-3 1\nworker-3 1\n"), "twice")
    refused(signed(f"atoll revocations 2\nrun {RUN}\n"), "another version")
    refused(signed(head[:-1]), "another version")
    refused(signed("atoll revocations 1\nrun other\n"), "run other")


def test_it_has_room_for_every_seat() -> None:
    least = {("worker", seat): 98 for seat in range(4096)}
    full = revoke(AUTHORITY, Revocations(RUN, least), SEAT)  # type: ignore[arg-type]
    assert Revocations.verify(full.content, AUTHORITY.pem).least[("worker", 3)] == 99


def test_a_seat_is_revoked_so_often_at_most() -> None:
    least = {("worker", 3): MOST_GENERATIONS - 1}
    with pytest.raises(ConfigError, match="make new keys"):
        revoke(AUTHORITY, Revocations(RUN, least), SEAT)  # type: ignore[arg-type]


def test_an_older_list_does_not_take_the_place_of_a_newer_one() -> None:
    gate, twice = Gate(RUN), revoke(AUTHORITY, ONCE, Bearer(RUN, "worker", 0))
    forked = revoke(AUTHORITY, Revocations(RUN), Bearer(RUN, "worker", 1))
    assert gate.update(ONCE) and gate.update(twice) and gate.update(twice)
    for older in (Revocations(RUN), ONCE, forked, Revocations("other", twice.least)):
        assert not gate.update(older)
    assert gate.revocations == twice


def test_the_file_of_a_bundle(tmp_path: Path) -> None:
    assert Revocations.load(tmp_path, RUN, AUTHORITY.pem) == Revocations(RUN)
    (tmp_path / REVOKED).write_bytes(ONCE.content)
    assert Revocations.load(tmp_path, RUN, AUTHORITY.pem) == ONCE
    for content in (ONCE.content[:-3], b"", b"x" * (LONGEST + 1)):
        (tmp_path / REVOKED).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            Revocations.load(tmp_path, RUN, AUTHORITY.pem)
        assert caught.value.setting == "keys" and REVOKED in str(caught.value)
    (tmp_path / REVOKED).unlink()
    (tmp_path / REVOKED).symlink_to(tmp_path / "nowhere")  # not as if nothing were revoked
    with pytest.raises(ConfigError):
        Revocations.load(tmp_path, RUN, AUTHORITY.pem)
