"""The bytes that the kernel counts on a line are those of docs/wire.md."""

import pytest

import wire
from sites import available

CODECS = ("fp64", "fp32", "bf16", "fp16", "int8", "int4", "e3m0", "e2m1", "lloyd4")
pytestmark = pytest.mark.skipif(available() is not None, reason=f"no network namespaces here: {available()}")


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 4])
def test_a_round_puts_as_many_bytes_on_the_line_as_the_formula_says(members: int) -> None:
    off = dict.fromkeys(CODECS, 0.0)
    for _ in range(3):  # on a busy machine packets are lost and sent again
        measured = wire.measure(members, "10gbit", list(off), 1_000_003, 1)
        assert {row["codec"] for row in measured} == off.keys()
        off = {row["codec"]: row["bytes_ratio"] for row in measured if not 0.97 < row["bytes_ratio"] < 1.03}
        if not off:
            break
    assert not off, f"interface bytes over the formula: {off}"
