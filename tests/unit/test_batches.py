"""Batches by number: what is in them, in which order, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from atoll.errors import ConfigError, DataError
from atoll.train.data.batches import LARGEST, Batches, _Resident, held_out, shuffled

TOKENS = np.arange(1001, dtype=np.uint16)


def batches(*files: Any, workers: int = 2, batch: int = 4, sequence: int = 10, seed: int = 0) -> Batches:
    return Batches(files or (TOKENS,), workers=workers, batch=batch, sequence=sequence, seed=seed)


def test_a_batch_is_rows_that_share_their_ends() -> None:
    drawn = batches().batch(0, 0)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (4, 11)
    assert drawn.is_contiguous()
    for row in drawn:
        assert row[0] % 10 == 0
        assert torch.equal(row, row[0] + torch.arange(11))


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4"])
def test_tokens_of_every_size_come_out_whole(dtype: str) -> None:
    largest = np.iinfo(dtype).max
    drawn = Batches([np.full(101, largest, dtype)], workers=1, batch=2, sequence=10, seed=0).batch(0, 0)
    assert (drawn == largest).all()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4"])
def test_rows_that_lie_on_a_device_are_the_files(dtype: str) -> None:
    """On a GPU batches are cut out of the whole file; the same code, here where there is none."""
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1005, dtype, endpoint=True)
    rows = sliding_window_view(tokens, 11)[::10]
    chosen = np.array([99, 0, 3, 3, 42])
    taken = _Resident(rows, torch.device("cpu")).take(chosen)
    assert taken.dtype == torch.int64
    assert np.array_equal(taken.numpy(), rows[chosen])


def test_a_batch_may_be_changed_without_harm() -> None:
    source = batches()
    drawn = source.batch(0, 0)
    expected = drawn.clone()
    drawn.zero_()
    assert torch.equal(source.batch(0, 0), expected)


def test_a_worker_with_a_file_of_its_own_reads_all_of_it_and_nothing_else() -> None:
    files = [np.arange(201, dtype=np.uint16), np.arange(1000, 1401, dtype=np.uint16)]
    own = batches(*files)
    for worker, (first, rows) in enumerate([(0, 20), (1000, 40)]):
        starts = torch.cat([own.batch(worker, draw)[:, 0] for draw in range(rows // 4)])
        assert sorted(starts.tolist()) == list(range(first, first + 10 * rows, 10))
    assert own.weights() == [20.0, 40.0] and batches(*files, workers=2).epoch(1, 5) == 0.5


def test_workers_take_turns_on_one_line() -> None:
    """One worker with a large batch and two with half of it see the same rows in each step."""
    one, two = batches(workers=1, batch=8), batches(workers=2, batch=4)
    for draw in range(60):  # several epochs of 100 rows
        assert torch.equal(one.batch(0, draw), torch.cat([two.batch(0, draw), two.batch(1, draw)]))


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    """Another order would make old checkpoints read rows twice: this may only change with their format."""
    assert batches(seed=7).batch(1, 3)[:, 0].tolist() == [200, 620, 640, 580]
    assert shuffled(np.arange(3), 2**40, "key").tolist() == [228789392038, 1007945149316, 860512264665]


def test_files_of_their_own_are_read_in_orders_of_their_own() -> None:
    source = batches(TOKENS, TOKENS, batch=100)
    first, second = source.batch(0, 0)[:, 0], source.batch(1, 0)[:, 0]
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_rows_weights_and_epochs() -> None:
    shared = batches(workers=3)
    assert [shared.rows(worker) for worker in range(3)] == [33, 33, 33]
    assert shared.weights() == [33.0, 33.0, 33.0]
    assert [shared.epoch(0, draw) for draw in (0, 1, 25)] == [0.0, 0.12, 3.0]
    own = batches(TOKENS, TOKENS[:511])
    assert own.weights() == [100.0, 51.0]
    assert [own.epoch(0, 25), own.epoch(1, 51)] == [1.0, 4.0]


def test_a_file_smaller_than_a_batch_is_read_again_within_it() -> None:
    drawn = Batches([TOKENS[:31]], workers=1, batch=7, sequence=10, seed=0).batch(0, 0)[:, 0].tolist()
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 10, 20]


@pytest.mark.parametrize("length", [11, 20])
def test_one_row_is_enough(length: int) -> None:
    source = Batches([TOKENS[:length]], workers=1, batch=2, sequence=10, seed=0)
    assert source.rows(0) == 1
    assert source.batch(0, 5).tolist() == [list(range(11))] * 2


def test_neighbours_in_the_line_are_no_neighbours_in_the_file() -> None:
    line = shuffled(np.arange(5000), 5000, "key")
    assert np.mean(np.abs(np.diff(line)) < 50) < 0.04  # 0.02 by chance
    assert abs(np.corrcoef(np.arange(5000), line)[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("files", "workers", "message"),
    [
        ([TOKENS[:10]], 1, r"the training text has 10 tokens, but .* takes 11 \(1 x 10 and one more\): give more"),
        ([TOKENS[:40]], 4, r"the training text has 40 tokens, but .* takes 41 \(4 x 10 and one more\)"),
        ([TOKENS, TOKENS[:9]], 2, "the shard of worker 1 has 9 tokens, but .* takes 11"),
        ([TOKENS[:0]], 1, "the training text has 0 tokens"),
    ],
)
def test_too_little_text_is_refused(files: Any, workers: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batches(*files, workers=workers)


@pytest.mark.parametrize("setting", ["workers", "batch", "sequence"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_settings_that_count_nothing_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(sync|train)\.{setting} must be a whole number of at least 1"):
        batches(**{setting: value})


def test_another_number_of_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 workers need one token file, or one each, got 2"):
        batches(TOKENS, TOKENS, workers=3)


@pytest.mark.parametrize(("worker", "draw"), [(2, 0), (-1, 0), (0, -1)])
def test_batches_that_do_not_exist_are_refused(worker: int, draw: int) -> None:
    with pytest.raises(ConfigError, match=rf"batch {draw} of worker {worker} does not exist"):
        batches().batch(worker, draw)


def test_more_rows_than_can_be_shuffled_are_refused() -> None:
    with pytest.raises(DataError, match="are more than"):
        shuffled(np.arange(1), LARGEST + 1, "key")


# ---- held-out text


def test_held_out_rows_come_in_order() -> None:
    found = held_out(TOKENS, sequence=10, tokens=250, batch=4)
    assert len(found) == 7
    assert [len(batch) for batch in found] == [4, 4, 4, 4, 4, 4, 1]
    assert torch.equal(torch.cat(list(found))[:, 0], torch.arange(0, 250, 10))
    assert found[-1].tolist() == [list(range(240, 251))]
    assert found[-1].dtype == torch.int64
    assert [len(batch) for batch in found[5:]] == [4, 1]
    with pytest.raises(IndexError):
        found[7]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (14, 1), (16, 2), (1000, 100), (10**9, 100)])
def test_about_as_many_held_out_tokens_as_asked_for(tokens: int, rows: int) -> None:
    assert sum(map(len, held_out(TOKENS, sequence=10, tokens=tokens, batch=8))) == rows


def test_too_little_held_out_text_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"has 10 tokens, but a row takes 11: give more text, a larger data\.held_out, or"
    ):
        held_out(TOKENS[:10], sequence=10, tokens=100, batch=4)
    with pytest.raises(ConfigError, match=r"train\.eval_tokens must be a whole number"):
        held_out(TOKENS, sequence=10, tokens=0, batch=4)
