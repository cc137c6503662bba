"""What the plugin reads of SGLang's ``Req``."""

from __future__ import annotations

from typing import Any

from ..follower import Noted
from ..protocol import ABORTED, FINISHED, LENGTH

_IMAGES = "the request has multimodal_inputs"


class SGLangRequest:
    """A ``Req`` as the follower's :class:`~hstransport.follower.Request`."""

    __slots__ = ("_req",)

    def __init__(self, req: Any) -> None:
        self._req = req

    @property
    def rid(self) -> str:
        return str(self._req.rid)

    @property
    def probe(self) -> bool:
        """One of SGLang's own health checks, which carry this prefix in their request id."""
        return self.rid.startswith("HEALTH_CHECK")

    @property
    def prompt(self) -> Any:
        return self._req.origin_input_ids[:]  # a copy: the exporter's thread packs it later

    @property
    def output(self) -> Any:
        # Tokens after a stop were sampled and thrown away.
        return self._req.output_ids[: self._req.finished_len]

    @property
    def tags(self) -> dict[str, Any]:
        return tags_of(self._req)

    @property
    def copies(self) -> int:
        """How many generations of its prompt were asked for at once."""
        return int(getattr(self._req.sampling_params, "n", 1) or 1)

    @property
    def generates(self) -> bool:
        """False for the pass that SGLang makes to have the prompt of several in its cache."""
        return bool(self._req.sampling_params.max_new_tokens != 0)

    @property
    def over(self) -> bool:
        return self._req.finished_reason is not None

    @property
    def retracted(self) -> bool:
        return bool(self._req.is_retracted)

    def unfit(self) -> str:
        """Why this request's states do not follow from its token ids; empty when they do."""
        for name in ("input_embeds", "positional_embed_overrides", "lora_id"):
            if getattr(self._req, name, None) is not None:
                return f"the request has {name}"
        if getattr(self._req, "beam_group", None) is not None:
            return "the request is a beam search"
        return ""

    def reason(self) -> tuple[str, str]:
        """(END's reason, SGLang's own words on an abort)."""
        if not self.over:
            return ABORTED, "aborted while waiting"
        said = self._req.finished_reason.to_json()
        reason = {"stop": FINISHED, "length": LENGTH}.get(said.get("type"), ABORTED)
        return reason, str(said.get("message") or "") if reason == ABORTED else ""


def tags_of(req: Any) -> dict[str, Any]:
    """What its client says about its sample; see hstransport.tags for the names."""
    params = req.sampling_params.custom_params
    return params if isinstance(params, dict) else {}


def note(reqs: list[Any]) -> Noted:
    """What is true of a batch's requests now."""
    over = {id(req) for req in reqs if req.finished_reason is not None}
    # SGLang lets go of them when the request ends.
    images = {id(req): _IMAGES for req in reqs if req.multimodal_inputs is not None}
    return Noted(over, images)
