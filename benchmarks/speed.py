"""Draws the first picture of README from the measurements of wan.py: how fast two workers train over a slow line.

    python benchmarks/speed.py

It reads benchmarks/results/wan.json and writes docs/images/speed.png. The figures that are drawn are also written into
the image as text, where tests/test_docs.py compares them with wan.json.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "benchmarks" / "results" / "wan.json"
IMAGE = ROOT / "docs" / "images" / "speed.png"
METHODS = {
    "ddp": "DDP over gloo, fp32",
    "diloco": "atoll DiLoCo, fp32",
    "torchft": "torchft DiLoCo, fp32",
    "torchft-delay": "torchft DiLoCo, fp32, delayed",
    "eager": "atoll Eager, 4 bit",
    "streaming": "atoll Streaming, 4 bit",
}
RATES_MBIT = (20, 100)
ATOLL, OTHER, INK, MUTED = "#00796b", "#b8c0c8", "#1b1f24", "#59636e"


def speeds(workers: int = 2) -> dict[str, dict[str, int]]:
    """Return the measured speed of every method, by rate: per cent of the same workers' speed without a network."""
    cells = json.loads(MEASURED.read_text(encoding="utf-8"))["cells"]
    share = {(cell["method"], cell["rate_mbit"]): cell["share"] for cell in cells if cell["workers"] == workers}
    return {str(rate): {method: round(100 * share[method, rate]) for method in METHODS} for rate in RATES_MBIT}


def picture() -> Figure:
    """Return one panel of horizontal bars per rate."""
    figure = Figure(figsize=(8.4, 2.7), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(RATES_MBIT), sharey=True)
    for axes, (rate, speed) in zip(panels, speeds().items(), strict=True):
        colours = [ATOLL if METHODS[method].startswith("atoll") else OTHER for method in speed]
        bars = axes.barh([METHODS[method] for method in speed], list(speed.values()), 0.72, color=colours)
        axes.bar_label(bars, fmt="%d %%", padding=3, fontsize=9, color=INK)
        axes.set_title(f"{rate} Mbit/s between workers", fontsize=10, color=INK, loc="left")
        axes.set_xlim(0, 118)
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=9)
        axes.spines[:].set_visible(False)
    panels[0].invert_yaxis()
    caption = "training speed, % of the same two workers without a network; 7 million parameters, benchmarks/wan.py"
    figure.supxlabel(caption, fontsize=8.5, color=MUTED)
    return figure


if __name__ == "__main__":
    picture().savefig(IMAGE, dpi=170, metadata={"Description": json.dumps(speeds()), "Software": None})
    print(f"wrote {IMAGE.relative_to(ROOT)}")
