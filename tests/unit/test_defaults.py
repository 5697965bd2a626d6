"""The library computes the same bits whatever torch's default dtype and default device are."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core import block_formats
from atoll.core.codec import Codec
from atoll.core.flat import fingerprint
from atoll.core.fragments import Whole

DEFAULTS = [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float16, "cpu"), (torch.float32, "meta")]
CODECS = [
    Codec(name, stochastic=stochastic)
    for name in ("fp64", "fp32", "bf16", "fp16", "int8", "int4", "e3m0", "e2m1", "lloyd4")
    for stochastic in (False, True)
    if not stochastic or name not in ("fp64", "fp32", "bf16", "fp16")
] + [Codec("lloyd2"), Codec("top64", feedback=0.9)]


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Set torch's defaults, and forget the tables that were made under others."""
    before = torch.get_default_dtype()
    for table in (block_formats._levels_of_bytes, block_formats._lloyd_tables):
        table.cache_clear()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
        for table in (block_formats._levels_of_bytes, block_formats._lloyd_tables):
            table.cache_clear()


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_payloads_and_what_is_behind_them_do_not_depend_on_defaults(
    codec: Codec, dtype: torch.dtype, device: str
) -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(vector, seed=3)
    decoded, checksum = codec.decode(payload, 1000), fingerprint(vector)
    with defaults(dtype, device):
        again = codec.encode(vector, seed=3)
        assert torch.equal(again, payload)
        assert torch.equal(codec.decode(again, 1000), decoded)
        assert fingerprint(vector) == checksum


def trained(sync: object, workers: int) -> list[Tensor]:
    """Final parameters of a model of 20 x 20 after 8 steps of +0.01 by every worker."""
    start = nn.Linear(20, 20, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        start.weight.copy_(torch.linspace(-1, 1, 400, dtype=torch.float32, device="cpu").view(20, 20))
        start.bias.zero_()
    models = [copy.deepcopy(start) for _ in range(workers)]
    seen: list[float] = []
    loops = [
        atoll.OuterLoop(model, sync, link, observer=lambda round_: seen.append(round_.norm))  # type: ignore[arg-type]
        for model, link in zip(models, atoll.local(workers), strict=True)
    ]
    crew = atoll.Lockstep(loops)
    for _ in range(8):
        for number, model in enumerate(models):
            with torch.no_grad():
                model.weight.add_(0.01 * (number + 1))
        crew.step()
    crew.finish()
    assert seen
    return [model.weight.detach() for model in models]


@pytest.mark.thorough_after(6)
@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    "sync",
    [
        atoll.Streaming(period=2, fragments=Whole(), delay=1),
        atoll.Eager(period=2, codec=Codec("e3m0", stochastic=True, feedback=True)),
        atoll.DiLoCo(period=2),
    ],
    ids=["streaming", "eager", "diloco"],
)
def test_training_does_not_depend_on_defaults(sync: object, workers: int, dtype: torch.dtype, device: str) -> None:
    expected = trained(sync, workers)
    with defaults(dtype, device):
        got = trained(sync, workers)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
