"""``hstransport extract``: send every prompt of a file, until each has its whole sample on disk."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ..client.chat import ChatTokenizer
from ..client.engine import LocalEngine, capture_environment
from ..client.extract import Outcome, Settings, extract
from ..client.http import ModelInfo, Server
from ..client.progress import Progress, duration
from ..client.prompts import BadPrompts, PromptFile, read_prompts
from ..client.target import Refused, Target, Unreachable
from ..errors import ConfigError
from . import access
from .checks import natural, positive_float, positive_int

HELP = "run prompts through a model and see that each ends whole in a directory of shards"
DESCRIPTION = """\
Run every prompt of a file through a model that SGLang serves, until its states are whole in a
directory of shards. With --server, the prompts go to a server that captures (HSTRANSPORT=1), while
hstransport-consumer writes the directory. With --model no server is needed: SGLang's Engine and a
consumer are started for the time it takes, with the same weights, kernels and quantization. Prompts
whose samples are already whole are not sent again, so the same command goes on where it was
stopped."""
EPILOG = """\
a line of FILE.jsonl has one of
  {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
  {"text": "Once upon a time"}
  {"input_ids": [1, 2, 3]}
and may have "id" (a string; default: a hash of what is sent), "labels" (a map of scalars) and
"loss_mask" (0 or 1 for each token; of messages it is made here: 1 on what the assistant said).
A chat that ends with the assistant's message is only read by the model; any other gets the
generation prompt.

example:
  hstransport-consumer --out /data/shards &
  hstransport extract --server http://127.0.0.1:30000 --prompts prompts.jsonl --out /data/shards
  hstransport extract --model MODEL --prompts prompts.jsonl --out /data/shards -- --tp-size 2

With --model, what follows -- are arguments of sglang.launch_server, and the other settings of the
README's table are taken from the environment (HSTRANSPORT_RING_BYTES, …; HSTRANSPORT_BLOCK_S is
120). The logs of the engine and of the consumer are kept where something went wrong.

A sample that is not whole has a state of the README's table, or refused (the server said no),
failed (no answer), not_stored (answered, and not in DIR) or not_asked.

exit status: 0 every sample is whole; 1 some are not (each is named); 2 bad arguments, prompts or
directory, nothing was sent; 3 the server cannot be reached, or fails every request, or with --model
the engine does not start, or it or its consumer ends too early; 130 interrupted twice, or before
anything was sent. What is stored stays stored in all cases.
"""
_NAMED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL", help="such as http://127.0.0.1:30000")
    where.add_argument("--model", metavar="PATH", help="folder or name of a model, as for SGLang")
    add("--prompts", required=True, type=Path, metavar="FILE", help="prompts, one JSON a line")
    add("--out", required=True, type=Path, metavar="DIR", help="the directory of shards")
    add("--concurrency", type=positive_int, default=32, help="requests at once (default: 32)")
    add(
        "--max-new-tokens",
        type=positive_int,
        default=1,
        help="tokens to generate after each prompt (default: 1, the fewest a server takes)",
    )
    add(
        "--retries",
        type=natural,
        default=2,
        help="further tries of a request that failed, or whose sample is not whole (default: 2)",
    )
    access.add_arguments(parser)
    add(
        "--settle-timeout",
        type=positive_float,
        default=30.0,
        metavar="SECONDS",
        help="after the answers, wait for the consumer until nothing came for this long "
        "(default: 30)",
    )
    add("--layers", metavar="LIST", help="with --model: as HSTRANSPORT_LAYERS, such as 2,16,final")
    add("--rows", choices=("prompt", "all"), help="with --model: as HSTRANSPORT_ROWS")
    add("--threads", type=positive_int, help="with --model: packing threads (default: 1)")
    add("--limit", type=positive_int, metavar="N", help="only the first N prompts")
    add("--skip-bad", action="store_true", help="leave lines that cannot be sent out")
    add("--tokenizer", metavar="PATH", help="for messages (default: the model's)")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the tokenizer",
    )
    add("--json", action="store_true", help="print one JSON object in place of the summary")
    add("--quiet", action="store_true", help="no progress")
    add(
        "engine",
        nargs="*",
        metavar="-- ARGUMENT",
        help="with --model: arguments of sglang.launch_server",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.out.exists() and not arguments.out.is_dir():
        raise NotADirectoryError(f"--out {arguments.out} is a file; name the directory of shards")
    progress = Progress(quiet=arguments.quiet)
    target: Target
    if arguments.server is not None:
        target, info = _server(arguments)
    else:
        target, info = _engine(arguments, progress)
    tokenizer = functools.cache(
        lambda: ChatTokenizer.load(
            arguments.tokenizer or info.tokenizer, trust_remote_code=arguments.trust_remote_code
        )
    )
    found = read_prompts(arguments.prompts, tokenizer, arguments.limit)
    if found.bad and not arguments.skip_bad:
        raise BadPrompts(
            arguments.prompts, found.bad, "correct them, or leave them out with --skip-bad"
        )
    if not found.prompts:
        raise ConfigError(f"{arguments.prompts} has no prompt that can be sent")
    _warn_of_renamed(found)
    settings = Settings(
        out=arguments.out,
        concurrency=arguments.concurrency,
        max_new_tokens=arguments.max_new_tokens,
        retries=arguments.retries,
        settle_timeout_s=arguments.settle_timeout,
    )
    outcome = extract(target, found.prompts, settings, progress)
    if arguments.json:
        print(json.dumps(_summary_dict(arguments, info.model, found, outcome)))
    else:
        print(_summary(arguments, found, outcome))
    if outcome.server_lost:
        return 3
    return 1 if outcome.not_whole or found.bad else 0


def _server(arguments: argparse.Namespace) -> tuple[Server, ModelInfo]:
    """Raises Unreachable when nobody answers."""
    for name in ("layers", "rows", "threads", "engine"):
        if getattr(arguments, name):
            what = "what follows --" if name == "engine" else f"--{name}"
            raise ConfigError(f"{what} needs --model: it is for the server or the consumer to set")
    target = access.connect(arguments)
    try:
        return target, target.model_info()
    except Unreachable as e:
        raise Unreachable(
            f"no server answers at {arguments.server} ({e}): start it with HSTRANSPORT=1 python -m "
            "sglang.launch_server ..., or correct --server"
        ) from None
    except Refused as e:
        raise ConfigError(f"--server {arguments.server}: {e}") from None


def _engine(arguments: argparse.Namespace, progress: Progress) -> tuple[LocalEngine, ModelInfo]:
    """Nothing is started yet."""
    if arguments.api_key_env is not None:
        raise ConfigError("--api-key-env needs --server")
    environ = capture_environment(
        os.environ, arguments.out, layers=arguments.layers, rows=arguments.rows
    )
    engine = LocalEngine(
        arguments.model,
        arguments.out,
        arguments=arguments.engine,
        environ=environ,
        threads=arguments.threads or 1,
        timeout_s=arguments.timeout,
        say=progress.say,
    )
    return engine, ModelInfo(arguments.model, arguments.model)


def _warn_of_renamed(found: PromptFile) -> None:
    for line, old, new in found.renamed[:_NAMED]:
        print(f"hstransport: line {line}: id {old!r} repeats, is now {new!r}", file=sys.stderr)
    if len(found.renamed) > _NAMED:
        more = len(found.renamed) - _NAMED
        print(f"hstransport: {more} more lines repeat an id", file=sys.stderr)


def _summary_dict(
    arguments: argparse.Namespace, model: str, found: PromptFile, outcome: Outcome
) -> dict[str, Any]:
    return {
        "server": arguments.server,
        "model": model,
        "prompts": str(arguments.prompts),
        "out": str(arguments.out),
        **outcome.as_dict(),
        "bad_lines": [{"line": line, "reason": reason} for line, reason in found.bad],
        "renamed": [{"line": n, "id": old, "now": new} for n, old, new in found.renamed],
    }


def _summary(arguments: argparse.Namespace, found: PromptFile, o: Outcome) -> str:
    lines = [
        f"{o.whole + o.already_whole} of {len(found.prompts)} samples are whole in {arguments.out}"
        f" ({o.already_whole} were before); {o.requests} requests, {o.prompt_tokens:,} tokens, "
        f"{duration(o.seconds)}"
    ]
    if found.bad:
        lines.append(f"{len(found.bad)} lines could not be sent:")
        lines += [f"  line {number}: {reason}" for number, reason in found.bad[:_NAMED]]
    if o.not_whole:
        states = Counter(job.state for job in o.not_whole)
        counts = ", ".join(f"{n} {state}" for state, n in states.most_common())
        lines.append(f"{len(o.not_whole)} are not whole ({counts}):")
        for job in o.not_whole[:_NAMED]:
            reason = f": {job.detail}" if job.detail else ""
            lines.append(f"  {job.prompt.id} (line {job.prompt.line}): {job.state}{reason}")
        if len(o.not_whole) > _NAMED:
            lines.append(f"  and {len(o.not_whole) - _NAMED} more (--json names them all)")
    if o.nothing_arrived and arguments.server is not None:
        lines.append(
            f"no consumer seems to be writing {arguments.out}: start hstransport-consumer --out "
            f"{arguments.out}, and see that the server runs with HSTRANSPORT=1; then run this again"
        )
    if o.server_lost:
        lost = "the server was lost" if arguments.server is not None else "stopped early"
        lines.append(f"{lost}: {o.server_lost}")
    if o.interrupted:
        lines.append("interrupted; the same command goes on from here")
    return "\n".join(lines)
