"""The Triton kernels against the plain torch they are twins of, on a GPU, or on the CPU by Triton's interpreter."""

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from atoll import Delayed, DiLoCo, Eager, Lockstep, OuterLoop, Streaming, Sync, local
from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.core.flat import PIECE, fingerprint, joined_sums, words_of
from atoll.core.fragments import Balanced
from atoll.core.outer_step import SGD, Momentum, Nesterov, OuterOptimizer, blend, weighted_mean
from atoll.errors import NonFiniteError
from atoll.kernels import codec as coding
from atoll.kernels import outer as stepping
from atoll.kernels.cross_entropy import cross_entropy_
from atoll.kernels.fingerprint import sums_of_pieces
from atoll.kernels.live import Live, live
from atoll.kernels.products import inner_products
from atoll.link.base import Member, Round, RoundId
from atoll.outer.stats import Applied, Products, mean_square
from atoll.train.model.head import loss_of_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDED = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cuts off what a GPU rounds to bf16")
FORMATS = [pytest.param(name, marks=ROUNDED) if name == "bf16" else name for name in coding.FORMATS]
DECODED = [*FORMATS, "lloyd4"]  # in which means travel; these are encoded by plain torch
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = ["fp32", pytest.param("bf16", marks=ROUNDED)]
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)  # parameters, in stretches of 16 values
SCALES = st.sampled_from([1e-42, 1e-38, 1e-7, 1e-3, 1.0, 1e5, 1e38])
# NumPy, which interprets kernels, warns of casts that a GPU just makes.
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")]


def drawn(sizes: Sequence[int], seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters of 16 * sizes values, a few of them zero or tiny, so that no format sees only ordinary ones."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for size in sizes:
        values = torch.randn(16 * size, generator=generator) * scale
        values[torch.rand(values.shape, generator=generator) < 0.1] = 0
        tensors.append((values * 2.0 ** -torch.randint(0, 12, values.shape, generator=generator)).to(DEVICE, dtype))
    return tensors


def tabled(tensors: Sequence[Tensor]) -> Live:
    table = live(tensors)
    assert table is not None
    return table


def codec_units(codec: Codec, numel: int) -> int:
    return 0 if codec.format in ("fp32", "bf16") else -(-numel // BLOCK)


def encoded(codec: Codec, start: Tensor, local: Live) -> tuple[Tensor, int]:
    """The payload and its worst bits, the same in any memory, with nothing written beside it."""
    size, worst = codec.payload_bytes(start.numel()), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    payloads, units = [], codec_units(codec, start.numel())
    for lead in (16, 20, 16 + -units % 16):  # bytes; the last as `room` has it
        memory = torch.full((lead + size + 16,), 77, dtype=torch.uint8, device=DEVICE)
        coding.encode(codec, start, local, memory[lead : lead + size], worst)
        assert (memory[:lead] == 77).all() and (memory[lead + size :] == 77).all()
        payloads.append(memory[lead : lead + size].clone())
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)
    return payloads[0], int(worst)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("codec_name", FORMATS)
@settings(max_examples=8)
@given(sizes=SIZES, seed=st.integers(0, 99), scale=SCALES)
def test_a_delta_is_encoded_as_if_it_had_been_written_down(
    codec_name: str, name: str, sizes: list[int], seed: int, scale: float
) -> None:
    codec, dtype = Codec(codec_name), DTYPES[name]
    local = drawn(sizes, seed, scale, dtype)
    start = torch.cat([t.float() for t in drawn(sizes, seed + 100, scale)])
    delta = start.to(dtype).float() - torch.cat(local).float()
    payload, worst = encoded(codec, start, tabled(local))
    try:
        expected = codec.encode(delta)
    except NonFiniteError:
        assert coding.is_bad(codec, worst)
        return
    assert not coding.is_bad(codec, worst)
    assert torch.equal(payload, expected)


@pytest.mark.parametrize("codec_name", DECODED)
@settings(max_examples=6)
@given(numel=st.integers(1, 3 * 4096), seed=st.integers(0, 99))
def test_a_vector_of_any_length_is_decoded(codec_name: str, numel: int, seed: int) -> None:
    codec = Codec(codec_name)
    vector = torch.cat(drawn([-(-numel // 16)], seed))[:numel].contiguous()
    payload = codec.encode(vector)
    decoded = torch.full((numel,), math.nan, device=DEVICE)
    coding.decode_mean(codec, payload[None], [3.0], numel, slice(0, numel), decoded)
    assert torch.equal(decoded.view(torch.int32), codec.decode(payload, numel).view(torch.int32))


@pytest.mark.parametrize("codec_name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_cannot_be_sent_is_noticed(codec_name: str, bad: float) -> None:
    codec = Codec(codec_name)
    for place in (0, 4095, 4200):
        vector = torch.cat(drawn([270], 5))
        vector[place] = bad
        payload, worst = encoded(codec, vector, tabled([torch.zeros_like(vector)]))
        in_range = math.isfinite(bad) and codec_name in ("fp32", "bf16")
        assert coding.is_bad(codec, worst) != in_range
        there = codec.largest(payload, vector.numel())
        assert there.start <= place < there.stop <= min(there.start + BLOCK, vector.numel())


@pytest.mark.parametrize("codec_name", DECODED)
@settings(max_examples=6)
@given(
    blocks=st.integers(1, 70),
    rest=st.integers(0, 127),
    weights=st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    cut=st.integers(0, 40),
)
def test_payloads_are_decoded_into_their_mean(
    codec_name: str, blocks: int, rest: int, weights: list[float], seed: int, cut: int
) -> None:
    codec, numel = Codec(codec_name), blocks * BLOCK + rest
    vectors = [torch.cat(drawn([-(-numel // 16)], seed + k))[:numel] for k in range(len(weights))]
    payloads = torch.stack([codec.encode(vector) for vector in vectors])
    expected = weighted_mean([codec.decode(payload, numel) for payload in payloads], weights)
    placed = coding.room(codec, numel, len(weights), payloads.device)
    placed.copy_(payloads)
    edge = min(cut, blocks) * BLOCK
    for piece in (slice(0, edge), slice(edge, numel)):
        if piece.stop == piece.start:
            continue
        for memory in (payloads, placed):
            mean = torch.full((piece.stop - piece.start,), math.nan, device=DEVICE)
            coding.decode_mean(codec, memory, weights, numel, piece, mean)
            assert torch.equal(mean.view(torch.int32), expected[piece].view(torch.int32))


@pytest.mark.parametrize("codec_name", FORMATS)
@given(numel=st.integers(1, 10_000), members=st.integers(1, 4))
def test_codes_begin_where_they_can_be_read_fast(codec_name: str, numel: int, members: int) -> None:
    codec = Codec(codec_name)
    room = coding.room(codec, numel, members, torch.device(DEVICE))
    assert room.shape == (members, codec.payload_bytes(numel))
    assert all((row.data_ptr() + codec_units(codec, numel)) % 16 == 0 for row in room)


@pytest.mark.parametrize("codec_name", DECODED)
@settings(max_examples=6)
@given(
    numel=st.integers(1, 5000), weights=st.lists(st.floats(0.1, 1e6), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_inner_products_are_those_of_what_was_decoded(
    codec_name: str, numel: int, weights: list[float], seed: int
) -> None:
    codec = Codec(codec_name)
    vectors = [torch.cat(drawn([-(-numel // 16)], seed + k))[:numel] for k in range(len(weights))]
    payloads = torch.stack([codec.encode(vector) for vector in vectors])
    decoded = [codec.decode(payload, numel) for payload in payloads]
    rows = torch.stack(decoded).double()
    found = inner_products(codec, payloads, numel)
    torch.testing.assert_close(found, rows @ rows.T, rtol=1e-12, atol=1e-12 * float(rows.square().sum()))
    assert inner_products(codec, payloads[:0], numel).shape == (0, 0)
    plain, known = Products(), Products()
    plain.add(decoded, weighted_mean(decoded, weights))
    known.add_known(found, mean_square(found, weights))
    done = Round(RoundId(1, 0), tuple(Member(k, w, 0, 0) for k, w in enumerate(weights)), tuple(payloads))
    ours, theirs = known.applied(done, 1), plain.applied(done, 1)
    assert ours.norm == pytest.approx(theirs.norm, rel=1e-6, abs=1e-6 * float(rows.norm()))  # members may cancel
    assert ours.cosine == pytest.approx(theirs.cosine, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("codec_name", "members", "numel"),
    [("e3m0", 3, 16384 + 300), ("lloyd2", 8, 300), ("int8", 9, 300), ("fp32", 21, 300)],
)
def test_inner_products_of_many_members_and_values(codec_name: str, members: int, numel: int) -> None:
    """More values than one program works on, as many members as one takes at once, and more."""
    codec = Codec(codec_name)
    payloads = torch.stack([codec.encode(torch.cat(drawn([-(-numel // 16)], k))[:numel]) for k in range(members)])
    rows = torch.stack([codec.decode(payload, numel) for payload in payloads]).double()
    lengths = rows.norm(dim=1)
    found = inner_products(codec, payloads, numel)
    assert ((found - rows @ rows.T).abs() <= 1e-12 * lengths.outer(lengths)).all()
    assert torch.equal(found, inner_products(codec, payloads, numel))


def test_the_mean_of_members_that_cancel_has_no_negative_square() -> None:
    codec, squares = Codec("int8"), []
    for seed in range(8):
        numbers = torch.randint(-14, 15, (100,), generator=torch.Generator().manual_seed(seed)).float()
        payloads = torch.stack([codec.encode(9 * numbers), codec.encode(-numbers)]).to(DEVICE)
        squares.append(mean_square(inner_products(codec, payloads, 100), [1.0, 9.0]).item())
    assert min(squares) >= 0 and max(squares) < 1e-9, squares


def test_a_target_beyond_the_vocabulary_has_no_loss() -> None:
    logits, losses = torch.randn(4, 16, device=DEVICE), torch.empty(2, 4, device=DEVICE)
    targets = torch.tensor([0, -1, 15, 16], device=DEVICE)
    cross_entropy_(logits, targets, losses[0], losses[1], scale=1.0, z_loss=0.0, gradients=True)
    assert losses[0].isfinite().tolist() == [True, False, True, False]
    assert logits.isfinite().all(1).tolist() == [True, False, True, False]  # so that the gradient tells too


OUTERS: list[OuterOptimizer] = [SGD(0.7), Momentum(0.3, 0.8), Nesterov(0.4, 0.9)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: type(outer).__name__)
@settings(max_examples=6)
@given(sizes=SIZES, seed=st.integers(0, 99), alpha=st.sampled_from([None, 0.0, 0.5, 0.3]), cut=st.integers(0, 5))
def test_an_outer_step_and_its_blend_are_one_pass(
    outer: OuterOptimizer, name: str, sizes: list[int], seed: int, alpha: float | None, cut: int
) -> None:
    local = drawn(sizes, seed, 1.0, DTYPES[name])
    anchor, velocity, mean = (torch.cat(drawn(sizes, seed + k)) for k in (1, 2, 3))
    slots = (velocity,) if outer.slot_names else ()
    wanted_anchor, wanted_slots = outer.step(anchor.clone(), tuple(s.clone() for s in slots), mean.clone(), 1)
    before = torch.cat(local)
    wanted = before
    if alpha is not None:
        wanted = (blend(before.float(), wanted_anchor, alpha) if alpha else wanted_anchor).to(before.dtype)
    table = tabled(local) if alpha is not None else None
    edge = min(cut * BLOCK, mean.numel())
    for piece in (slice(0, edge), slice(edge, mean.numel())):
        if piece.stop > piece.start:
            stepping.outer_merge(
                outer, anchor, velocity if slots else None, mean[piece].clone(), piece, table, alpha or 0.0
            )
    assert torch.equal(anchor, wanted_anchor)
    assert not slots or torch.equal(velocity, wanted_slots[0])
    assert torch.equal(torch.cat(local), wanted)


@settings(max_examples=6)
@given(numel=st.one_of(st.integers(1, 9000), st.integers(2 * PIECE - 3, 2 * PIECE + 9)), seed=st.integers(0, 9))
def test_a_fingerprint_is_the_same_by_kernel(numel: int, seed: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    assert joined_sums(sums_of_pieces(words_of(vector), PIECE).tolist()) == fingerprint(vector)


def test_parameters_that_do_not_fall_into_stretches_have_no_table() -> None:
    good = torch.zeros(64, 32, device=DEVICE)
    assert tabled([good]).grain == 128
    assert tabled([good, torch.zeros(48, device=DEVICE)]).grain == 16
    for bad in (
        torch.zeros(40, device=DEVICE),  # 40 is no multiple of 16
        torch.zeros(32, 64, device=DEVICE).T,
        torch.zeros(129, device=DEVICE)[1:],
        torch.zeros(64, device=DEVICE, dtype=torch.bfloat16),
        torch.zeros(64, device=DEVICE, dtype=torch.float64),
    ):
        assert live([good, bad]) is None
    table = tabled([good])
    assert table.is_of([good]) and not table.is_of([good.clone()])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vocabulary", [7, 257, 5000])
def test_cross_entropy_and_its_gradient_are_those_of_autograd(vocabulary: int, name: str) -> None:
    dtype = DTYPES[name]
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(5, vocabulary, generator=generator) * 4).to(DEVICE, dtype)
    targets = torch.randint(0, vocabulary, (5,), generator=generator).to(DEVICE)
    exact = logits.double().requires_grad_()
    total, cross_entropy = loss_of_logits(exact[None], targets[None], 0.01)
    total.backward()
    assert exact.grad is not None
    losses = torch.empty(2, 5, device=DEVICE)
    cross_entropy_(logits, targets, losses[0], losses[1], scale=0.2, z_loss=0.01, gradients=True)
    assert losses[0].double().mean().item() == pytest.approx(cross_entropy.item(), rel=1e-5)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(logits.double(), exact.grad, rtol=rounding, atol=1e-6)


LOOPS = [
    (Streaming(period=2, fragments=Balanced(count=2), delay=1), 4),  # four workers: in two shots
    (DiLoCo(period=2, codec="int8"), 2),
    (Eager(period=2), 2),
    (Delayed(period=2, codec="fp32"), 2),
    (DiLoCo(period=2, codec=Codec("top64", feedback=0.9), outer=SGD(1.0)), 2),
    (Streaming(period=2, fragments=Balanced(count=2), delay=1, codec=Codec("top64", feedback=0.9)), 4),
]
LOOP_NAMES = ["streaming", "diloco", "eager", "delayed", "top64", "top64 in two shots"]


@pytest.mark.skipif(DEVICE == "cuda", reason="test_cuda.py has the same on a GPU")
@pytest.mark.parametrize(
    ("sync", "workers"), LOOPS, ids=["streaming", "diloco", "eager", "delayed", "top64", "top64 in two shots"]
)
def test_a_loop_by_kernels_is_the_plain_one(sync: Sync, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, told = walked(sync, workers)
    monkeypatch.setattr("atoll.kernels.usable", lambda device: True)
    by_kernels, seen = walked(sync, workers)
    assert all(torch.equal(a, b) for a, b in zip(plain, by_kernels, strict=True))
    assert len(seen) == len(told) > 0
    for one, other in zip(seen, told, strict=True):
        assert one.norm == pytest.approx(other.norm, rel=1e-6)
        assert one.cosine == pytest.approx(other.cosine, abs=1e-6)
        assert len(one.sums) == len(other.sums)


def walked(sync: Sync, workers: int) -> tuple[list[Tensor], list[Applied]]:
    """The parameters of all workers after 5 steps, and what was told of their rounds."""
    seen: list[Applied] = []
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    loops = [OuterLoop(copy.deepcopy(start), sync, end, observer=seen.append) for end in local(workers)]
    crew = Lockstep(loops)
    for step in range(5):
        for loop in loops:
            for p in loop.model.parameters():
                p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + loop.link.worker))
        crew.step()
    crew.finish()
    return [p.detach() for loop in loops for p in loop.model.parameters()], seen


@pytest.mark.processes
def test_compiled_kernels_read_and_write_memory_in_wide_words() -> None:
    """Lost alignment, or a mask, parts an access into bytes: of which the interpreter knows nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    driver = Path(__file__).parents[1] / "compiled.py"
    found = json.loads(subprocess.run([sys.executable, driver], env=environment, stdout=PIPE, check=True).stdout)
    assert len(found) == 51
    for kernel, accesses in found.items():
        narrow = sum(count for kind, count in accesses.items() if kind.endswith((".b8", ".b16")))
        match kernel.split()[:2]:
            case ["encode" | "decode" | "products", "fp32" | "bf16"] | ["outer", _] | ["fingerprint"]:
                assert narrow == 0, (kernel, accesses)
            case ["top64", kind]:  # places are scattered: only values that lie side by side are wide
                wide = {"encode": {"ld.global.v4.b32": 8}, "decode": {"st.global.v4.b32": 16}, "products": {}}[kind]
                assert accesses | wide == accesses, (kernel, accesses)
            case ["encode", "lloyd2"]:
                assert narrow == 2, (kernel, accesses)  # units, and codes: 2 bytes of 8 values a thread
            case ["decode" | "products" as kind, "lloyd2"]:
                units = {"decode": 2, "products": 4}[kind]  # in two layouts
                assert narrow == units + 2 + 4, (kernel, accesses)  # 2 bytes of codes, single ones of the last tile
            case ["encode", _]:
                assert narrow == 1, (kernel, accesses)  # units
            case ["decode" | "products", "int8"]:
                assert narrow == 2, (kernel, accesses)  # units of two members
            case ["decode" | "products", _]:
                assert narrow == 2 + 8, (kernel, accesses)  # and codes where the last tile is not whole
            case _:
                assert narrow == 1, (kernel, accesses)  # the target's logit
