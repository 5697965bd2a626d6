"""Splits documents into one cluster per worker by k-means, as in the DiLoCo paper's non-i.i.d. setting.

The features are cheap: hashed counts of tokens and pairs of neighbours at the start of a document, at unit length.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError

START: Final = 4096
"""Tokens of a document that its features count."""
WIDTH: Final = 1024
"""Length of a document's feature vector."""
SAMPLE: Final = 8192
"""Most documents that k-means is fitted on."""
LEAST_SHARE: Final = 1 / 8
"""Least part of an even share of all tokens that each worker gets."""
_BLOCK = 1024
_ROUNDS = 50
_STARTS = 4

Vectors = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]


def assign(tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], clusters: int, seed: int = 0) -> Whole:
    """Return the cluster of each document [documents], in 0..clusters-1, every cluster at least once.

    Args:
        tokens: The tokens of all documents, one after another.
        lengths: How many tokens each document has [documents].
        clusters: Clusters to make.
        seed: Seed of the sample and of the first centres.
    """
    count = len(lengths)
    if count < clusters:
        documents = f"{count} document{'' if count == 1 else 's'}"
        problem = f"{documents} cannot be split into {clusters} clusters, one for each worker"
        raise DataError(f"{problem}: give more documents, fewer workers, or data.split = 'iid'")
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    generator = np.random.default_rng(seed)
    sample = np.sort(generator.choice(count, min(count, SAMPLE), replace=False))
    counts = _counts(tokens, starts[sample], lengths[sample])
    rarity = np.log((1 + len(sample)) / (1 + np.count_nonzero(counts, axis=0))).astype(np.float32)
    centres = _fit(_features(counts, rarity), clusters, generator)
    similarity = np.empty((count, clusters), np.float32)
    for first in range(0, count, _BLOCK):
        block = slice(first, first + _BLOCK)
        similarity[block] = _features(_counts(tokens, starts[block], lengths[block]), rarity) @ centres.T
    return _with_enough_each(similarity, lengths)


def _counts(tokens: npt.NDArray[Any], starts: Whole, lengths: Whole) -> Vectors:
    """Return hashed counts of tokens and pairs at the start of each document [documents, WIDTH]."""
    counts = np.empty((len(starts), WIDTH), np.float32)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        ids = tokens[start : start + min(length, START)].astype(np.uint64)
        pairs = ids[:-1] * np.uint64(0x9E3779B97F4A7C15) + ids[1:] + np.uint64(1)
        hashed = np.concatenate((ids, pairs)) * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(54)
        counts[i] = np.bincount(hashed.astype(np.int64), minlength=WIDTH)
    return counts


def _features(counts: Vectors, rarity: Vectors) -> Vectors:
    """Return square roots of counts times rarity, scaled to unit length [documents, WIDTH]."""
    weighted = np.sqrt(counts) * rarity
    unit: Vectors = weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-12)
    return unit


def _fit(features: Vectors, clusters: int, generator: np.random.Generator) -> Vectors:
    """Return the centres of the best of several k-means runs [clusters, WIDTH]."""
    best, least = features[:clusters], np.inf
    for _ in range(_STARTS):
        centres = _seeds(features, clusters, generator)
        nearest = np.full(len(features), -1)
        for _ in range(_ROUNDS):
            before, nearest = nearest, (features @ centres.T).argmax(1)
            if np.array_equal(before, nearest):
                break
            for cluster in np.unique(nearest):
                mean = features[nearest == cluster].mean(0)
                centres[cluster] = mean / max(float(np.linalg.norm(mean)), 1e-12)
        distance = float(np.sum(1 - (features @ centres.T).max(1)))
        if distance < least:
            best, least = centres, distance
    return best


def _seeds(features: Vectors, clusters: int, generator: np.random.Generator) -> Vectors:
    """Choose first centres by k-means++: far from those chosen before."""
    chosen = [int(generator.integers(len(features)))]
    distance = np.full(len(features), np.inf)
    while len(chosen) < clusters:
        distance = np.minimum(distance, np.maximum(1 - features @ features[chosen[-1]], 0))
        total = distance.sum()
        chances = distance / total if total > 0 else None  # all the same: any will do
        chosen.append(int(generator.choice(len(features), p=chances)))
    return features[chosen].copy()


def _with_enough_each(similarity: Vectors, lengths: Whole) -> Whole:
    """Assign each document to its most similar cluster, then move documents to clusters that got too few."""
    clusters = similarity.shape[1]
    assigned: Whole = similarity.argmax(1)
    documents = np.bincount(assigned, minlength=clusters)
    size = np.zeros(clusters, np.int64)
    np.add.at(size, assigned, lengths)
    enough = int(lengths.sum() * LEAST_SHARE / clusters)
    for poor in np.argsort(size, kind="stable"):
        if documents[poor] and size[poor] >= enough:
            continue
        for document in np.argsort(-similarity[:, poor], kind="stable"):
            giver, length = assigned[document], lengths[document]
            if giver == poor or documents[giver] == 1 or (documents[poor] and size[giver] - length < enough):
                continue
            assigned[document] = poor
            documents[giver], documents[poor] = documents[giver] - 1, documents[poor] + 1
            size[giver], size[poor] = size[giver] - length, size[poor] + length
            if size[poor] >= enough:
                break
    return assigned
