"""Makes sections of runs that never were, for tests of the page."""

import math
from typing import Any

Sections = dict[str, Any]
POINTS = 120
BEGAN = 1_700_000_000.0


def sections(workers: int = 4, seconds: float = 7200.0, **run: Any) -> Sections:
    """Returns all sections of a run; worker 2 was away for a while, and the last worker is away now."""
    steps, step = 40_000, int(2.5 * seconds)
    along = [(at + 1) * step / POINTS for at in range(POINTS)]
    return {
        "run": _run(workers, steps, step, seconds) | run,
        "loss": {
            "anchor": [_evaluation(at * step / 12, seconds / step) for at in range(1, 13)],
            "workers": {str(worker): _losses(worker, along, seconds / step) for worker in range(workers)},
        },
        "speed": {
            "step": along,
            "seconds": [x / step * seconds for x in along],
            "tokens_per_s": [28_000 + 500 * math.sin(x) for x in along],
            "utilisation": [0.93 + 0.02 * math.sin(x) for x in along],
            "lr": [3e-4 * min(1, x / 1000) for x in along],
        },
        "lanes": {
            "end_s": seconds,
            "workers": [_lane(worker, workers, seconds) for worker in range(workers)],
            "views": [[0.0, 1], [seconds * 0.6, 2]],
        },
        "now": window(workers, seconds - 60, seconds),
        "traffic": _traffic(workers, seconds),
        "outer": {
            "fragments": 5,
            "step": along,
            "norm": _band([2 + 3 * math.exp(-at / 30) for at in range(POINTS)], 0.4),
            "cosine": _band([0.3 + 0.2 * math.exp(-at / 30) for at in range(POINTS)], 0.1),
        },
        "faults": {"count": 2, "latest": [_fault(seconds - 130, 3, "lost"), _fault(None, 1, "guarded")]},
        "samples": [
            {"step": step, "prompt": "It was evening. ", "text": "The harbour was quiet\nwhen the boats came in."},
            {"step": 100, "prompt": "It was evening. ", "text": "the"},
        ],
        "settings": [["sync.method", "streaming"], ["train.lr", "0.0003"], ["link.elastic", "true"]],
        "scores": [["arc_easy", "2,376", "43.20 ± 0.98 %", "25.0 %"]],
    }


def window(workers: int, from_s: float, to_s: float) -> Sections:
    """Returns single waits and rounds of a window of time."""
    width = (to_s - from_s) / 30
    rounds = [[from_s + at * width, from_s + (at + 1.5) * width, 100 + at, at % 5, at % 2] for at in range(28)]
    waits = [[end - width / 4, end] for _, end, *_ in rounds[::3]]
    return {
        "from_s": from_s,
        "to_s": to_s,
        "workers": [
            {"worker": worker, "waits": waits, "flights": rounds, "on_their_way": [[128, 3, to_s - width]]}
            for worker in range(workers)
        ],
    }


def _run(workers: int, steps: int, step: int, seconds: float) -> Sections:
    return {
        "name": "four-sites",
        "method": "streaming",
        "workers": workers,
        "steps": steps,
        "parameters": 1_030_000_000,
        "period": 100,
        "delay": [5] * workers,
        "codec": "e3m0",
        "device": "cpu",
        "state": "training",
        "state_words": "Step 18,000 of 40,000.",
        "since": None,
        "step": step,
        "tokens": step * 8192 * workers,
        "seconds": seconds,
        "left_s": 7512.0,
        "ends_at": BEGAN + seconds + 7512,
        "tokens_per_s": 28_000.0,
        "utilisation": 0.934,
        "lr": 2.7e-4,
        "updated": BEGAN + seconds,
        "read": 1.0,
    }


def _loss(step: float, worker: int = 0) -> float:
    return 3.05 + 7.2 * math.exp(-step / 900) + 1.5 * math.exp(-step / 9000) + 0.05 * worker


def _evaluation(step: float, step_s: float) -> list[float | bool]:
    return [int(step), step * 32768, step * step_s, _loss(step) - 0.04, int(step) - 60, True]


def _losses(worker: int, along: list[float], step_s: float) -> Sections:
    curve = _band([_loss(x, worker) for x in along], 0.08)
    return {"step": along, "tokens": [x * 32768 for x in along], "seconds": [x * step_s for x in along], **curve}


def _band(mean: list[float], width: float) -> Sections:
    return {"mean": mean, "low": [value - width for value in mean], "high": [value + width for value in mean]}


def _lane(worker: int, workers: int, seconds: float) -> Sections:
    spans: list[list[Any]] = [[0.0, seconds, "training"]]
    marks: list[list[Any]] = [[0.0, "joined", f"worker {worker} joined"]]
    if worker == 2:
        gone, back, level = seconds * 0.6, seconds * 0.7, seconds * 0.75
        spans = [
            [0.0, gone, "training"],
            [gone, back, "away"],
            [back, level, "catching up"],
            [level, seconds, "training"],
        ]
        marks += [[gone, "lost", "connection reset by peer"], [back, "joined", "joined again"]]
    elif worker == workers - 1 and worker:
        spans = [[0.0, seconds - 130, "training"], [seconds - 130, seconds, "away"]]
        marks.append([seconds - 130, "lost", "silent for 5 s"])
    return {
        "worker": worker,
        "spans": spans,
        "marks": marks,
        "from_s": 0.0,
        "bucket_s": seconds / 400,
        "waiting": [0.05 + 0.04 * math.sin(at) for at in range(400)],
        "flying": [1.5 + math.sin(at) for at in range(400)],
    }


def _traffic(workers: int, seconds: float) -> Sections:
    seats = range(workers)
    return {
        "pairs": [
            {
                "from": a,
                "to": b,
                "sent_bytes": 3_100_000_000,
                "rate": 2.4e6,
                "capacity": 12.5e6 if a else None,
                "at_s": seconds,
            }
            for a in seats
            for b in seats
            if a != b
        ],
        "workers": [
            {
                "worker": w,
                "sent_bytes": 9.3e9,
                "received_bytes": 9.1e9,
                "rate": 7.9e6,
                "payload_bytes": 3.1e9,
            }
            for w in seats
        ],
        "planned": {"words": "8.2 MB/s a worker on the wire", "bytes_per_s": 8.2e6, "utilisation": 0.95},
        "data_parallel_bytes": 1.87e12,
    }


def _fault(at_s: float | None, worker: int, kind: str) -> Sections:
    return {"at_s": at_s, "step": 1200, "worker": worker, "kind": kind, "words": f"worker {worker} was {kind}"}


def report(runs: list[Sections]) -> Sections:
    """Returns the content of a frozen page of these runs; the first takes a hundred times as long on the link."""
    names = [one["run"]["name"] for one in runs]
    steps = [[row[0] for row in one["loss"]["anchor"]] for one in runs]
    quick = [1.0 if n else 100.0 for n in range(len(runs))]
    return {
        "title": "Runs side by side",
        "lead": "The reference ends at a held-out loss of 3.210.",
        "claims": ["holds: little is lost"],
        "notes": ["They have not trained on the same number of tokens."],
        "summary": {
            "columns": ["run", "held-out loss"],
            "rows": [[name, "3.210"] for name in names],
            "tags": ["reference", *["" for _ in names[1:]]],
            "words": "Held-out loss is in nats per token.",
        },
        "sent": [
            {"name": name, "run": n, "sent_bytes": 4e9 / (1 + 39 * n), "words": f"{n} GB"}
            for n, name in enumerate(names)
        ],
        "modelled": {
            "link": "100 Mbit/s",
            "words": "How each run would begin.",
            "window_s": 10.0,
            "lanes": [
                {
                    "run": n,
                    "workers": [0, 2] if n else [],
                    "end_s": 100.0,
                    "utilisation": 0.5,
                    "waits": [[2, 6]],
                    "busy": [[1, 6]],
                }
                for n in range(len(runs))
            ],
            "clocks": [
                {"step": at, "seconds": [slow * step / 100 for step in at]}
                for at, slow in zip(steps, quick, strict=True)
            ],
        },
        "tables": [
            {
                "title": "Facts",
                "words": "",
                "columns": ["", *names],
                "rows": [["codec", *["e3m0" for _ in names]], ["period", *map(str, range(len(names)))]],
            }
        ],
        "runs": runs,
    }
