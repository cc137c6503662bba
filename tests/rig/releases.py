"""What the plugin needs of SGLang, release by release, and the table of it in docs/releases.md.

PYTHONPATH=tests python -m rig.releases    # asks pip what there is, rewrites the table
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from unittest.mock import patch

from hstransport.patching import known_patches
from hstransport.settings import Settings
from hstransport.sglang import hooks
from hstransport.sglang.plugin import Plugin

from .build_env import TRIED
from .sglang_source import ROOT, NoDownload, Source, arguments, offered

PAGE = ROOT / "docs" / "releases.md"
HEAD = (
    "SGLang",
    "hstransport is loaded by",
    "weight updates",
    "decode graphs",
    "rank of a data-parallel server",
    "models with inner layers",
    "served in the tests",
)

_SRT = "sglang.srt"
_BATCH = f"{_SRT}.managers.schedule_batch"
_FORWARD = f"{_SRT}.model_executor.forward_batch_info"
_RUNNER = f"{_SRT}.model_executor.model_runner"
_SCHEDULER = f"{_SRT}.managers.scheduler"
_LOGITS = f"{_SRT}.layers.logits_processor"

# The runner of decode graphs: where it is from 0.5.14 on, and where it was.
_GRAPHS = (
    (f"{_SRT}.model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
    (f"{_SRT}.model_executor.cuda_graph_runner", "CudaGraphRunner"),
)

# First arguments of the hooked functions, which the hooks take by position or hand on.
ARGUMENTS = {
    "ModelRunner.load_model": "self",
    "ModelRunner.forward": "self forward_batch",
    "Scheduler.__init__": "self server_args port_args",
    "Scheduler.run_batch": "self batch",
    "Scheduler.process_batch_result": "self batch",
    "Scheduler.abort_request": "self recv_req",
    "LogitsProcessor.forward": (
        "self input_ids hidden_states lm_head logits_metadata aux_hidden_states"
    ),
    **{
        f"{owner}.update_weights_from_{source}": "self recv_req"
        for owner in ("Scheduler", "SchedulerWeightUpdaterManager")
        for source in ("disk", "distributed", "tensor", "ipc")
    },
}

# What the plugin reads, by class; a|b: one of them, depending on the release.
READS = {
    (_BATCH, "Req"): (
        "rid origin_input_ids output_ids finished_len finished_reason is_retracted "
        "sampling_params multimodal_inputs input_embeds lora_id"
    ),
    (f"{_SRT}.sampling.sampling_params", "SamplingParams"): "custom_params n max_new_tokens",
    (_BATCH, "ScheduleBatch"): "reqs forward_mode",
    (_BATCH, "BaseFinishReason"): "to_json",
    (_FORWARD, "ForwardBatch"): (
        "forward_mode batch_size seq_lens_cpu seq_lens_sum extend_seq_lens_cpu "
        "extend_prefix_lens_cpu"
    ),
    (_FORWARD, "ForwardMode"): "DECODE is_decode is_idle is_extend is_target_verify",
    (_RUNNER, "ModelRunnerOutput"): "can_run_graph",
    (_RUNNER, "ModelRunner"): (
        "server_args model_config device model is_draft_worker "
        "decode_cuda_graph_runner|graph_runner"
    ),
    (_SCHEDULER, "Scheduler"): "waiting_queue",
    (_LOGITS, "LogitsMetadata"): "forward_mode",
    (f"{_SRT}.configs.model_config", "ModelConfig"): (
        "num_hidden_layers hidden_size vocab_size dtype"
    ),
    (f"{_SRT}.server_args", "ServerArgs"): "model_path chunked_prefill_size max_prefill_tokens",
    _GRAPHS[0]: "bs",
}
# Read where it is there; what it would say is not there in other releases.
OPTIONAL = {(_BATCH, "Req"): "positional_embed_overrides beam_group"}

_MODELS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}


def targets(source: Source) -> list[str]:
    """What the plugin would hook in that release, in its own words."""

    def first_there(classes: tuple[str, ...], method: str) -> str:
        owners = (name.rpartition(".")[::2] for name in classes)
        there = (f"{m}.{c}" for m, c in owners if source.method(m, c, method))
        return next(there, classes[0])

    with patch.object(hooks, "first_there", first_there):
        return list(hooks.hooks_of(Plugin(Settings())))


def lacks(source: Source) -> Iterator[str]:
    """What the plugin needs and this release has not, or has in another shape."""
    for target in targets(source):
        module, cls, name = target.rsplit(".", 2)
        method = source.method(module, cls, name)
        wanted = ARGUMENTS[f"{cls}.{name}"].split()
        if method is None:
            yield f"hooked: {target}"
        elif (found := arguments(method))[: len(wanted)] != wanted:
            yield f"hooked: {target}({', '.join(found)}), expected was ({', '.join(wanted)}, …)"
    for (module, cls), names in READS.items():
        members = _members(source, module, cls)
        for choice in names.split():
            if not members & set(choice.split("|")):
                yield f"read: {module}.{cls}.{choice}"
    if source.function(f"{_SRT}.distributed.parallel_state", _TP_RANK) is None:
        yield f"called: {_TP_RANK}"
    for cls, word in (("FINISH_MATCHED_TOKEN", "stop"), ("FINISH_LENGTH", "length")):
        if word not in _constants(source.method(_BATCH, cls, "to_json")):
            yield f"read: {cls}.to_json without {word!r}"
    for file, cls in _MODELS.items():
        module = f"{_SRT}.models.{file}"
        if source.method(module, cls, "set_eagle3_layers_to_capture") is None:
            yield f"called: {cls}.set_eagle3_layers_to_capture"
        if "layers_to_capture" not in source.file(module).read_text():
            yield f"read: layers_to_capture in {module}"
    if loaded_by(source) is None:
        yield "a plugin system that the scheduler's process loads, or a patch"
    if _dp_rank(source) is None:
        yield "read: dp_rank"


_TP_RANK = "get_tensor_model_parallel_rank"


def loaded_by(source: Source) -> str | None:
    plugins = f"{_SRT}.plugins"
    if source.release in known_patches():
        return None if source.has(plugins) else "`hstransport patch apply`"
    registry = f"{plugins}.hook_registry"
    if not source.has(registry):
        return None
    whole = (
        "sglang.srt.plugins" in _constants(source.tree(plugins))
        and source.method(registry, "HookRegistry", "register") is not None
        and "AROUND" in source.members(registry, "HookType")
        and "load_plugins" in _names(source.function(_SCHEDULER, "run_scheduler_process"))
    )
    return "plugin" if whole else None


def row(source: Source) -> tuple[str, ...]:
    """Of the table; ``lacks`` is empty."""
    weights = next(t for t in targets(source) if "update_weights" in t)
    models = [p for p in (source.srt / "models").glob("*.py") if _has_setter(p.read_text())]
    return (
        source.release,
        loaded_by(source) or "",
        f"`{weights.split('.')[-2]}`",
        f"`{_graphs(source)[1]}`",
        _dp_rank(source) or "",
        str(len(models)),
        "yes" if source.release in TRIED else "",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def listed() -> dict[str, str]:
    """Release -> its line, as docs/releases.md has it."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| 0.")]
    return {line.split("|")[1].strip(): line for line in lines}


def _has_setter(text: str) -> bool:
    return "def set_eagle3_layers_to_capture" in text


def _members(source: Source, module: str, cls: str) -> set[str]:
    """What that class has, wherever the release keeps it."""
    if (module, cls) == _GRAPHS[0]:
        return source.members(*_graphs(source))
    found = source.members(module, cls)
    if cls == "ServerArgs":  # from 0.5.20 on put together out of many classes
        for file in (source.srt / "arg_groups" / "fields").glob("*.py"):
            found = found | {
                node.target.id
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    return found


def _graphs(source: Source) -> tuple[str, str]:
    return next((place for place in _GRAPHS if source.has(place[0])), _GRAPHS[0])


def _dp_rank(source: Source) -> str | None:
    init = source.method(_SCHEDULER, "Scheduler", "__init__")
    if init is not None and "dp_rank" in arguments(init):
        return "argument"
    context = f"{_SRT}.runtime_context"
    if source.has(context) and source.function(context, "get_parallel"):
        return "runtime context"
    return None


def _constants(node: ast.AST | None) -> set[str]:
    nodes = ast.walk(node) if node is not None else ()
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _names(node: ast.AST | None) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node is not None else set()


def main() -> int:
    try:
        sources = [Source(release) for release in offered()]
    except NoDownload as e:
        print(e, file=sys.stderr)
        return 1
    bad = {source.release: missing for source in sources if (missing := list(lacks(source)))}
    for release, missing in bad.items():
        print(f"SGLang {release} lacks: {'; '.join(missing)}", file=sys.stderr)
    good = [row(source) for source in sources if source.release not in bad]
    before, _, rest = PAGE.read_text().partition(f"| {HEAD[0]} |")
    after = rest.partition("\n\n")[2]
    PAGE.write_text(before + table(good) + "\n" + after)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
