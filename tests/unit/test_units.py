"""Numbers as people read them."""

import math

import pytest

from atoll._util.units import (
    bytes_text,
    clock_text,
    count_text,
    count_words,
    loss_text,
    percent_text,
    ratio_text,
    seconds_text,
    share_text,
)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(999_960), "1.00 MB"),
        (bytes_text(81_234_567), "81.2 MB"),
        (bytes_text(1_000), "1.00 kB"),
        (bytes_text(27_300_000), "27.3 MB"),
        (bytes_text(9e21), "9,000,000 PB"),
        (bytes_text(math.nan), "-"),
        (seconds_text(0), "0 s"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(89), "89.0 s"),
        (seconds_text(90), "1.50 min"),
        (seconds_text(3 * 3600), "3.00 h"),
        (seconds_text(72 * 3600), "3.00 days"),
        (seconds_text(800 * 86400), "2.19 years"),
        (count_text(0), "0"),
        (count_text(7), "7"),
        (count_text(999), "999"),
        (count_text(999.6), "1 k"),
        (count_text(12_345), "12.3 k"),
        (count_text(3.2e6), "3.2 M"),
        (count_text(5e15), "5e+03 T"),
        (count_text(math.nan), "-"),
        (clock_text(0), "0:00"),
        (clock_text(59.6), "1:00"),
        (clock_text(3599), "59:59"),
        (clock_text(3600), "1:00:00"),
        (clock_text(172_799), "47:59:59"),
        (clock_text(270_000), "3 d 3 h"),
        (clock_text(None), "-"),
        (clock_text(math.inf), "-"),
        (loss_text(4.3214), "4.321"),
        (loss_text(None), "-"),
        (loss_text(math.nan), "-"),
        (count_words(9999), "9,999"),
        (count_words(213_504), "214 thousand"),
        (count_words(4.2e9), "4.20 billion"),
        (ratio_text(80.6), "81x fewer"),
        (ratio_text(0.5), "2.0x more"),
        (ratio_text(1.01), "the same"),
        (ratio_text(None), "-"),
        (percent_text(-0.0634), "-6.3 %"),
        (percent_text(-0.0001), "+0.0 %"),
        (share_text(0.9999), "99.9 %"),
        (share_text(1), "100 %"),
        (share_text(0.001), "<1 %"),
        (share_text(0.7), "70 %"),
    ],
)
def test_units(said: str, words: str) -> None:
    assert said == words
