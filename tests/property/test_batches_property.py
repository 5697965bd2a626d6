"""What must hold for every size of file, number of workers, batch, sequence and seed."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from atoll.train.data.batches import Batches, held_out, shuffled


@given(rows=st.integers(1, 3000), key=st.text(max_size=5))
def test_shuffling_is_a_permutation(rows: int, key: str) -> None:
    assert np.array_equal(np.sort(shuffled(np.arange(rows), rows, key)), np.arange(rows))


@given(rows=st.integers(2, 2**40), key=st.text(max_size=5), data=st.data())
def test_shuffling_large_files_stays_inside_and_keeps_places_apart(rows: int, key: str, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=50, unique=True)))
    line = shuffled(places, rows, key)
    assert len(set(line.tolist())) == len(places)
    assert 0 <= line.min() <= line.max() < rows
    assert np.array_equal(line[::-1], shuffled(places[::-1], rows, key))


@given(rows=st.integers(30, 3000), keys=st.lists(st.text(max_size=5), min_size=2, max_size=2, unique=True))
def test_another_key_is_another_order(rows: int, keys: list[str]) -> None:
    first, second = (shuffled(np.arange(rows), rows, key) for key in keys)
    assert not np.array_equal(first, second)


@dataclass(frozen=True)
class Setting:
    lengths: tuple[int, ...]
    workers: int
    batch: int
    sequence: int
    seed: int

    def build(self) -> Batches:
        """Files whose tokens are their own places, so that a token tells where it came from."""
        files = [np.arange(length, dtype=np.uint32) for length in self.lengths]
        return Batches(files, workers=self.workers, batch=self.batch, sequence=self.sequence, seed=self.seed)


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    workers, sequence = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    own = workers if draw(st.booleans()) else 1
    least = sequence * (workers if own == 1 else 1) + 1
    lengths = draw(st.lists(st.integers(least, least + 300), min_size=own, max_size=own))
    return Setting(tuple(lengths), workers, draw(st.integers(1, 9)), sequence, draw(st.integers(0, 2**40)))


def places(batch: Tensor) -> list[int]:
    return batch[:, 0].tolist()


@given(settings())
def test_every_row_is_read_exactly_once_an_epoch(setting: Setting) -> None:
    source = setting.build()
    epochs = 3
    for file, length in enumerate(setting.lengths):
        shared = len(setting.lengths) == 1
        workers = range(setting.workers) if shared else [file]
        rows = (length - 1) // setting.sequence
        line: list[int] = []
        draw = 0
        while len(line) < epochs * rows:
            line += [place for worker in workers for place in places(source.batch(worker, draw))]
            draw += 1
        for epoch in range(epochs):
            read = Counter(line[epoch * rows : (epoch + 1) * rows])
            assert read == Counter(range(0, rows * setting.sequence, setting.sequence))


@given(settings(), st.data())
def test_a_batch_depends_on_nothing_but_its_number(setting: Setting, data: st.DataObject) -> None:
    numbers = st.tuples(st.integers(0, setting.workers - 1), st.integers(0, 10**9))
    asked = data.draw(st.lists(numbers, min_size=1, max_size=8))
    first, second = setting.build(), setting.build()
    drawn = {number: first.batch(*number) for number in asked}
    for number in data.draw(st.permutations(asked)):
        assert torch.equal(second.batch(*number), drawn[number])
        assert torch.equal(first.batch(*number), drawn[number])


@given(settings(), st.integers(1, 5))
def test_epochs_and_seeds_are_in_different_orders(setting: Setting, other: int) -> None:
    rows = (setting.lengths[0] - 1) // setting.sequence
    assume(rows >= 30)  # with fewer, two orders may be the same by chance
    one = Batches([np.arange(setting.lengths[0])], workers=1, batch=rows, sequence=setting.sequence, seed=setting.seed)
    two = Batches(
        [np.arange(setting.lengths[0])], workers=1, batch=rows, sequence=setting.sequence, seed=setting.seed + other
    )
    assert places(one.batch(0, 0)) != places(one.batch(0, other))
    assert places(one.batch(0, 0)) != places(two.batch(0, 0))


@given(settings(), st.integers(0, 1000))
def test_the_epoch_counts_the_rows_that_were_read(setting: Setting, draw: int) -> None:
    source = setting.build()
    for worker in range(setting.workers):
        length = setting.lengths[min(worker, len(setting.lengths) - 1)]
        rows = (length - 1) // setting.sequence
        together = setting.workers if len(setting.lengths) == 1 else 1
        assert source.epoch(worker, draw) == draw * setting.batch * together / rows
        assert source.rows(worker) == rows // together
        assert source.weights()[worker] == source.rows(worker) >= 1


@given(length=st.integers(2, 500), sequence=st.integers(1, 50), tokens=st.integers(1, 1000), batch=st.integers(1, 20))
def test_held_out_rows_are_the_first_ones_in_order(length: int, sequence: int, tokens: int, batch: int) -> None:
    assume(length > sequence)
    found = list(held_out(np.arange(length), sequence=sequence, tokens=tokens, batch=batch))
    rows = torch.cat(found)
    assert all(len(each) == batch for each in found[:-1])
    assert 1 <= len(found[-1]) <= batch
    assert rows.shape[1] == sequence + 1
    assert rows[:, 0].tolist() == [sequence * i for i in range(len(rows))]
    assert len(rows) in (max(1, round(tokens / sequence)), (length - 1) // sequence)
