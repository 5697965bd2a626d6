"""How many examples a property test draws: all with ATOLL_TESTS=thorough, a quarter of them otherwise."""

import os

from hypothesis import settings

THOROUGH = os.environ.get("ATOLL_TESTS") == "thorough"


def examples(count: int) -> settings:
    """Settings for a property test that draws this many where time is no matter."""
    return settings(max_examples=count if THOROUGH else max(4, count // 4))
