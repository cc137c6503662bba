"""Captured states are compared with what the layers of a live model are given."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hstransport.errors import CaptureError  # noqa: E402
from hstransport.sglang.verify_layers import LayerCheck  # noqa: E402

HIDDEN, LAYERS, TOKENS = 32, 6, 5
WANTED = (2, 3, 5)


class RMSNorm(nn.Module):
    """With the residual added first, as in SGLang's fused kernel."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))

    def forward(self, x, residual=None):
        if residual is not None:
            residual += x  # in place, as the kernel does
            x = residual
        scale = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        normed = (x.float() * scale * self.weight).to(x.dtype)
        return normed if residual is None else (normed, residual)

    def fused(self, x, residual):
        """Not through __call__, so no hook on the norm sees it."""
        return self.forward(x, residual)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, *, positions, hidden_states):
        return self.proj(hidden_states)


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.self_attn = Mixer()
        self.input_layernorm = RMSNorm()
        self.post_attention_layernorm = RMSNorm()
        self.mlp = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self._fused = fused

    def forward(self, x, residual):
        if residual is None:
            residual = x.clone()
            x = self.input_layernorm(x)
        elif self._fused:
            x, residual = self.input_layernorm.fused(x, residual)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions=torch.arange(len(x)), hidden_states=x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Captures ``state(k, x, residual)``, or for ``late`` after the layer instead of before."""

    def __init__(self, fused=False, state=None, late=False):
        super().__init__()
        self.layers = nn.ModuleList(Block(fused) for _ in range(LAYERS))
        self.layers_to_capture = list(WANTED)
        self._state = state or (lambda x, residual: x + residual)
        self._late = late

    def forward(self, x):
        captured, residual = [], None
        for k, layer in enumerate(self.layers):
            if k in self.layers_to_capture and not self._late:
                captured.append(self._state(x, residual))
            x, residual = layer(x, residual)
            if k in self.layers_to_capture and self._late:
                captured.append(self._state(x, residual))
        return captured


class Model(nn.Module):
    def __init__(self, **how):
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(**how)
        self.to(torch.bfloat16)

    @torch.no_grad()
    def run(self, x=None, tokens=TOKENS):
        x = torch.randn(tokens, HIDDEN) if x is None else x
        return self.model(x.to(torch.bfloat16))


def hooks_left(model):
    return sum(len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_right_states_hold_and_the_hooks_are_gone(fused, packed, tokens):
    model = Model(fused=fused)
    check = LayerCheck(model, WANTED, HIDDEN)
    assert hooks_left(model)
    captured = model.run(tokens=tokens)
    assert check.holds(torch.cat(captured, dim=1) if packed else captured)
    assert not hooks_left(model)


WRONG = {
    "after the layer": {"late": True},
    "without the residual": {"state": lambda x, residual: x.clone()},
    "zeros": {"state": lambda x, residual: torch.zeros_like(x)},
    "not finite": {"state": lambda x, residual: x * float("nan")},
    "half of two ranks' sum": {"state": lambda x, residual: x / 2 + residual},
    "after a norm": {"state": lambda x, residual: normed(x + residual)},
}


def normed(state):
    weight = torch.linspace(0.5, 1.5, HIDDEN, dtype=state.dtype)
    return nn.functional.rms_norm(state, [HIDDEN], weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_states_name_the_layer(wrong, fused):
    model = Model(fused=fused, **WRONG[wrong])
    check = LayerCheck(model, WANTED, HIDDEN)
    with pytest.raises(CaptureError, match=r"layer 2: what Block 2 was given.*HSTRANSPORT_LAYERS"):
        check.holds(model.run())


@pytest.mark.parametrize("fused", [False, True])
def test_layers_in_another_order_do_not_hold(fused):
    model = Model(fused=fused)
    check = LayerCheck(model, WANTED, HIDDEN)
    with pytest.raises(CaptureError, match="layer 3"):
        first, second, third = model.run()
        check.holds([first, third, second])


def test_fewer_layers_than_asked_do_not_hold():
    model = Model()
    check = LayerCheck(model, WANTED, HIDDEN)
    with pytest.raises(CaptureError, match="captured 2 layers, 3 were asked"):
        check.holds(model.run()[:2])


def test_a_pass_that_shows_nothing_leaves_it_to_the_next():
    model = Model()
    check = LayerCheck(model, WANTED, HIDDEN)
    elsewhere = [torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)] * 3
    assert not check.holds(elsewhere)  # a graph was replayed: no layer was called
    assert not check.holds(None)
    for dull in (0.0, float("nan")):
        assert not check.holds(model.run(torch.full((TOKENS, HIDDEN), dull)))
    model.run()  # a pass whose states nobody looks at
    assert check.holds(model.run())


def test_padding_does_not_count():
    model = Model()
    check = LayerCheck(model, WANTED, HIDDEN)
    x = torch.randn(TOKENS, HIDDEN)
    x[3:] = 0
    assert check.holds(model.run(x))


def test_compilation_does_not_see_the_hooks():
    model = Model()
    check = LayerCheck(model, WANTED, HIDDEN)
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        captured = compiled(torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16))
    assert not check.holds(captured)
    assert check.holds(model.run())


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(CaptureError, match="Linear has no layers"):
        LayerCheck(nn.Linear(2, 2), WANTED, HIDDEN)
