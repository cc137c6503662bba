"""The process that holds SGLang's Engine: prompts in at stdin, answers out at stdout.

    python -m hstransport.client.engine_host [ARGUMENT OF sglang.launch_server ...]

Each line is one JSON object. In: the body of POST /generate, whose ``rid`` names the answer, or
``{"abort": rid}``. Out: ``{"ready": true}`` once, then ``{"rid": …}`` with ``answer``, ``refused``
or ``failed``. The end of stdin is the end of the engine. Exit status 2: bad arguments.

A process of its own, because SGLang kills the process that holds an Engine, and all its children,
when one of the engine's processes dies. Beside the plugin (``hstransport/sglang``) the one file
that imports SGLang.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever SGLang prints is for the log
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    # As sglang.launch_server does it: the same words give the same engine.
    with Engine(server_args=prepare_server_args(sys.argv[1:])) as engine:
        engine.loop.run_until_complete(_Host(engine, answers).serve())


class _Host:
    def __init__(self, engine: Any, answers: Any) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        # Its own generate() has no extra_key; this is what POST /generate calls.
        self._manager = engine.tokenizer_manager
        self._request = GenerateReqInput
        self._answers = answers

    async def serve(self) -> None:
        self._say({"ready": True})
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()  # the loop alone does not keep them
        while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
            body = json.loads(line)
            if "abort" in body:
                self._manager.abort_request(body["abort"])
                continue
            task = loop.create_task(self._answer(body))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _answer(self, body: dict[str, Any]) -> None:
        said: dict[str, Any] = {"rid": body["rid"]}
        try:
            request = self._request(**body)
            answer = await anext(self._manager.generate_request(request, None))
        except ValueError as e:  # POST /generate answers these with 400
            said["refused"] = str(e)
        except Exception as e:
            said["failed"] = str(getattr(e, "detail", e)) or type(e).__name__
        else:
            meta = answer["meta_info"]
            kept = {key: meta.get(key) for key in ("prompt_tokens", "finish_reason")}
            said["answer"] = {"meta_info": kept}
        self._say(said)

    def _say(self, words: dict[str, Any]) -> None:
        print(json.dumps(words), file=self._answers, flush=True)


if __name__ == "__main__":
    main()
