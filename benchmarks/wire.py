"""How long rounds take on a slow line, against the ideal: their bytes over the line's rate.

    python benchmarks/wire.py [--values 10000000] [--rates 20mbit 100mbit] [--members 2 3 4] [--codecs e3m0]
    python benchmarks/wire.py --sender      # CPU seconds a GB: one of two members sends 40 MB, as fast as it can

Sites are network namespaces on a bridge with `tbf` both ways (`sites.py`; needs root). Every member opens the same
round at the same time, its payload ready; a round has taken as long as its slowest member, from open() to the last
byte. "with codec" adds what a worker computes around it: encoding its delta, decoding and averaging what came. The
ideal has no headers of any kind, so a perfect transfer over Ethernet is at 1.05. "bytes / formula" has the kernel's
counters over `sent_bytes`. "CPU-s / s" has the CPU seconds of all members over the round's: on 2 cores, 2.0 is all
there is. Members have throw-away keys, unless `--security none` leaves TLS out. Results go to
benchmarks/results/wire.json.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.core.allreduce import Reduction, sent_bytes, shots
from atoll.core.codec import Codec
from atoll.core.outer_step import weighted_mean
from atoll.link.base import Contribution, Member, RoundId
from atoll.link.net.run_keys import throw_away
from sites import LINE, Sites, bits_per_second

RESULTS = Path(__file__).parent / "results" / "wire.json"
PORT = 29500
HEADER_BYTES = 300
"""About what a message's header has (docs/wire.md)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit"])
    parser.add_argument("--members", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--codecs", nargs="+", default=["e3m0"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--security", choices=["keys", "none"], default="keys")
    parser.add_argument("--sender", action="store_true", help="measure what sending alone costs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(**json.loads(arguments.child))
        return
    if arguments.sender:
        found = run_members(2, None, ["fp32"], arguments.values, arguments.rounds, arguments.security, one_way=True)
        gigabytes = 4 * arguments.values / 1e9
        for who, one in zip(("sender", "receiver"), found, strict=True):
            cpu_s, all_s = (statistics.median(one["fp32"][key]) for key in ("cpu_s", "all_s"))
            print(f"{who}: {cpu_s / gigabytes:.2f} CPU-s/GB at {gigabytes / all_s:.2f} GB/s")
        return
    rows = []
    print("members  rate      codec   round s   ideal s   ratio   with codec s   ratio   bytes / formula   CPU-s / s")
    for members, rate in product(arguments.members, arguments.rates):
        for row in measure(members, rate, arguments.codecs, arguments.values, arguments.rounds, arguments.security):
            rows.append(row)
            print(
                f"{members:7}  {rate:8}  {row['codec']:6}  {row['round_s']:8.3f}  {row['ideal_s']:8.3f}"
                f"  {row['ratio']:6.3f}  {row['whole_s']:12.3f}  {row['whole_ratio']:6.3f}"
                f"   {row['bytes_ratio']:15.4f}   {row['cpus']:9.2f}",
                flush=True,
            )
    RESULTS.parent.mkdir(exist_ok=True)
    name = RESULTS.with_name("wire_insecure.json") if arguments.security == "none" else RESULTS
    name.write_text(json.dumps({"values": arguments.values, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def formula_bytes(reduction: Reduction, members: int) -> int:
    """What one member puts on its line in a round, messages' headers included (docs/wire.md)."""
    messages = members - 1 if shots(members) == 1 else 2 * (members - 1) * reduction.part_count(members) // members
    return sent_bytes(reduction.payload_bytes, members) + messages * HEADER_BYTES


def measure(
    members: int, rate: str, codecs: Sequence[str], values: int, rounds: int, security: str = "keys"
) -> Iterator[dict[str, Any]]:
    """Rounds of several codecs between sites of their own."""
    found = run_members(members, rate, codecs, values, rounds, security)
    for codec in codecs:
        reduction = Reduction(Codec(codec), values)
        ideal_s = 8 * sent_bytes(reduction.payload_bytes, members) / bits_per_second(rate)
        times = {
            key: statistics.median(max(each) for each in zip(*(f[codec][key] for f in found), strict=True))
            for key in ("round_s", "whole_s")
        }
        cpu_s = sum(statistics.median(f[codec]["cpu_s"]) for f in found)
        interface = statistics.mean(f[codec]["interface"] for f in found) / rounds
        yield {
            "members": members,
            "rate": rate,
            "codec": codec,
            "ideal_s": ideal_s,
            **times,
            "ratio": times["round_s"] / ideal_s,
            "cpus": cpu_s / times["round_s"],
            "whole_ratio": times["whole_s"] / ideal_s,
            "interface_bytes": interface,
            "bytes_ratio": interface / formula_bytes(reduction, members),
        }


def run_members(
    members: int,
    rate: str | None,
    codecs: Sequence[str],
    values: int,
    rounds: int,
    security: str,
    *,
    one_way: bool = False,
) -> list[dict[str, Any]]:
    """Run all members, each in a site of its own, and return what each has measured, by codec."""
    with Sites(count=members, rate=rate) as sites, tempfile.TemporaryDirectory() as folder:
        throw_away(members).save(Path(folder))
        processes = []
        for worker, site in enumerate(sites):
            task = {
                "worker": worker,
                "members": members,
                "address": f"{sites[0].address}:{PORT}",
                "codecs": codecs,
                "values": values,
                "rounds": rounds,
                "keys": "none" if security == "none" else f"{folder}/worker-{worker}",
                "sends": worker == 0 or not one_way,
                "out": f"{folder}/{worker}.json",
            }
            command = [sys.executable, __file__, "--child", json.dumps(task)]
            processes.append(site.popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))
        if any([process.wait(timeout=900) for process in processes]):  # noqa: C419 - wait for all of them
            raise RuntimeError("a member failed")
        return [json.loads(Path(folder, f"{worker}.json").read_text()) for worker in range(members)]


# ---------------------------------------------------------------------- one member


def child(
    worker: int,
    members: int,
    address: str,
    codecs: Sequence[str],
    values: int,
    rounds: int,
    keys: str,
    sends: bool,
    out: str,
) -> None:
    """One member, in its site: all codecs in turn."""
    torch.set_num_threads(1)
    gc.freeze()  # as `atoll train` does
    link = atoll.connect(address, worker=worker, workers=members, keys=keys, deadline_s=300, join_s=60)
    link.join({}, 1.0)
    bench = Bench(link, sends, torch.randn(values, generator=torch.Generator().manual_seed(worker)) * 1e-3)
    found = {codec: bench.rounds(codec, rounds) for codec in codecs}
    bench.meet()
    link.close()
    Path(out).write_text(json.dumps(found))


class Bench:
    """One member's rounds, timed."""

    def __init__(self, link: Any, sends: bool, delta: torch.Tensor) -> None:
        self.link, self.sends, self.delta = link, sends, delta
        self.number = 0
        self.fragment = 0  # each codec has one: all payloads of a fragment have the same size

    def meet(self) -> None:
        """Let all begin at the same time: a round of next to nothing."""
        self.number += 1
        nothing = Contribution(self._member(), torch.zeros(4, dtype=torch.uint8))
        self.link.open(RoundId(self.number, 0), nothing, Reduction(Codec("fp32"), 1)).wait()

    def rounds(self, codec: str, rounds: int) -> dict[str, Any]:
        """Seconds of the round alone, and with what is computed around it; bytes that the line has sent."""
        reduction = Reduction(Codec(codec), self.delta.numel())
        self.fragment += 1
        round_s, whole_s, cpu_s, all_s, interface = [], [], [], [], 0
        for number in range(rounds + 1):  # the first is a warm-up
            began = time.perf_counter()
            payload = reduction.codec.encode(self.delta)
            encode_s = time.perf_counter() - began
            before = _interface_bytes()
            self.meet()
            sent, cpu_before = time.perf_counter(), time.process_time()
            got = self._round(payload, reduction)
            there, used_s = time.perf_counter(), time.process_time() - cpu_before
            decoded = [reduction.codec.decode(one, reduction.numel) for one in got]
            if len(decoded) > 1:
                weighted_mean(decoded, [1.0] * len(decoded))
            ended = time.perf_counter()
            cpu_before = time.process_time()
            self.meet()  # all have sent all
            used_s += time.process_time() - cpu_before
            sent_s = time.perf_counter() - sent
            if number:
                round_s.append(there - sent)
                cpu_s.append(used_s)
                all_s.append(sent_s)
                whole_s.append(encode_s + ended - sent)
                interface += _interface_bytes() - before
        return {"round_s": round_s, "whole_s": whole_s, "cpu_s": cpu_s, "all_s": all_s, "interface": interface}

    def _round(self, payload: torch.Tensor, reduction: Reduction) -> Sequence[torch.Tensor]:
        offer = Contribution(self._member(), payload) if self.sends else None
        pending = self.link.open(RoundId(self.number, self.fragment), offer, reduction)
        completed = pending.wait()
        return completed.payloads if completed.reduced is None else [completed.reduced]

    def _member(self) -> Member:
        return Member(self.link.worker, 1.0, 0, 0)


def _interface_bytes() -> int:
    """What this site's line has sent."""
    shown = subprocess.run(["ip", "-json", "-stats", "link", "show", LINE], capture_output=True, check=True, text=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


if __name__ == "__main__":
    main()
