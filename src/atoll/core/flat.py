"""Reads and writes the parameters of a fragment as one flat vector: past this file there are no shapes or DTensors."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError

PIECE = 1 << 17
"""Values of a vector worked on at a time: their temporaries stay in a core's cache."""
LARGE_PIECE = 1 << 24
"""On a GPU, where the number of operations counts, and what they keep in memory."""
SAMPLED_PARAMETERS, SAMPLED_VALUES = 8, 4096
"""How many parameters, and of each about how many values (less than twice as many), a sample of a window has."""
CPU = torch.device("cpu")


def pieces(numel: int, device: torch.device = CPU) -> Iterator[slice]:
    """Cut a vector [numel] on a device into the ranges that are worked on one after the other."""
    size = PIECE if device.type == "cpu" else LARGE_PIECE
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, by name; tied ones once."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile and DDP put into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def state_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of anchors and of what is computed from them: fp32, or fp64 where parameters are fp64."""
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"parameter {name!r} is {parameter.dtype}; only fp64, fp32, bf16 and fp16 can be trained")
    return torch.float64 if torch.float64 in {p.dtype for p in parameters.values()} else torch.float32


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process: all of it, or the local shard of a DTensor."""
    to_local = getattr(tensor, "to_local", None)  # DTensor's own; to import its type takes the better part of a second
    part: Tensor = tensor if to_local is None else to_local()
    return part.detach()


def gather(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy the local parts of all tensors, end to end, into one new vector on the first one's device."""
    parts = [local_part(tensor) for tensor in tensors]
    vector = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=parts[0].device)
    for piece, part in zip(vector.split([part.numel() for part in parts]), parts, strict=True):
        piece.view(part.shape).copy_(part)
    return vector


def scatter(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write a vector into the tensors that `gather` reads, rounding to their dtypes."""
    parts = [local_part(tensor) for tensor in tensors]
    for piece, part in zip(vector.split([part.numel() for part in parts]), parts, strict=True):
        part.copy_(piece.view(part.shape))


class Window:
    """Shows some of a model's parameters as one vector [numel], in the order of `names`.

    The model is asked for its parameters on every use, so a parameter that was replaced is seen; one that was
    frozen, removed or reshaped is an error.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
        live = trainable(model)
        self.names = tuple(names)
        self.dtype = dtype
        self._model = model
        self._shapes = [local_part(live[name]).shape for name in self.names]
        self.in_parts = any(hasattr(live[name], "to_local") for name in self.names)  # DTensor's own
        """Whether other ranks hold the rest of these parameters."""
        self.device = local_part(live[self.names[0]]).device
        self.numel = sum(shape.numel() for shape in self._shapes)

    def parameters(self) -> list[nn.Parameter]:
        """Return the live parameters, in order; a ConfigError names one that was frozen, removed or reshaped."""
        live = trainable(self._model)
        for name, shape in zip(self.names, self._shapes, strict=True):
            if name not in live:
                raise ConfigError(
                    f"parameter {name!r} was frozen or removed after the outer loop was made: "
                    "make a new OuterLoop when the set of trained parameters changes"
                )
            if local_part(live[name]).shape != shape:
                now = tuple(local_part(live[name]).shape)
                raise ConfigError(
                    f"parameter {name!r} has shape {now} and had {tuple(shape)} when the outer loop was made: "
                    "make a new OuterLoop after resizing a model"
                )
        return [live[name] for name in self.names]

    def sample(self, *, gradients: bool = False) -> Tensor:
        """Copy a few thousand of the values (or gradients), always the same ones, into a new vector."""
        chosen: list[Tensor] = [*self.parameters()]
        chosen = chosen[:: -(-len(chosen) // SAMPLED_PARAMETERS)]
        if gradients:  # one without counts as zeros
            chosen = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        parts = [local_part(tensor).reshape(-1) for tensor in chosen]
        strides = [max(1, part.numel() // SAMPLED_VALUES) for part in parts]
        return torch.cat(
            [part[::stride].to(self.device, self.dtype) for part, stride in zip(parts, strides, strict=True)]
        )

    def read(self) -> Tensor:
        """Copy the parameters into a new vector."""
        return gather(self.parameters(), self.dtype)

    def write(self, vector: Tensor) -> None:
        """Set the parameters' values, rounded to their own dtypes."""
        scatter(vector, self.parameters())

    def subtract_from(self, vector: Tensor) -> Tensor:
        """Subtract the parameters from a vector in place, after rounding it as `write` would have.

        So what a low-precision parameter cannot hold of its start is not taken for progress.
        """
        parts = [local_part(parameter) for parameter in self.parameters()]
        for piece, part in zip(vector.split([part.numel() for part in parts]), parts, strict=True):
            here = piece.view(part.shape)
            if part.dtype != vector.dtype:
                here.copy_(here.to(part.dtype))
            here.sub_(part.to(vector.dtype))
        return vector

    def read_gradients(self) -> Tensor:
        """Copy the gradients into a new vector; a parameter without one counts as zeros."""
        return gather([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()], self.dtype)

    def write_gradients(self, vector: Tensor) -> None:
        """Set every parameter's gradient."""
        for p in self.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        scatter(vector, [p.grad for p in self.parameters() if p.grad is not None])

    def layout(self) -> str:
        """Describe names, shapes and dtypes, which must be the same on all workers."""
        plain = [plain_name(name) for name in self.names]
        dtypes = [parameter.dtype for parameter in self.parameters()]  # or the same anchor would end in other models
        exact = "; ".join(f"{n} {tuple(s)} {d}" for n, s, d in zip(plain, self._shapes, dtypes, strict=True))
        checksum = f"checksum of names, shapes and dtypes {zlib.crc32(exact.encode()):08x}"
        kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
        return f"{len(self.names)} parameters of {kinds}, {self.numel} values, anchor {self.dtype}, {checksum}"

    def locate(self, index: int) -> str:
        """Return the name of the parameter that holds value number `index` of the vector."""
        for name, shape in zip(self.names, self._shapes, strict=True):
            if index < shape.numel():
                return name
            index -= shape.numel()
        raise IndexError(index)


def check_coverage(model: nn.Module, windows: Iterable[Window]) -> None:
    """Raise a ConfigError that names any trained parameter in no window: it would silently never be synchronised."""
    covered = {name for window in windows for name in window.names}
    missed = [name for name in trainable(model) if name not in covered]
    if missed:
        raise ConfigError(
            f"parameter {missed[0]!r} ({len(missed)} in all) is trained but in no fragment: it was added or unfrozen "
            "after the outer loop was made; make a new OuterLoop when the set of trained parameters changes"
        )


def fingerprint(vector: Tensor) -> int:
    """Return 64 bits that are equal for equal vectors and, short of malice, differ for different ones."""
    return joined_sums(sums_of_pieces(vector).tolist())


def sums_of_pieces(vector: Tensor) -> Tensor:
    """Return what `joined_sums` makes a fingerprint of, int64 [pieces], without waiting for a GPU.

    The vector's bits as wrapping int64 words, each times an odd factor that depends on its place.
    """
    words = words_of(vector)
    count = min(words.numel(), PIECE)
    places = torch.arange(1, count + 1, dtype=torch.int64, device=vector.device) * -7046029254386353131
    factors = (places ^ (places >> 29)) | 1
    sums = []
    for piece in pieces(words.numel()):
        mixed = (words[piece] >> 32).bitwise_xor_(words[piece])  # or two flipped signs would cancel: 2**63 times odd
        sums.append(mixed.mul_(factors[: piece.stop - piece.start]).sum())
    return torch.stack(sums) if sums else words.new_zeros(0)


def checksum(tensor: Tensor) -> int:
    """Return 32 bits of the local part of a tensor of any dtype; 0 where bits cannot be read (sparse, meta)."""
    part = local_part(tensor)
    if hasattr(part, "__tensor_flatten__"):  # one made of others, as quantised weights are
        inside, _ = part.__tensor_flatten__()
        sums = [checksum(getattr(part, name)) for name in inside]
        return zlib.crc32(" ".join(map(str, sums)).encode())
    try:
        raw = part.reshape(-1).contiguous().view(torch.uint8)
        if raw.numel() % 8 or raw.storage_offset() % 8:
            raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
        mixed = fingerprint(raw.view(torch.int64))
    except (RuntimeError, NotImplementedError):
        return 0
    return (mixed ^ mixed >> 32) % 2**32


def words_of(vector: Tensor) -> Tensor:
    """Return a vector's bits as int64 words; filled up with a zero if need be."""
    if vector.numel() * vector.element_size() % 8:
        vector = torch.nn.functional.pad(vector, (0, 1))
    return vector.view(torch.int64)


def joined_sums(sums: Iterable[int]) -> int:
    """Return a fingerprint from the sums of its pieces, in order."""
    total = 0
    for part in sums:
        total = (total * 6364136223846793005 + part) % 2**64
    return total
