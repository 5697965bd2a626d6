"""Parameters <-> one vector."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atoll.core.flat import PIECE, Window, check_coverage, fingerprint, state_dtype, trainable
from atoll.errors import ConfigError


def mixed() -> nn.Module:
    """Parameters of several dtypes, one of them not contiguous."""
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(3, 4).t())
    model.b = nn.Parameter(torch.randn(5).bfloat16())
    model.c = nn.Parameter(torch.randn(2, 2).half())
    model.d = nn.Parameter(torch.tensor(1.5))
    return model


def test_read_and_write_are_inverse_to_the_bit() -> None:
    model = mixed()
    window = Window(model, ["c", "a", "b", "d"], torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    vector = window.read()
    assert vector.shape == (12 + 5 + 4 + 1,)
    assert torch.equal(vector[4:16], before[0].flatten())
    for p in model.parameters():
        nn.init.zeros_(p)
    window.write(vector)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_anchors_are_fp32_unless_the_parameters_are_fp64() -> None:
    assert state_dtype(trainable(mixed())) == torch.float32
    assert state_dtype({"a": torch.zeros(1).half(), "b": torch.zeros(1).double()}) == torch.float64


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="parameter 'b' is torch"):
        state_dtype({"a": torch.zeros(1), "b": torch.zeros(1, dtype=dtype)})


def test_what_a_parameter_cannot_hold_of_its_start_is_not_progress() -> None:
    model = mixed()
    window = Window(model, ["a", "b", "c", "d"], torch.float32)
    start = torch.randn(window.numel)
    window.write(start)
    assert not window.subtract_from(start.clone()).any()


def test_gradients() -> None:
    model = nn.Linear(2, 3)
    window = Window(model, ["weight", "bias"], torch.float32)
    model.bias.grad = torch.arange(3.0)
    assert window.read_gradients().tolist() == [0] * 6 + [0, 1, 2]
    window.write_gradients(torch.arange(9.0))
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert model.bias.grad.tolist() == [6, 7, 8]


def test_locate() -> None:
    window = Window(mixed(), ["a", "b"], torch.float32)
    assert [window.locate(i) for i in (0, 11, 12, 16)] == ["a", "a", "b", "b"]
    with pytest.raises(IndexError):
        window.locate(17)


def test_a_replaced_parameter_is_seen() -> None:
    model = nn.Linear(2, 2)
    window = Window(model, ["weight"], torch.float32)
    model.weight = nn.Parameter(torch.full((2, 2), 3.0))
    assert window.read().tolist() == [3.0] * 4


def test_frozen_removed_and_resized_parameters_are_named() -> None:
    model = nn.Linear(2, 2)
    window = Window(model, ["weight", "bias"], torch.float32)
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="parameter 'bias' was frozen or removed"):
        window.read()
    model.bias.requires_grad_(True)
    model.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ConfigError, match=r"'weight' has shape \(3, 2\) and had \(2, 2\)"):
        window.write(torch.zeros(6))


def test_a_parameter_in_no_window_is_named() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    windows = [Window(model, list(trainable(model)), torch.float32)]
    check_coverage(model, windows)
    model.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"parameter 'bias' \(1 in all\) is trained but in no fragment"):
        check_coverage(model, windows)


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 2049, 2 * PIECE, 4 * PIECE + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fingerprints_tell_vectors_apart(numel: int, dtype: torch.dtype) -> None:
    vector = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    assert fingerprint(vector) == fingerprint(vector.clone())
    for i in {0, numel // 2, numel - 1} if numel else ():
        other = vector.clone()
        other[i] = torch.nextafter(other[i], torch.tensor(torch.inf, dtype=dtype))
        assert fingerprint(other) != fingerprint(vector)
    if numel > 2:
        swapped, nudged = vector.clone(), vector.clone()
        swapped[0], swapped[-1] = vector[-1], vector[0]
        nudged[0] = torch.nextafter(vector[0], torch.tensor(torch.inf, dtype=dtype))
        nudged[-1] = torch.nextafter(vector[-1], torch.tensor(-torch.inf, dtype=dtype))
        assert len({fingerprint(v) for v in (vector, swapped, nudged)}) == 3


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_is_its_local_shard(one_process: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    window = Window(model, ["weight", "bias"], torch.float32)
    assert isinstance(model.weight, DTensor)
    vector = window.read()
    assert torch.equal(vector[:12], model.weight.to_local().flatten())
    window.write(vector * 2)
    assert torch.equal(model.weight.to_local().flatten(), vector[:12] * 2)
    window.write_gradients(vector)
    assert torch.equal(window.read_gradients(), vector)
    assert isinstance(model.weight.grad, DTensor)
