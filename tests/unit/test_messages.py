"""Messages between members come back as they were sent, and nothing else is taken for one."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.allreduce import MOST_PARTS_EACH
from atoll.core.outliers import Size
from atoll.link.base import Contribution, FragmentState, Member, RoundId
from atoll.link.net.actions import Mean, Part, Progress, Result, RoundMessage, Whole
from atoll.link.net.frames import HEADER_BYTES
from atoll.link.net.greeting import Greeting
from atoll.link.net.messages import (
    Ask,
    PartMean,
    decode_bulk,
    decode_control,
    encode_control,
    encode_round,
    encode_state,
)
from atoll.link.net.view_record import decode_view, encode_view
from atoll.link.net.views import Attempt, Era, Process, RoundStatus, Told, View

numbers = st.integers(0, (1 << 63) - 1)
steps = st.integers(0, 1 << 40)
seats = st.integers(0, (1 << 20) - 1)
processes = st.builds(Process, seats, numbers)
round_ids = st.builds(RoundId, numbers, seats, st.booleans())
norms = st.floats(0, allow_nan=False, allow_infinity=False)
members = st.builds(
    Member,
    worker=seats,
    weight=st.floats(0, 1e18, exclude_min=True),
    anchor_version=numbers,
    anchor_fingerprint=st.integers(0, (1 << 64) - 1),
    size=st.builds(Size, norms, norms),
)
some_processes = st.lists(processes, max_size=5).map(tuple)
attempts = st.builds(Attempt, numbers, some_processes)


def tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


payloads = st.binary(max_size=70).map(tensor)
contributions = st.none() | st.builds(Contribution, members, payloads)


@st.composite
def means(draw: st.DrawFn, parts: int = 1) -> tuple[PartMean, ...]:
    """Means of parts whose reducers counted the same members."""
    there = tuple(draw(st.lists(members, max_size=4)))
    outliers = tuple(draw(st.lists(members, max_size=2)))
    size, found = len(there), []
    for _ in range(draw(st.integers(1, parts))):
        inner = draw(st.lists(st.floats(allow_nan=False), min_size=size * size, max_size=size * size))
        matrix = torch.tensor(inner, dtype=torch.float64).reshape(size, size)
        found.append(PartMean(there, outliers, draw(payloads) if there else None, matrix))
    return tuple(found)


rounds = st.one_of(
    st.builds(Whole, round_ids, processes, contributions),
    st.builds(Part, round_ids, numbers, numbers, contributions),
    st.builds(Mean, round_ids, numbers, numbers, means().map(lambda some: some[0])),
    st.builds(Result, round_ids, attempts, means(5)),
)
eras = st.builds(
    Era, numbers, steps, some_processes, st.frozensets(processes, max_size=4), st.frozensets(seats, max_size=4)
)
told = st.builds(
    Told,
    numbers,
    numbers,
    numbers,
    st.none() | steps,
    steps,
    st.lists(eras, min_size=1, max_size=3).map(tuple),
    st.dictionaries(
        round_ids, st.builds(RoundStatus, attempts, st.frozensets(processes, max_size=4), st.booleans()), max_size=3
    ),
)
controls = st.one_of(st.builds(Progress, steps), told, st.builds(Ask, st.lists(seats, max_size=5).map(tuple), steps))
views = st.builds(
    View,
    numbers,
    st.dictionaries(seats, numbers, max_size=5),
    st.frozensets(seats, max_size=3),
    st.dictionaries(seats, numbers, max_size=3),
    st.booleans(),
)


@st.composite
def states(draw: st.DrawFn) -> FragmentState:
    vectors = {}
    for name in draw(st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        values = st.floats(width=32) if dtype == torch.float32 else st.floats()
        vectors[name] = torch.tensor(draw(st.lists(values, max_size=9)), dtype=dtype)
    counts = draw(st.dictionaries(st.text(max_size=8), st.integers(0, 1 << 60), max_size=4))
    return FragmentState(draw(seats), draw(steps), counts, vectors)


def same(mine: Any, theirs: Any) -> bool:
    """Whether two messages are equal, tensors bit by bit."""
    if isinstance(mine, torch.Tensor):
        return (
            isinstance(theirs, torch.Tensor)
            and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            and mine.contiguous().view(torch.uint8).tolist() == theirs.contiguous().view(torch.uint8).tolist()
        )
    if isinstance(mine, (PartMean, Contribution, Whole, Part, Mean, Result)):
        fields = mine.__dataclass_fields__
        return type(mine) is type(theirs) and all(same(getattr(mine, f), getattr(theirs, f)) for f in fields)
    if isinstance(mine, tuple) and any(isinstance(one, PartMean) for one in mine):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


@given(rounds, numbers)
def test_messages_of_rounds_come_back(message: RoundMessage, view: int) -> None:
    header, body = encode_round(message, view)
    assert body.dtype == torch.uint8
    decoded = decode_bulk(header, bytearray(body.numpy().tobytes()))
    assert isinstance(decoded, tuple)
    assert decoded[1] == view
    assert same(message, decoded[0])
    assert isinstance(decoded[0].round_id, RoundId)


@given(controls, numbers)
def test_control_messages_come_back(message: Progress | Told | Ask, view: int) -> None:
    decoded, told_view = decode_control(encode_control(message, view))
    assert decoded == message
    assert told_view == {Progress: view, Ask: 0}.get(type(message), getattr(message, "adopted", None))
    if isinstance(decoded, Told):
        assert all(isinstance(one, Process) for era in decoded.eras for one in (*era.owing, *era.receiving))
        assert all(isinstance(round_id, RoundId) for round_id in decoded.rounds)
        assert all(isinstance(one, Process) for status in decoded.rounds.values() for one in status.attempt.members)


@given(states())
def test_states_come_back(state: FragmentState) -> None:
    header, body = encode_state(state)
    decoded = decode_bulk(header, bytearray(body.numpy().tobytes()))
    assert isinstance(decoded, FragmentState)
    assert (decoded.fragment, decoded.applied, decoded.counts) == (state.fragment, state.applied, state.counts)
    assert list(decoded.vectors) == list(state.vectors)
    assert all(same(vector, decoded.vectors[name]) for name, vector in state.vectors.items())


def test_a_state_is_no_part_of_the_message_it_came_in() -> None:
    header, body = encode_state(FragmentState(0, 5, {}, {"anchor": torch.ones(3)}))
    data = bytearray(body.numpy().tobytes())
    decoded = decode_bulk(header, data)
    assert isinstance(decoded, FragmentState)
    data[:] = bytes(len(data))
    assert torch.equal(decoded.vectors["anchor"], torch.ones(3))


@given(views)
def test_views_come_back(view: View) -> None:
    assert decode_view(encode_view(view)) == view


def test_a_view_without_an_end_is_not_over() -> None:
    assert not decode_view(b'{"number": 1, "members": [], "following": [], "late": []}').over


def test_a_result_of_many_parts_fits_its_header() -> None:
    """As of a round between 16 members, each of which reduces 64 parts."""
    there = tuple(Member(worker, 1 / 3, 1 << 40, (1 << 64) - 1 - worker, Size(1 / 3, 1 / 7)) for worker in range(16))
    inner = torch.zeros(16, 16, dtype=torch.float64)
    means = tuple(PartMean(there, (), torch.zeros(4, dtype=torch.uint8), inner) for _ in range(16 * MOST_PARTS_EACH))
    attempt = Attempt(1 << 40, tuple(Process(worker, (1 << 62) - worker) for worker in range(16)))
    header, body = encode_round(Result(RoundId(1 << 40, 100), attempt, means), 1 << 40)
    assert len(header) < HEADER_BYTES
    decoded = decode_bulk(header, bytearray(body.numpy().tobytes()))
    assert isinstance(decoded, tuple) and isinstance(decoded[0], Result) and len(decoded[0].means) == 16 * 64


def test_a_result_of_other_members_in_each_part_is_not_passed_on() -> None:
    other = PartMean((), (), None, torch.zeros(0, 0, dtype=torch.float64))
    with pytest.raises(ValueError, match="step 12, fragment 3: its reducers counted different members"):
        encode_round(Result(ROUND, Attempt(1, (Process(3, 4),)), (MEAN, other)), 2)


# ---------------------------------------------------------------------- what is no message


def refused(decode: Callable[..., object], *arguments: object) -> str:
    """Check that a message is refused with one short line, and return that."""
    with pytest.raises(ValueError, match=r".") as caught:
        decode(*arguments)
    line = str(caught.value)
    assert type(caught.value) is ValueError
    assert 0 < len(line) < 400 and line.isprintable(), line
    return line


def greeting() -> Greeting:
    return Greeting(terms={"period": "5"}, start={"steps": "0"}, steps=3, weight=1.5)


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_bytes_are_no_message(data: bytes, body: bytes) -> None:
    for decode in (decode_control, decode_view, Greeting.parse, lambda header: decode_bulk(header, bytearray(body))):
        refused(decode, data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(json_values, st.sampled_from(["whole", "part", "mean", "result", "state", "progress", "told", "ask", "?"]))
def test_other_json_is_no_message(value: Any, kind: str) -> None:
    for thing in (value, {"kind": kind, **value} if isinstance(value, dict) else [kind, value]):
        data = json.dumps(thing).encode()
        for decode in (decode_control, decode_view, Greeting.parse, lambda header: decode_bulk(header, bytearray())):
            refused(decode, data)


@given(rounds | states(), st.data())
def test_a_body_of_another_length_is_refused_or_of_a_contribution(
    message: RoundMessage | FragmentState, data: st.DataObject
) -> None:
    """A contribution's length is known where its round is: the round table compares it."""
    header, body = encode_state(message) if isinstance(message, FragmentState) else encode_round(message, 3)
    length = data.draw(st.integers(0, body.numel() + 20).filter(lambda n: n != body.numel()))
    other = bytearray((body.numpy().tobytes() + bytes(20))[:length])
    if isinstance(message, Whole | Part) and message.payload is not None:
        decoded = decode_bulk(header, other)
        assert isinstance(decoded, tuple) and isinstance(decoded[0], Whole | Part)
        assert decoded[0].payload.payload.numel() == length
    else:
        assert str(length) in refused(decode_bulk, header, other)


MEMBER = Member(3, 1.5, 7, 9, Size(2.0, 3.0))
ROUND = RoundId(12, 3)
MEAN = PartMean((MEMBER,), (), tensor(b"12345678"), torch.ones(1, 1, dtype=torch.float64))
KNOWN: dict[str, tuple[bytes, torch.Tensor]] = {
    "whole": encode_round(Whole(ROUND, Process(3, 4), Contribution(MEMBER, tensor(b"abc"))), 2),
    "part": encode_round(Part(ROUND, 1, 0, Contribution(MEMBER, tensor(b"abc"))), 2),
    "mean": encode_round(Mean(ROUND, 1, 0, MEAN), 2),
    "result": encode_round(Result(ROUND, Attempt(1, (Process(3, 4),)), (MEAN, MEAN)), 2),
    "state": encode_state(FragmentState(1, 5, {"version": 3}, {"anchor": torch.ones(2)})),
}
ERA = Era(1, 1, (Process(3, 4),), frozenset({Process(3, 4)}), frozenset({1, 3}))
STATUS = RoundStatus(Attempt(1, (Process(3, 4),)), frozenset({Process(3, 4)}), True)


def test_words_of_a_flush_name_the_eras_of_an_adopted_view() -> None:
    assert decode_control(encode_control(Told(1, 0, 0, None, 0, (), {}), 0))[0] == Told(1, 0, 0, None, 0, (), {})
    for told in (Told(2, 1, 5, 4, 3, (), {}), Told(1, 0, 5, 4, 3, (), {ROUND: STATUS})):
        assert "without any era" in refused(decode_control, encode_control(told, 2))


CONTROL = {
    "progress": encode_control(Progress(3), 2),
    "ask": encode_control(Ask((1, 2), 5), 2),
    "told": encode_control(Told(2, 1, 5, 4, 3, (ERA,), {ROUND: STATUS}), 2),
    "view": encode_view(View(2, {0: 5}, frozenset({0}), {0: 7})),
    "greeting": greeting().encode(),
}


def decode_again(kind: str, header: bytes) -> object:
    if kind in KNOWN:
        return decode_bulk(header, bytearray(KNOWN[kind][1].numpy().tobytes()))
    return {"view": decode_view, "greeting": Greeting.parse}.get(kind, decode_control)(header)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value that holds another one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*at, key), *places(inner, (*at, key)))]


def put(value: Any, place: tuple[Any, ...], new: Any) -> str:
    copy = json.loads(json.dumps(value))
    inside = copy
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = new
    return json.dumps(copy)


HEADERS = {kind: json.loads(header) for kind, (header, _) in KNOWN.items()} | {
    kind: json.loads(header) for kind, header in CONTROL.items()
}


@pytest.mark.parametrize("kind", HEADERS)
def test_the_header_itself_is_read(kind: str) -> None:
    assert decode_again(kind, json.dumps(HEADERS[kind]).encode()) is not None


BAD = ["NaN", "Infinity", str(1 << 64), "9" * 5000, str(-1 << 64), '{"a\\nb": 1}', "[[]]"]
"""As JSON."""


@pytest.mark.parametrize("kind", HEADERS)
def test_no_place_takes_what_cannot_be(kind: str) -> None:
    for place in places(HEADERS[kind]):
        for bad in BAD:
            if (place[-1] in ("norm", "usual") and bad == str(1 << 64)) or (place == ("counts",) and "{" in bad):
                continue  # a delta may be large, and counts have any names
            data = put(HEADERS[kind], place, "@").replace('"@"', bad).encode()
            refused(decode_again, kind, data)


@pytest.mark.parametrize("kind", HEADERS)
def test_negative_numbers_and_further_keys_are_refused(kind: str) -> None:
    refused(decode_again, kind, put(HEADERS[kind], ("more\nof it",), 1).encode())
    for place in places(HEADERS[kind]):
        here = HEADERS[kind]
        for key in place:
            here = here[key]
        if type(here) in (int, float) and "counts" not in place:
            data = put(HEADERS[kind], place, -2).encode()
            refused(decode_again, kind, data)
        if isinstance(here, dict):
            data = put(HEADERS[kind], (*place, "more\nof\nit"), []).encode()
            refused(decode_again, kind, data)


@pytest.mark.parametrize("kind", HEADERS)
def test_nothing_may_be_left_out(kind: str) -> None:
    optional = {"over", "steps"}
    for key in HEADERS[kind].keys() - optional:
        less = {name: value for name, value in HEADERS[kind].items() if name != key}
        refused(decode_again, kind, json.dumps(less).encode())


def test_a_vector_has_a_known_type_and_its_own_name() -> None:
    state = HEADERS["state"]
    assert "float16" in refused(decode_again, "state", put(state, ("vectors", 0, 1), "float16").encode())
    twice = {**state, "vectors": [["a", "float32", 1], ["a", "float32", 1]]}
    refused(decode_again, "state", json.dumps(twice).encode())


def test_a_mean_without_members_or_bytes_is_none() -> None:
    """Members without a mean, and a mean without members, contradict themselves."""
    refused(decode_again, "mean", put(HEADERS["mean"], ("mean", "members"), []).encode())
    no_length = put(HEADERS["mean"], ("mean", "length"), None)
    refused(decode_bulk, no_length.encode(), bytearray())


def test_what_a_header_claims_takes_no_memory() -> None:
    claims = [
        put(HEADERS["mean"], ("mean", "length"), 1 << 40),
        put(HEADERS["state"], ("vectors", 0, 2), 1 << 40),
        json.dumps({**HEADERS["state"], "vectors": [["a", "float32", 1 << 62]] * 100}),
        put(HEADERS["mean"], ("mean", "members"), HEADERS["mean"]["mean"]["members"] * 1000),
    ]
    tracemalloc.start()
    try:
        for claim in claims:
            refused(decode_bulk, claim.encode(), bytearray(b"0123456789abcdef"))
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------- greetings


@given(
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
    st.integers(0, 1 << 60),
    st.floats(0, 1e18, exclude_min=True),
)
def test_greetings_come_back(terms: dict[str, str], start: dict[str, str], made: int, weight: float) -> None:
    mine = Greeting(terms=terms, start=start, steps=made, weight=weight)
    assert Greeting.parse(mine.encode()) == mine


@pytest.mark.parametrize("weight", [0, -1, 1e19, float("inf"), float("nan"), "heavy"])
def test_a_greeting_needs_a_weight(weight: Any) -> None:
    data = json.dumps({**json.loads(greeting().encode()), "weight": weight}).encode()
    refused(Greeting.parse, data)


def test_a_greeting_is_bounded() -> None:
    for terms in ({"a": "b" * 10_001}, {str(n): "" for n in range(10_001)}):
        refused(Greeting.parse, greeting().model_copy(update={"terms": terms}).encode())
