"""Keeps the client of the Hugging Face hub from writing a line for every attempt before it fails."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub client's warnings inside the block."""
    from huggingface_hub.utils import logging as hub_log  # comes with tokenizers

    verbosity = hub_log.get_verbosity()
    hub_log.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_log.set_verbosity(verbosity)
