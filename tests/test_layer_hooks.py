"""States that hooks on decoder layers take, and what they refuse to take."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hstransport.errors import CaptureError  # noqa: E402
from hstransport.sglang.layer_hooks import LayerHooks, only_decoder  # noqa: E402
from hstransport.sglang.verify_layers import LayerCheck  # noqa: E402

HIDDEN, LAYERS, TOKENS = 16, 5, 7
WANTED = (1, 3, 4)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))

    def forward(self, x, residual=None):
        if residual is None:
            return nn.functional.rms_norm(x, [HIDDEN], self.weight)
        residual += x  # in place, as SGLang's kernel does
        return nn.functional.rms_norm(residual, [HIDDEN], self.weight), residual


class Block(nn.Module):
    """Hands the residual on, to be added by the next one."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = Norm()
        self.attn = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.attn(hidden_states), residual


class Plain(nn.Module):
    """Adds to its input itself, in place, and has its norm behind."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.post_norm = Norm()

    def forward(self, hidden_states, positions):
        return hidden_states.add_(self.post_norm(self.attn(hidden_states))), None


class Deaf(Block):
    """Takes a residual and does not use it: what comes is all."""

    def forward(self, positions, hidden_states, residual):
        given = hidden_states
        return given + self.attn(self.input_layernorm(given)), given


class Decoder(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.truth = []

    def forward(self, x):
        self.truth = []
        positions, residual = torch.arange(len(x)), None
        for layer in self.layers:
            whole = residual is None or isinstance(layer, Deaf)
            self.truth.append(x.clone() if whole else x + residual)
            if isinstance(layer, Plain):
                x, residual = layer(x, positions=positions)
            else:
                x, residual = layer(positions, x, residual)
        return x


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(block)
        self.to(torch.bfloat16)

    @torch.no_grad()
    def run(self):
        self.model(torch.randn(TOKENS, HIDDEN).to(torch.bfloat16))
        return [self.model.truth[k] for k in WANTED]


@pytest.mark.parametrize("block", [Block, Plain])
def test_what_layers_are_given_is_taken_and_holds(block):
    model = Model(block)
    decoder = only_decoder(model, LAYERS)
    hooks = LayerHooks(decoder, WANTED, HIDDEN)
    check = LayerCheck(model, WANTED, HIDDEN, decoder)
    for last in (False, True):
        truth = model.run()
        taken = hooks.take()
        assert all(torch.equal(a, b) for a, b in zip(taken, truth, strict=True))
        assert last or check.holds(taken)


def test_a_residual_that_a_layer_does_not_use_is_found():
    model = Model(Deaf)
    decoder = only_decoder(model, LAYERS)
    hooks = LayerHooks(decoder, WANTED, HIDDEN)
    check = LayerCheck(model, WANTED, HIDDEN, decoder)
    model.run()
    with pytest.raises(CaptureError, match=r"layer 1: what Deaf 1 was given \(attn\)"):
        check.holds(hooks.take())


def test_a_pass_in_which_no_hook_runs_is_found():
    model = Model(Block)
    hooks = LayerHooks(only_decoder(model, LAYERS), WANTED, HIDDEN)
    with pytest.raises(CaptureError, match=r"0 of 3 hooks.*--disable-prefill-cuda-graph"):
        hooks.take()
    model.run()
    assert len(hooks.take()) == 3


class Twice(Decoder):
    def forward(self, x):
        super().forward(x)
        super().forward(x)


def test_a_layer_that_runs_twice_is_found_and_the_pass_goes_on():
    model = Model(Block)
    model.model.__class__ = Twice
    hooks = LayerHooks(only_decoder(model, LAYERS), WANTED, HIDDEN)
    model.run()
    with pytest.raises(CaptureError, match="layer 1, Block: it runs more than once in a pass"):
        hooks.take()


class More(Block):
    def forward(self, positions, hidden_states, residual, embeds=None):
        return super().forward(positions, hidden_states, residual)


class MoreDecoder(Decoder):
    def forward(self, x):
        for layer in self.layers:
            layer(None, hidden_states=x, residual=x, embeds=self.more)


def test_what_a_layer_is_given_besides_is_refused():
    model = Model(More)
    model.model.__class__ = MoreDecoder
    hooks = LayerHooks(only_decoder(model, LAYERS), WANTED, HIDDEN)
    for more in (torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), nn.Identity()):
        model.model.more = more
        with torch.no_grad():
            model.model(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16))
        with pytest.raises(CaptureError, match="what it is to do with its embeds is not known"):
            hooks.take()


def test_the_list_of_layers_must_be_one():
    model = Model(Block)
    with pytest.raises(CaptureError, match="0 lists of 6 layers that take hidden_states"):
        only_decoder(model, 6)
    model.other = Decoder(Block)
    with pytest.raises(CaptureError, match=r"2 lists of 5 layers.*HSTRANSPORT_LAYERS=final"):
        only_decoder(model, LAYERS)
