"""Encodes a worker's state as JSON with its tensors beside it, and decodes it.

JSON holds None, bool, str, list, 64-bit ints and finite floats as they are. Every other value is an object of one key
that names its type: dict (as pairs, to keep int keys), tuple, tensor, bytes, int, float.
"""

import math
import struct
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll._util.disk import DEEPEST
from atoll.errors import CheckpointError

_DTYPE_NAMES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 bfloat16 float16 float32 float64 complex64
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
"""
_DTYPES = frozenset(getattr(torch, name) for name in _DTYPE_NAMES.split())


def encode(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Encode `value` as JSON; its tensors and bytes go to `tensors`, and their names there into the JSON."""
    if depth > DEEPEST:
        raise CheckpointError(f"{path} is nested more than {DEEPEST} levels deep: does it contain itself?")
    kind = type(value)  # exact types: an IntEnum or a named tuple would come back as something else
    if value is None or kind is bool:
        return value
    if kind is str and value == value.encode(errors="replace").decode():  # lone surrogates fit no file
        return value
    if kind is int:  # JSON readers differ past 64 bits, and Python refuses decimals of thousands of digits
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": _store(torch.from_numpy(np.frombuffer(bytearray(value), np.uint8)), path, tensors)}
    if isinstance(value, Tensor):
        return {"tensor": _store(value, path, tensors)}
    if kind is list or kind is tuple:
        items = [encode(item, f"{path}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [_encode_pair(key, item, path, tensors, depth + 1) for key, item in value.items()]}
    holds = "dict, list, tuple, None, bool, int, float, str (valid Unicode), bytes and torch.Tensor"
    raise CheckpointError(f"{path} is a {kind.__qualname__}; a checkpoint holds {holds}: convert it first")


def _encode_pair(key: Any, item: Any, path: str, tensors: dict[str, Tensor], depth: int) -> list[Any]:
    """Encode one entry of a dict as [key, value]."""
    where = f"a key of {path or 'the state'}"
    if type(key) is str:
        below = f"{path}.{key}" if path else key
    elif type(key) is int and -(2**63) <= key < 2**63:
        below = f"{path}[{key}]"
    else:
        raise CheckpointError(f"{where} is a {type(key).__qualname__}; keys must be str or 64-bit int")
    return [encode(key, where, tensors, depth), encode(item, below, tensors, depth)]


def _store(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Store `tensor`, dense and on the CPU, under its path if that is free; return its name."""
    dense = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not dense or tensor.is_meta or tensor.dtype not in _DTYPES:
        what = f"a {type(tensor).__qualname__} ({tensor.dtype}, {tensor.layout}, on {tensor.device})"
        raise CheckpointError(f"{path} is {what}; safetensors holds plain dense tensors: convert it first")
    name = path
    while name in tensors or name == "__metadata__":  # "a.b" may be one key or two; the other is reserved
        name += "'"
    tensors[name] = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return name


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` without shared memory, as safetensors needs them; only shared ones are copied."""
    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        owned[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return owned


def decode(node: Any, tensors: MutableMapping[str, Tensor], depth: int = 0) -> Any:
    """Decode what `encode` made; each tensor is taken out of `tensors`."""
    if depth > DEEPEST:
        raise ValueError(f"the tree is nested more than {DEEPEST} levels deep")
    if isinstance(node, list):
        return [decode(item, tensors, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, body),) = node.items()
    match kind:
        case "dict":
            pairs = [(decode(key, tensors, depth + 1), decode(item, tensors, depth + 1)) for key, item in body]
            return dict(pairs)
        case "tuple":
            return tuple(decode(item, tensors, depth + 1) for item in body)
        case "tensor":
            return tensors.pop(body)
        case "bytes":
            return tensors.pop(body).numpy().tobytes()
        case "int":
            return int(body, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
    raise ValueError(f"the tree holds a {kind!r}, which version 1 does not know")
