"""Defines the type of numbers in events."""

import math
from typing import Annotated

from pydantic import BeforeValidator

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that may have been infinite or NaN when it was written: read back as NaN."""
