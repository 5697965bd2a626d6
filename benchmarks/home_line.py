"""LoRA over home lines: examples/lora_home_line.py between two sites with 5 Mbit/s up and 20 Mbit/s down.

    python benchmarks/home_line.py [--steps 300]

Prints what worker 0 of the example prints, then the seconds that single rounds of the sizes in its tables take: medians
over rounds that both workers begin together. Needs root, iproute2, PEFT and TRL; workers have throw-away keys.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import atoll
from atoll.link.net.run_keys import throw_away_folder
from sites import Sites

UP, DOWN = "5mbit", "20mbit"
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lora_home_line.py"
ROUNDS = ((278_528, "e3m0"), (278_528, "bf16"), (722_816, "e3m0"), (722_816, "bf16"), (40_000_000, "e3m0"))
"""Values and codec."""
COUNT = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        rounds(int(given.child[0]), given.child[1], given.child[2])
        return
    with throw_away_folder(2) as keys:
        example = [str(EXAMPLE), "{worker}", "{address}", "--keys", "{keys}", "--steps", str(given.steps)]
        print(run([*example, "--out", str(keys / "out")], keys), flush=True)
        print(run([__file__, "--child", "{worker}", "{address}", "{keys}"], keys))


def run(command: list[str], keys: Path) -> str:
    """Run a script as both workers, each in its own site; return what worker 0 prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with Sites(count=2) as sites:
        processes = []
        for worker, site in enumerate(sites):
            site.rate(UP, DOWN)
            places = {"worker": worker, "address": f"{sites[0].address}:29500", "keys": keys / f"worker-{worker}"}
            filled = [sys.executable, *(part.format(**places) for part in command)]
            processes.append(site.popen(filled, env=environment, stdout=subprocess.PIPE, stderr=None, text=True))
        told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a worker failed; its error is above")
    return str(told[0])


def rounds(worker: int, address: str, keys: str) -> None:
    """Exchange deltas of every size with the other worker, and print how long that takes."""
    host, _, port = address.partition(":")
    for number, (values, codec) in enumerate(ROUNDS):
        model = torch.nn.Linear(values, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        link = atoll.connect(f"{host}:{int(port) + number}", worker=worker, workers=2, keys=keys)
        outer = atoll.OuterLoop(model, atoll.DiLoCo(period=1, codec=codec), link)
        took_s = []
        for step in range(COUNT + 1):
            torch.nn.init.normal_(model.weight, std=1e-3, generator=torch.Generator().manual_seed(2 * step + worker))
            link.gather(f"ready {step}", True)
            before_s = outer.counters.wait_s
            outer.step()
            took_s.append(outer.counters.wait_s - before_s)
        outer.finish()
        link.close()
        print(f"{values:,} values in {codec}: {statistics.median(took_s[1:]):.2f} s a round", flush=True)


if __name__ == "__main__":
    main()
