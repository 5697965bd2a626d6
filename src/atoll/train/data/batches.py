"""Cuts token files into batches: batch i of worker w is a pure function, so a place is one integer.

Row r of a file is tokens[r * sequence : (r + 1) * sequence + 1]: the last target of a row is the first input of the
next. Workers that share a file take batches in turn from one shuffled order of its rows, so the tokens of a step do not
depend on how workers synchronise.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from atoll._util.checks import check_whole
from atoll.errors import ConfigError, DataError

LARGEST: Final = 2**40
"""Most rows that can be shuffled."""
RESIDENT_BYTES: Final = 2**28
"""Bytes up to which a token file is kept on the GPU, where batches are cut."""
_BLOCK = 1024  # places
_ROUNDS = 8  # of 8 bytes of key each: one 64-byte digest


class Batches:
    """Makes the batches of every worker, on `device`: all from one file in turn, or each from its own file.

    Files are token ids [tokens] of any unsigned type.
    """

    def __init__(
        self,
        files: Sequence[npt.NDArray[Any]],
        *,
        workers: int,
        batch: int,
        sequence: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("sync.workers", workers), ("train.batch", batch), ("train.sequence", sequence)):
            check_whole(name, value)
        if len(files) not in (1, workers):
            raise ConfigError(f"{workers} workers need one token file, or one each, got {len(files)}")
        self._workers, self._batch, self._seed = workers, batch, seed
        self._device = torch.device(device)
        self._resident: dict[int, _Resident] = {}
        self._sharers = workers if len(files) == 1 else 1
        self._files = [_rows_of(file, sequence) for file in files]
        for number, (file, rows) in enumerate(zip(files, self._files, strict=True)):
            if len(rows) < self._sharers:
                whose = "the training text" if len(files) == 1 else f"the shard of worker {number}"
                needed = f"{self._sharers * sequence + 1} ({self._sharers} x {sequence} and one more)"
                raise DataError(
                    f"{whose} has {len(file)} tokens, but one row for each of its workers takes {needed}: "
                    f"give more text, fewer workers, or a shorter train.sequence"
                )

    def batch(self, worker: int, draw: int) -> Tensor:
        """Return batch number `draw` (from 0) of a worker [batch, sequence + 1], int64, without waiting for a GPU."""
        if not 0 <= worker < self._workers or draw < 0:
            raise ConfigError(f"batch {draw} of worker {worker} does not exist: workers are 0..{self._workers - 1}")
        file, turn = (0, worker) if self._sharers > 1 else (worker, 0)
        rows = self._files[file]
        first = (draw * self._sharers + turn) * self._batch
        chosen = _order(first, first + self._batch, len(rows), f"{self._seed}/{file}")
        if self._device.type != "cuda":
            return torch.from_numpy(rows[chosen].astype(np.int64)).to(self._device)
        if rows.size * rows.itemsize > RESIDENT_BYTES:
            return torch.from_numpy(rows[chosen].astype(np.int64)).pin_memory().to(self._device, non_blocking=True)
        if file not in self._resident:  # this process may train one worker of several
            self._resident[file] = _Resident(rows, self._device)
        return self._resident[file].take(chosen)

    def rows(self, worker: int) -> int:
        """Return the rows of a worker's shard, rounded down where workers share a file."""
        return len(self._files[0 if self._sharers > 1 else worker]) // self._sharers

    def weights(self) -> list[float]:
        """Return the weight of each worker in an example-weighted mean: its rows."""
        return [float(self.rows(worker)) for worker in range(self._workers)]

    def epoch(self, worker: int, draw: int) -> float:
        """Return how often a worker has read its shard after `draw` batches, a fraction."""
        file = 0 if self._sharers > 1 else worker
        return draw * self._batch * self._sharers / len(self._files[file])


class _Resident:
    """Keeps rows on a device, so that only row numbers are copied to it."""

    def __init__(self, rows: npt.NDArray[Any], device: torch.device) -> None:
        self._length = rows.shape[1] - 1
        tokens = np.append(rows[:, :-1].ravel(), rows[-1, -1])
        # Signed, since torch has few operations on unsigned types; the mask undoes the sign.
        self._tokens = torch.from_numpy(tokens.view(f"i{tokens.itemsize}")).to(device)
        self._mask = np.iinfo(tokens.dtype).max
        self._row = torch.arange(self._length + 1, device=device)

    def take(self, chosen: npt.NDArray[np.int64]) -> Tensor:
        firsts = torch.from_numpy(chosen * self._length).to(self._row.device, non_blocking=True)
        return self._tokens[firsts[:, None] + self._row].long().bitwise_and_(self._mask)


def _order(first: int, last: int, rows: int, key: str) -> npt.NDArray[np.int64]:
    """Return the rows at places `first` to `last` of an endless order that shuffles each epoch differently."""
    parts = []
    while first < last:
        epoch, place = divmod(first, rows)
        number, skip = divmod(place, _BLOCK)
        parts.append(_block(number, rows, f"{key}/{epoch}")[skip : skip + last - first])
        first += len(parts[-1])
    return np.concatenate(parts)


@lru_cache(maxsize=1024)
def _block(number: int, rows: int, key: str) -> npt.NDArray[np.int64]:
    """Return the rows at a block of places of one epoch, cached because NumPy is slow on few numbers."""
    return shuffled(np.arange(number * _BLOCK, min((number + 1) * _BLOCK, rows)), rows, key)


def shuffled(places: npt.NDArray[np.int64], rows: int, key: str) -> npt.NDArray[np.int64]:
    """Return the row at each place of a permutation of all rows given by `key`, without storing the permutation.

    A Feistel network permutes the numbers below the next power of two; a number that is no row goes through it again
    until it is one (cycle walking), which leaves a permutation of the rows.
    """
    if rows > LARGEST:
        raise DataError(f"{rows} rows of tokens are more than {LARGEST}, the most that can be shuffled")
    bits = (rows - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()  # the same for every version of NumPy
    keys = np.frombuffer(digest, "<u8")

    def permute(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = numbers >> low_bits, numbers & low_mask
        for i in range(0, _ROUNDS, 2):
            high = high ^ (_mixed(low, keys[i]) & high_mask)
            low = low ^ (_mixed(high, keys[i + 1]) & low_mask)
        return high << low_bits | low

    numbers = permute(places.astype(np.uint64))
    while (outside := numbers >= rows).any():
        numbers[outside] = permute(numbers[outside])
    return numbers.astype(np.int64)


def _mixed(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Return a hash of each number, whose low bits depend on all bits."""
    product = (numbers + key) * np.uint64(0x9E3779B97F4A7C15)
    product = (product ^ product >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return product ^ product >> np.uint64(32)


def held_out(file: npt.NDArray[Any], *, sequence: int, tokens: int, batch: int) -> list[Tensor]:
    """Return batches [at most batch, sequence + 1], int64, of a held-out file's first rows.

    They have about `tokens` tokens, and at least one row.
    """
    for name, value in (("train.sequence", sequence), ("train.eval_tokens", tokens), ("train.batch", batch)):
        check_whole(name, value)
    rows = _rows_of(file, sequence)
    if not len(rows):
        problem = f"the held-out text has {len(file)} tokens, but a row takes {sequence + 1}"
        raise DataError(f"{problem}: give more text, a larger data.held_out, or a shorter train.sequence")
    chosen = torch.from_numpy(rows[: max(1, round(tokens / sequence))].astype(np.int64))
    return list(chosen.split(batch))


def _rows_of(tokens: npt.NDArray[Any], sequence: int) -> npt.NDArray[Any]:
    """Return all rows of a file as a view [rows, sequence + 1]; neighbours share a token."""
    if len(tokens) <= sequence:
        return np.empty((0, sequence + 1), tokens.dtype)
    return sliding_window_view(tokens, sequence + 1)[::sequence]
