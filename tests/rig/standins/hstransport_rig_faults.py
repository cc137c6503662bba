"""SGLang plugin: breaks hstransport's capture on demand, to see that somebody notices.

RIG_FAULT names a file; the word in it is the fault, and may change while the server runs. What is
served stays right: only what capture takes is spoilt, just before it is taken.
"""

import os
from pathlib import Path


def register():
    """Entry point of the group ``sglang.srt.plugins``."""
    path = os.environ.get("RIG_FAULT")
    if not path:
        return
    import torch

    from hstransport.tap import Tap

    faults = _Faults(Path(path))
    torch.nn.modules.module.register_module_forward_hook(faults.saw)
    faults.wrap(Tap)


class _Faults:
    def __init__(self, path):
        self._path = path
        self._residuals = []  # after attention and after the whole of each layer, in turn
        self._counts = []  # rows of each request of a prefill that is under way

    def saw(self, module, inputs, output):
        """Keep the residual stream that each norm adds up: the second one of layer k is state k."""
        name = type(module).__name__
        if name == "VocabParallelEmbedding":
            self._residuals = []
        elif name == "RMSNorm" and isinstance(output, tuple):
            self._residuals.append(output[1].clone())

    def wrap(self, tap):
        plan, planes = tap.plan, tap.planes

        def noting(this, batch, step, *args):
            self._counts = list(step.counts)
            return plan(this, batch, step, *args)

        def spoilt(this, states, stream=None):
            fault = self._path.read_text().strip()
            if fault:
                final, layers = states[0].clone(), [x.clone() for x in states[1]]
                states = self._spoil(fault, final, layers, this)
            self._counts = []
            return planes(this, states, stream)

        tap.plan, tap.planes = noting, spoilt

    def _state(self, k):
        return self._residuals[2 * k - 1]

    def _spoil(self, fault, final, layers, tap):
        if fault == "layers one too high":
            layers = [self._state(k + 1) for k in tap._info.layers]
        elif fault == "before the norm":
            final = self._state(tap._info.num_layers)
        elif fault == "rows of another request" and len(self._counts) > 1:
            a, b = self._counts[:2]
            n = min(a, b)
            for x in [final, *layers]:
                x[:n], x[a : a + n] = x[a : a + n].clone(), x[:n].clone()
        elif fault == "zeros":
            layers[0][2:5] = 0
        elif fault == "end":
            raise RuntimeError("capture is to end")
        elif fault == "noise":
            layers[1] += layers[1].std() * layers[1].new_empty(layers[1].shape).normal_()
        return final, layers
