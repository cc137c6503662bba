"""Draw the README's picture: tokens per second with capture, beside no capture and torch.save.

    python benchmarks/picture.py [benchmarks/results/serving_h200.json] [--out FILE.png]

Needs matplotlib (benchmarks/requirements.txt), the result of serving_gpu.py, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

# Okabe and Ito's colours, which the colour-blind can tell apart; and names that stand at the bars.
WAYS = {
    "off": ("no capture", "#999999"),
    "hstransport": ("hstransport", "#0072B2"),
    "baseline": ("torch.save", "#E69F00"),
}
PANELS = {"prefill": "Prefill", "decode": "Decode"}


def draw(result: dict[str, Any], out: Path) -> None:
    """``result``: what serving_gpu.py wrote."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, (kind, title) in zip(axes, PANELS.items(), strict=True):
        speeds = [result[f"{way}_{kind}_tokens_per_s"] for way in WAYS]
        names, colours = zip(*WAYS.values(), strict=True)
        bars = axis.barh(names, speeds, color=colours, height=0.62)
        ratios = [1.0, result[f"{kind}_ratio"], result[f"baseline_{kind}_ratio"]]
        words = [f"{s:,.0f}  ({100 * r:.1f} %)" for s, r in zip(speeds, ratios, strict=True)]
        words[0] = f"{speeds[0]:,.0f}"
        axis.bar_label(bars, words, padding=4, fontsize=10)
        axis.set_xlim(0, max(speeds) * 1.5)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.locator_params(axis="x", nbins=5)
        axis.set_title(f"{title}: {result[kind]}", fontsize=10, loc="left")
        axis.set_xlabel("tokens a second (share: median of the rounds)", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0, labelsize=10)
    machine = result["machine"].get("gpu") or result["machine"]["cpu"]
    layers = len(result["layers"].split(","))
    axes[0].invert_yaxis()
    figure.suptitle(
        f"SGLang with {result['model']} ({result['weights']}) on {machine}: "
        f"{layers} states of width {result['hidden']} a token",
        fontsize=11,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = RESULTS / "serving_h200.json"
    p.add_argument("result", type=Path, nargs="?", default=default, help="of serving_gpu.py")
    p.add_argument("--out", type=Path, help="(default: results/throughput_MACHINE.png)")
    arguments = p.parse_args()
    try:
        result = json.loads(arguments.result.read_text())
    except (OSError, ValueError) as e:
        print(f"picture.py: {arguments.result.name}: {e}", file=sys.stderr)
        return 2
    machine = arguments.result.stem.removeprefix("serving_")
    out = arguments.out or RESULTS / f"throughput_{machine}.png"
    try:
        draw(result, out)
    except KeyError as e:
        print(
            f"picture.py: {arguments.result.name} has no {e}: not serving_gpu.py's", file=sys.stderr
        )
        return 2
    print(f"drawn: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
