"""What the planner says of runs and rounds that were measured: waiting and bytes, predicted and seen.

    python benchmarks/predicted.py [--results benchmarks/results]

For every row of wan.json and wire.json in the folder. The line's rate, of which payloads get GOODPUT (plan/line.py),
the step's time without any exchange (wan's bare_step_s) and the sizes of the fragments go in, `plan.simulate` runs the
same periods, sending after the step, and seconds of waiting in a period and bytes of a worker come out. DDP exchanges
around a ring, where 2 and 4 workers send as many bytes as atoll does. Its gradients travel in buckets, the last and
largest of which leaves when backward is over, so it is taken as after the step, too. torchft's rows are left out: its
exchanges are preceded by a quorum, and what it makes of a line is its own. For a row of wire.json, one round on a free
line.

"seen" is, for atoll, the time blocked on the link; for DDP, how much longer the part of the step took that exchanges
(wan.py's "held up"). It is that of the worker that waited least: the others waited for that one, too. Bytes are the
kernel's count of the interface, with all headers; predicted are payloads.
A row agrees if seen and predicted differ by at most 15 %; waits of less than 0.05 s a period on both sides are too
short to be told from noise and agree, too. Results also go to predicted.json in the same folder.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.allreduce import sent_bytes
from atoll.core.codec import Codec
from atoll.plan.cost import transfer_s
from atoll.plan.line import GOODPUT, Line
from atoll.plan.method import Job
from atoll.plan.simulate import stops
from sites import bits_per_second
from wan import Bench
from wan_worker import SHAPE, our_sync

CLOSE = 0.15
"""How far apart two figures may be to agree."""
SHORT_S = 0.05
"""Waits of a period that are noise."""
OURS = ("diloco", "streaming", "eager")
METHODS = ("ddp", *OURS)


class Row(NamedTuple):
    """One measurement and its prediction; seconds of waiting and bytes sent by a worker, a period or a round."""

    what: str
    wait_s: float
    seen_wait_s: float
    sent: float
    seen_sent: float

    @property
    def wait_agrees(self) -> bool:
        """Whether both waits are short, or alike."""
        return max(self.wait_s, self.seen_wait_s) < SHORT_S or alike(self.wait_s, self.seen_wait_s)

    @property
    def bytes_agree(self) -> bool:
        """Whether about as much was sent."""
        return alike(self.sent, self.seen_sent)


def alike(predicted: float, seen: float) -> bool:
    return predicted > 0 and abs(seen / predicted - 1) <= CLOSE


# ---------------------------------------------------------------------- whole runs


def job_of(cell: dict[str, Any], bench: Bench, steps: int) -> Job:
    """A row of wan.json as the planner sees it."""
    method, workers = cell["method"], cell["workers"]
    if method in OURS:
        sync = our_sync(method, bench.period, cell["delay"])
        payloads = tuple(sync.codec.payload_bytes(fragment.numel) for fragment in bench.fragments(method))
        delay = sync.delay_of(0, workers)
    else:
        payloads, delay = (4 * SHAPE.parameters,), 0
    return Job(
        steps=steps,
        step_s=cell["bare_step_s"],
        period=bench.period,
        payload_bytes=payloads,
        delay=delay,
        workers=workers,
        gradients=method == "ddp",
        finish=False,
    )


def of_run(cell: dict[str, Any], bench: Bench) -> Row:
    """A row of wan.json: whole periods under way, on the line that it had."""
    since, until = 3 * bench.period, 6 * bench.period
    job = job_of(cell, bench, until)
    waited_s = {since: 0.0, until: 0.0}
    for stop in stops(job, Line(GOODPUT * 1e6 * cell["rate_mbit"])):
        waited_s |= {step: stop.left_s[0] - stop.step * job.step_s for step in waited_s if stop.step <= step}
    periods = (until - since) / bench.period
    rounds = bench.period if job.gradients else 1
    sent = sum(sent_bytes(size, job.workers) for size in job.payload_bytes)
    seen = cell["least_wait_s_per_period" if cell["method"] in OURS else "least_held_up_s_per_period"]
    return Row(
        f"{cell['method']}, {cell['workers']} workers, {cell['rate_mbit']} Mbit/s",
        (waited_s[until] - waited_s[since]) / periods,
        seen,
        rounds * sent,
        cell["sent_bytes_per_period"],
    )


# ---------------------------------------------------------------------- single rounds


def of_round(row: dict[str, Any], values: int) -> Row:
    """A row of wire.json."""
    payload, link = Codec(row["codec"]).payload_bytes(values), Line(GOODPUT * bits_per_second(row["rate"]))
    return Row(
        f"round in {row['codec']}, {row['members']} members, {row['rate']}",
        transfer_s(payload, row["members"], link),
        row["round_s"],
        sent_bytes(payload, row["members"]),
        row["interface_bytes"],
    )


# ---------------------------------------------------------------------- all


def rows(folder: Path) -> Iterator[Row]:
    """Of all measurements that are there."""
    if (file := folder / "wan.json").exists():
        stored = json.loads(file.read_text())
        settings = stored["settings"]
        bench = Bench(settings["period"], max(1, settings["steps"] // settings["period"]))
        for cell in stored["cells"]:
            if cell["method"] in METHODS and cell["rate_mbit"]:
                yield of_run(cell, bench)
    else:
        print(f"{file} is not there: sudo python benchmarks/wan.py makes it")
    if (file := folder / "wire.json").exists():
        stored = json.loads(file.read_text())
        for row in stored["rows"]:
            yield of_round(row, stored["values"])


def ratio(predicted: float, seen: float) -> str:
    return f"{seen / predicted:.2f}" if predicted > 1e-3 else "-"


def line(row: Row) -> str:
    words = {True: "within 15 %", False: "apart"}
    return (
        f"{row.what:40} {row.wait_s:8.2f} {row.seen_wait_s:8.2f} {ratio(row.wait_s, row.seen_wait_s):>6} "
        f"{words[row.wait_agrees]:12} {row.sent / 1e6:8.2f} {row.seen_sent / 1e6:8.2f} "
        f"{ratio(row.sent, row.seen_sent):>6} {words[row.bytes_agree]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().results
    found = list(rows(folder))
    print(f"{'':40} {'wait s':>8} {'seen':>8} {'ratio':>6} {'':12} {'MB sent':>8} {'seen':>8} {'ratio':>6}")
    for row in found:
        print(line(row))
    waits, sent = sum(row.wait_agrees for row in found), sum(row.bytes_agree for row in found)
    print(f"within 15 %: waiting in {waits} of {len(found)}, bytes in {sent} of {len(found)}")
    stored = [row._asdict() | {"wait_agrees": row.wait_agrees, "bytes_agree": row.bytes_agree} for row in found]
    (folder / "predicted.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
