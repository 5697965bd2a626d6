"""Documents of a kind go to one worker; every worker gets some."""

import numpy as np
import numpy.typing as npt
import pytest

from atoll.errors import DataError
from atoll.train.data.clusters import LEAST_SHARE, assign

Corpus = tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]


def corpus(documents: list[npt.NDArray[np.uint16]]) -> Corpus:
    return np.concatenate(documents), np.array([len(document) for document in documents])


def topics(sizes: list[int], seed: int = 0) -> tuple[Corpus, npt.NDArray[np.int64]]:
    """Documents of several topics in random order: most tokens are the topic's, the rest anything."""
    generator = np.random.default_rng(seed)
    kinds = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    documents = []
    for kind in kinds:
        length = int(generator.integers(200, 2000))
        own = generator.integers(1000 + 40 * kind, 1040 + 40 * kind, length)
        documents.append(np.where(generator.random(length) < 0.7, own, generator.integers(0, 1000, length)))
    return corpus([document.astype(np.uint16) for document in documents]), kinds


def test_topics_are_told_apart_whatever_their_sizes() -> None:
    (tokens, lengths), kinds = topics([60, 40, 30, 20])
    found = assign(tokens, lengths, 4)
    for kind in range(4):
        assert len(np.unique(found[kinds == kind])) == 1
    assert sorted(np.bincount(found)) == [20, 30, 40, 60]


def test_the_order_of_tokens_counts_too() -> None:
    generator = np.random.default_rng(0)
    rising = [np.tile(np.arange(10), 50).astype(np.uint16) for _ in range(20)]
    falling = [np.tile(np.arange(10)[::-1], 50).astype(np.uint16) for _ in range(20)]
    noise = [generator.integers(0, 10, 500).astype(np.uint16) for _ in range(20)]
    found = assign(*corpus(rising + falling + noise), 3)
    assert [len(set(found[i : i + 20])) for i in (0, 20, 40)] == [1, 1, 1]
    assert len(set(found)) == 3


def test_the_same_documents_are_split_the_same_way() -> None:
    (tokens, lengths), _ = topics([30, 30, 30])
    assert np.array_equal(assign(tokens, lengths, 5), assign(tokens, lengths, 5))
    assert not np.array_equal(assign(tokens, lengths, 5, seed=1), assign(tokens, lengths, 5, seed=2))


def test_more_documents_than_the_sample_are_all_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.train.data.clusters.SAMPLE", 60)
    monkeypatch.setattr("atoll.train.data.clusters._BLOCK", 17)
    (tokens, lengths), kinds = topics([100, 50])
    found = assign(tokens, lengths, 2)
    assert len(found) == 150
    assert sorted(np.bincount(found)) == [50, 100]
    assert len(np.unique(found[kinds == 0])) == 1


@pytest.mark.parametrize("clusters", [1, 2, 7, 20])
def test_no_cluster_is_empty_even_if_all_documents_are_alike(clusters: int) -> None:
    found = assign(*corpus([np.arange(50, dtype=np.uint16)] * 20), clusters)
    assert set(found) == set(range(clusters))


def test_documents_of_a_single_token_are_assigned() -> None:
    found = assign(*corpus([np.array([i], np.uint16) for i in range(6)]), 6)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]


def test_an_outlier_does_not_leave_a_worker_with_next_to_nothing() -> None:
    (tokens, lengths), _ = topics([60])
    odd = np.full(3, 60_000, np.uint16)
    tokens, lengths = np.concatenate((tokens, odd)), np.append(lengths, 3)
    found = assign(tokens, lengths, 2)
    sizes = np.bincount(found, weights=lengths)
    assert sizes.min() >= LEAST_SHARE / 2 * lengths.sum()


def test_one_huge_document_does_not_stop_the_others_from_being_shared() -> None:
    documents = [np.zeros(100_000, np.uint16)] + [np.full(10, 7, np.uint16)] * 9
    assert set(assign(*corpus(documents), 4)) == {0, 1, 2, 3}


def test_fewer_documents_than_clusters_are_refused() -> None:
    with pytest.raises(DataError, match="3 documents cannot be split into 4 clusters, one for each worker: give more"):
        assign(*corpus([np.arange(9, dtype=np.uint16)] * 3), 4)
