"""The Triton kernels of top64 against `core.top64`, on a GPU, or on the CPU by Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from atoll import DiLoCo, OuterLoop, local
from atoll.core.codec import Codec
from atoll.core.outer_step import weighted_mean
from atoll.core.top64 import CHUNK, Top64
from atoll.errors import NonFiniteError
from atoll.kernels import codec as coding
from atoll.kernels import top64

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP = Codec("top64", feedback=0.95)
LENGTHS = st.integers(1, 3 * CHUNK) | st.sampled_from([1, 63, 64, 65, 129, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
KINDS = st.sampled_from(["bell", "few", "alike", "wild", "zeros", "tiny"])
WEIGHTS = st.lists(st.floats(0.1, 1e6) | st.just(0.0), min_size=1, max_size=4).filter(any)
# NumPy, which interprets kernels, warns of casts that a GPU just makes.
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")]


def drawn(numel: int, seed: int, kind: str) -> Tensor:
    """A vector with zeros of both signs; and ties, few values, or magnitudes of any size, also below normal ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    match kind:
        case "few":
            values *= torch.rand(numel, generator=generator) < 0.004
        case "alike":
            values = values.sign() * torch.randint(0, 3, (numel,), generator=generator)
        case "wild":
            values *= torch.exp(9 * torch.randn(numel, generator=generator))
        case "zeros":
            values *= 0.0
        case "tiny":
            values *= 2.0 ** -torch.randint(120, 149, (1,), generator=generator).float()
    values[torch.rand(numel, generator=generator) < 0.1] *= 0
    return values.to(DEVICE)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def encoded(vector: Tensor) -> tuple[Tensor, int]:
    """The payload and its worst bits, with nothing written beside it."""
    size, worst = TOP.payload_bytes(vector.numel()), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    memory = torch.full((20 + size + 16,), 77, dtype=torch.uint8, device=DEVICE)
    top64.encode(vector, memory[20 : 20 + size], worst)
    assert (memory[:20] == 77).all() and (memory[20 + size :] == 77).all()
    return memory[20 : 20 + size], int(worst)


@settings(max_examples=60)
@given(numel=LENGTHS, seed=st.integers(0, 99), kind=KINDS)
def test_a_vector_is_encoded_as_by_plain_torch(numel: int, seed: int, kind: str) -> None:
    vector = drawn(numel, seed, kind)
    payload, worst = encoded(vector)
    assert torch.equal(payload, TOP.encode(vector))
    assert worst == int(vector.abs().max().view(torch.int32)) and not coding.is_bad(TOP, worst)


@pytest.mark.parametrize("ties", [1, 63, 64, 65, 4096])
def test_of_equal_magnitudes_the_first_are_kept(ties: int) -> None:
    vector = torch.linspace(0, 0.5, CHUNK, device=DEVICE)
    vector[torch.randperm(CHUNK, generator=torch.Generator().manual_seed(ties))[:ties]] = -1.0
    vector[7], vector[4000] = 2.0, -3.0
    assert torch.equal(encoded(vector)[0], TOP.encode(vector))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2e38])
def test_what_cannot_be_sent_is_noticed(bad: float) -> None:
    for place in (0, CHUNK - 1, CHUNK + 3):
        vector = drawn(CHUNK + 70, 5, "bell")
        vector[place] = bad
        payload, worst = encoded(vector)
        assert coding.is_bad(TOP, worst)
        there = TOP.largest(payload, vector.numel())
        assert there.start <= place < there.stop


def test_an_error_names_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.kernels.usable", lambda device: True)
    outer = OuterLoop(torch.nn.Linear(100, 50).to(DEVICE), DiLoCo(period=1, codec=TOP), local(1)[0])
    outer.model.get_parameter("bias").data[3] = math.nan
    with pytest.raises(NonFiniteError, match="parameter 'bias': a value is nan"):
        outer.step()


@settings(max_examples=30)
@given(numel=LENGTHS, weights=WEIGHTS, seed=st.integers(0, 99), kind=KINDS, cut=st.integers(0, 2))
def test_payloads_are_decoded_into_their_mean(numel: int, weights: list[float], seed: int, kind: str, cut: int) -> None:
    payloads = torch.stack([TOP.encode(drawn(numel, seed + k, kind)) for k in range(len(weights))])
    expected = weighted_mean([TOP.decode(payload, numel) for payload in payloads], weights)
    placed = coding.room(TOP, numel, len(weights), payloads.device)
    placed.copy_(payloads)
    edge = min(cut * CHUNK, numel)
    for piece in (slice(0, edge), slice(edge, numel)):
        if piece.stop == piece.start:
            continue
        for memory in (payloads, placed):
            size = piece.stop - piece.start
            mean = torch.full((size + 16,), math.nan, device=DEVICE)
            top64.decode_mean(memory, weights, numel, piece, mean[:size])
            assert same_bits(mean[:size], expected[piece]) and mean[size:].isnan().all()


@pytest.mark.parametrize("members", [1, 2, 3])
def test_the_sign_of_a_zero_is_that_of_the_sum(members: int) -> None:
    """A level may be zero, so -0 is decoded, which a mean keeps where all members have it, and nowhere else."""
    vectors = [torch.full((CHUNK,), 0.0, device=DEVICE) for _ in range(members)]
    for number, vector in enumerate(vectors):
        vector[0], vector[10:20], vector[20 + number], vector[40] = 1.0, -1e-9, -1e-9, -1e-9 * (-1) ** number
    payloads = torch.stack([TOP.encode(vector) for vector in vectors])
    expected = weighted_mean([TOP.decode(payload, CHUNK) for payload in payloads], [1.0] * members)
    assert expected[10:20].signbit().all() and expected[20:40].signbit().sum() == (members == 1)
    mean = torch.full((CHUNK,), math.nan, device=DEVICE)
    top64.decode_mean(payloads, [1.0] * members, CHUNK, slice(0, CHUNK), mean)
    assert same_bits(mean, expected)


@settings(max_examples=15)
@given(numel=LENGTHS | st.just(9 * CHUNK + 5), members=st.integers(1, 3), seed=st.integers(0, 99), kind=KINDS)
def test_inner_products_are_those_of_what_was_decoded(numel: int, members: int, seed: int, kind: str) -> None:
    vectors = [drawn(numel, seed, kind) + drawn(numel, seed + k, kind) for k in range(members)]  # some places in common
    payloads = torch.stack([TOP.encode(vector) for vector in vectors])
    rows = torch.stack([TOP.decode(payload, numel) for payload in payloads]).double()
    found = top64.inner_products(payloads, numel)
    torch.testing.assert_close(found, rows @ rows.T, rtol=1e-12, atol=1e-12 * float(rows.square().sum()))


def test_a_place_beyond_the_end_is_passed_over() -> None:
    """Payloads come from others."""
    numel = CHUNK + 100
    payload = TOP.encode(drawn(numel, 3, "bell"))
    _, low, high, _ = Top64().sections(payload, numel, slice(CHUNK, numel))
    low[-1], high[-1] = 200, 0
    mean = torch.full((CHUNK + 300,), math.nan, device=DEVICE)
    top64.decode_mean(payload[None], [1.0], numel, slice(0, numel), mean[:numel])
    assert same_bits(mean[:numel], TOP.decode(payload, numel)) and mean[numel:].isnan().all()
    square = TOP.decode(payload, numel).double().square().sum()
    torch.testing.assert_close(top64.inner_products(payload[None], numel).view(()), square, rtol=1e-12, atol=0)
