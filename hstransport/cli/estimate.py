"""``hstransport estimate``: what a run will take, before anyone starts it."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..client.progress import duration
from ..errors import ConfigError
from ..settings import LayerChoice, parse_layers
from .checks import natural, positive_float, positive_int
from .units import size

HELP = "bytes, time and ring size of a run, before it is started"
DESCRIPTION = (
    "Say how many bytes a run writes, whether they fit, how long it takes, how big a ring."
)
EPILOG = """\
example:
  hstransport estimate --model /models/Kimi-K2.5 --layers 3,31,59,final --tokens 17_300_000 \\
      --out /data/shards --tokens-per-s 20000
  hstransport estimate --hidden 4096 --num-layers 36 --prompts prompts.jsonl

exit status: 0; 1 it does not fit beside what is in --out; 2 bad arguments.
"""

RATIO = 1.49
PACK_GBS = 0.65
"""GB/s that the consumer stores with one packing thread: the whole writer, as measured in
benchmarks/README.md."""
_PAUSE_S = 10.0
"""The ring should last so long while the consumer does nothing."""
_CHUNK_TOKENS = 8192
"""The largest forward pass of a server that was not told otherwise."""
_MIN_RING = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="a model's folder, or its config.json")
    add("--hidden", type=positive_int, metavar="H", help="width of a state, in place of --model")
    add("--num-layers", type=positive_int, metavar="N", help="decoder layers, with --hidden")
    add(
        "--layers",
        default="eagle3,final",
        help="as HSTRANSPORT_LAYERS: canonical ids, eagle3, final (default: %(default)s)",
    )
    add("--tokens", type=natural, metavar="N", help="rows to capture")
    add("--prompts", type=Path, metavar="FILE", help="count the tokens of this file's prompts")
    add("--tokenizer", metavar="PATH", help="to count with (default: --model's)")
    add("--ratio", type=positive_float, default=RATIO, help="raw to stored (default: %(default)s)")
    add(
        "--gbs",
        type=positive_float,
        default=PACK_GBS,
        help="GB/s that the consumer packs (default: %(default)s, one thread)",
    )
    add("--tokens-per-s", type=positive_float, metavar="N", help="prefill rate of the server")
    add("--out", type=Path, metavar="DIR", help="where the shards would go: is there room?")
    add("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True)
class Estimate:
    """Bytes, seconds and advice; ``None`` is what could not be told from the arguments."""

    tokens: int
    tokens_are_exact: bool
    layers: list[int | str]
    hidden: int
    row_bytes: int
    raw_bytes: int
    stored_bytes: int
    seconds_packing: float
    seconds_serving: float | None
    ring_bytes: int
    free_bytes: int | None
    fits: bool | None


def run(arguments: argparse.Namespace) -> int:
    found = estimate(arguments)
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        print("\n".join(f"{name:<10} {words}" for name, words in rows(found, arguments)))
    return 1 if found.fits is False else 0


def estimate(arguments: argparse.Namespace) -> Estimate:
    """All figures; raises ConfigError naming the argument that is wrong or missing."""
    hidden, num_layers = _shape(arguments)
    choice = _layers(arguments.layers)
    ids = choice.resolve(num_layers)
    wrong = [k for k in ids if not 1 <= k < num_layers]
    if wrong:
        raise ConfigError(
            f"--layers: {wrong[0]} cannot be captured: allowed are 1 to {num_layers - 1}; for the "
            "state after the last layer and the final norm use 'final'"
        )
    names: list[int | str] = [*ids, *(["final"] if choice.final else [])]
    tokens, exact = _tokens(arguments)
    row_bytes = len(names) * hidden * 2
    raw = tokens * row_bytes
    stored = round(raw / arguments.ratio)
    free = None if arguments.out is None else _free(arguments.out)
    rate = arguments.tokens_per_s
    return Estimate(
        tokens=tokens,
        tokens_are_exact=exact,
        layers=names,
        hidden=hidden,
        row_bytes=row_bytes,
        raw_bytes=raw,
        stored_bytes=stored,
        seconds_packing=raw / (arguments.gbs * 1e9),
        seconds_serving=tokens / rate if rate else None,
        ring_bytes=ring_bytes(row_bytes, rate),
        free_bytes=free,
        fits=None if free is None else stored <= free,
    )


def ring_bytes(row_bytes: int, tokens_per_s: float | None) -> int:
    """A ring for the rows of some seconds, or of a few large passes: a power of two of bytes."""
    wanted = max(
        _MIN_RING, 4 * _CHUNK_TOKENS * row_bytes, (tokens_per_s or 0) * _PAUSE_S * row_bytes
    )
    return int(1 << (int(wanted) - 1).bit_length())


def rows(e: Estimate, arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(name, words) as they are shown."""
    about = "" if e.tokens_are_exact else "about "
    found = [
        ("tokens", f"{about}{e.tokens:,}"),
        ("layers", f"{', '.join(map(str, e.layers))}; {e.row_bytes:,} bytes a token"),
        ("raw", size(e.raw_bytes)),
        ("stored", f"{size(e.stored_bytes)} (ratio {arguments.ratio:g})"),
        ("packing", f"{duration(e.seconds_packing)} at {arguments.gbs:g} GB/s"),
    ]
    if e.seconds_serving is not None:
        slower = "packing" if e.seconds_packing > e.seconds_serving else "serving"
        words = f"{duration(e.seconds_serving)} at {arguments.tokens_per_s:,.0f} tokens/s"
        found.append(("serving", f"{words}: {slower} sets the pace"))
        if slower == "packing":
            found.append(("advice", "give the consumer more --threads"))
    found.append(("ring", f"HSTRANSPORT_RING_BYTES={e.ring_bytes >> 30}GiB"))
    if e.free_bytes is not None:
        verdict = "fits" if e.fits else "does NOT fit"
        found.append(("disk", f"{verdict}: {size(e.free_bytes)} are free in {arguments.out}"))
    return found


def _shape(arguments: argparse.Namespace) -> tuple[int, int]:
    """(hidden size, decoder layers)."""
    by_hand = arguments.hidden is not None or arguments.num_layers is not None
    if (arguments.model is None) == (not by_hand):
        raise ConfigError("give either --model, or --hidden and --num-layers")
    if by_hand:
        if arguments.hidden is None or arguments.num_layers is None:
            raise ConfigError("--hidden and --num-layers go together")
        return arguments.hidden, arguments.num_layers
    path = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise ConfigError(f"--model: {path} is not JSON: {e}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]  # a model that also sees
    try:
        hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
        return int(hidden), int(num_layers)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"--model: {path} names no hidden_size and num_hidden_layers: give --hidden and "
            "--num-layers"
        ) from None


def _layers(text: str) -> LayerChoice:
    try:
        return parse_layers(text)
    except ConfigError as e:
        raise ConfigError(str(e).replace("HSTRANSPORT_LAYERS=", "--layers ", 1)) from None


def _tokens(arguments: argparse.Namespace) -> tuple[int, bool]:
    """(tokens, whether they were counted or given and not guessed)."""
    if (arguments.tokens is None) == (arguments.prompts is None):
        raise ConfigError("give either --tokens or --prompts")
    if arguments.tokens is not None:
        return arguments.tokens, True
    return _count(arguments.prompts, arguments.tokenizer or _folder(arguments.model))


def _count(path: Path, tokenizer_path: str | None) -> tuple[int, bool]:
    from ..client.chat import ChatTokenizer
    from ..client.prompts import BadPrompts, read_prompts

    loaded: list[ChatTokenizer] = []

    def tokenizer() -> ChatTokenizer:
        if tokenizer_path is None:
            raise ConfigError("--prompts has messages: name the model's folder with --tokenizer")
        if not loaded:
            loaded.append(ChatTokenizer.load(tokenizer_path))
        return loaded[0]

    found = read_prompts(path, tokenizer)
    if found.bad:
        raise BadPrompts(path, found.bad, "correct them")
    tokens, exact = 0, True
    for prompt in found.prompts:
        if prompt.tokens is not None:
            tokens += len(prompt.tokens)
        elif tokenizer_path is not None:
            tokens += len(tokenizer().encode_text(prompt.text or ""))
        else:
            # Without a tokenizer: English text has about four characters a token.
            tokens += max(len(prompt.text or "") // 4, 1)
            exact = False
    return tokens, exact


def _folder(model: Path | None) -> str | None:
    if model is None:
        return None
    return str(model if model.is_dir() else model.parent)


def _free(out: Path) -> int:
    """Free bytes where ``out`` is, or would be made."""
    place: Any = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
