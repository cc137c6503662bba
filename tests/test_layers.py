"""Canonical layer ids reach a model whatever its setter adds to them; the rest is refused."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hstransport.errors import CaptureError, ConfigError  # noqa: E402
from hstransport.settings import LayerChoice, parse_layers  # noqa: E402
from hstransport.sglang.layers import decoder_of, enable_capture, require_captured  # noqa: E402


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(6))
        self.layers_to_capture = []


class Model(nn.Module):
    """A model whose EAGLE-3 setter leaves ``translate(ids)``, as SGLang's do in several ways."""

    def __init__(self, translate):
        super().__init__()
        self.model = Decoder()
        self._translate = translate

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = self._translate(ids)


class OnlyDflash(nn.Module):
    def __init__(self, translate):
        super().__init__()
        self.model = Decoder()
        self._translate = translate

    def set_dflash_layers_to_capture(self, ids):
        self.model.layers_to_capture = self._translate(ids)


class Both(Model):
    def set_dflash_layers_to_capture(self, ids):
        self.model.layers_to_capture = [k + 1 for k in ids]


class Wrapper(nn.Module):
    """As a vision-language model around a language model, or around its decoder."""

    def __init__(self, language_model):
        super().__init__()
        self.vision = nn.Identity()
        self.language_model = language_model

    def set_eagle3_layers_to_capture(self, ids):
        if hasattr(self.language_model, "set_eagle3_layers_to_capture"):
            self.language_model.set_eagle3_layers_to_capture(ids)


class Flags(Model):
    """Its forward looks at flags on the layers, which the setter only ever raises."""

    def set_eagle3_layers_to_capture(self, ids):
        super().set_eagle3_layers_to_capture(ids)
        for k in self.model.layers_to_capture:
            self.model.layers[k]._is_layer_to_capture = True


def adds_one(ids):
    return [k + 1 for k in ids]


def adds_one_to_a_set(ids):  # nemotron_h
    return {k + 1 for k in ids}


def adds_one_if_first_is_one(ids):  # deepseek_v2
    return [k + 1 for k in ids] if ids[0] == 1 else list(ids)


def adds_one_unless_last(ids):  # gpt_oss, of 6 layers
    return list(ids) if max(ids) == 6 else [k + 1 for k in ids]


@pytest.mark.parametrize(
    "translate", [adds_one, adds_one_to_a_set, adds_one_if_first_is_one, adds_one_unless_last]
)
@pytest.mark.parametrize("layers", [(2, 3), (3, 5), (5,), (2, 3, 4, 5)])
@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper, lambda m: Wrapper(Wrapper(m))])
def test_what_the_setter_leaves_is_what_was_asked(translate, layers, wrap):
    model = wrap(Model(translate))
    enable_capture(model, layers, 6)
    assert sorted(decoder_of(model).layers_to_capture) == list(layers)
    require_captured(model, layers)


def test_flags_of_an_earlier_try_are_taken_back():
    model = Flags(list)  # keeps what it is given: the first try leaves one less
    enable_capture(model, (2, 5), 6)
    flagged = [i for i, m in enumerate(model.model.layers) if hasattr(m, "_is_layer_to_capture")]
    assert flagged == [1, 2, 4, 5]
    assert [i for i in flagged if model.model.layers[i]._is_layer_to_capture] == [2, 5]


def test_flags_that_name_other_layers_are_refused():
    model = Flags(adds_one)
    enable_capture(model, (2, 5), 6)
    model.model.layers[3]._is_layer_to_capture = True
    with pytest.raises(CaptureError, match=r"flags on the layers \[2, 3, 5\]"):
        require_captured(model, (2, 5))


def test_the_other_setter_is_asked_where_the_first_cannot():
    model = Both(adds_one_if_first_is_one)
    enable_capture(model, (1, 4), 6)
    assert model.model.layers_to_capture == [1, 4]
    with pytest.raises(CaptureError, match="Choose other layers"):
        enable_capture(Model(adds_one_if_first_is_one), (1, 4), 6)


def test_a_dflash_setter_must_add_one():
    model = OnlyDflash(adds_one)
    enable_capture(model, (2, 5), 6)
    assert model.model.layers_to_capture == [2, 5]
    with pytest.raises(CaptureError, match=r"set_dflash_layers_to_capture\(\[1, 4\]\) left \[1, 4"):
        enable_capture(OnlyDflash(list), (2, 5), 6)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (0, "embedding of the token ids.*look it up in the weights"),
        (6, "before the final norm: use 'final'"),
        (7, "the model has 6 layers"),
        (-1, "the model has 6 layers"),
    ],
)
def test_layers_that_cannot_be_captured_are_named(layer, told):
    with pytest.raises(CaptureError, match=f"layer {layer} of Model cannot be captured: .*{told}"):
        enable_capture(Model(adds_one), (layer,), 6)


def test_a_setter_that_leaves_other_layers_is_refused():
    with pytest.raises(CaptureError, match=r"asked for layers \[2, 3\].*left \[4, 5\]"):
        enable_capture(Model(lambda ids: [4, 5]), (2, 3), 6)


def test_a_setter_that_does_nothing_or_fails_is_refused():
    with pytest.raises(CaptureError, match="no layers_to_capture"):
        enable_capture(Wrapper(nn.Identity()), (2, 3), 6)
    with pytest.raises(CaptureError, match="IndexError: list index out of range"):
        enable_capture(Model(lambda ids: [][0]), (2, 3), 6)


def test_two_decoders_that_capture_are_refused():
    model = Wrapper(Model(adds_one))
    model.draft = Model(adds_one)
    model.draft.set_eagle3_layers_to_capture([1])
    with pytest.raises(CaptureError, match="one module"):
        enable_capture(model, (2, 3), 6)


def test_a_model_without_a_setter_gives_final_only():
    with pytest.raises(CaptureError, match="inner layers: set HSTRANSPORT_LAYERS=final"):
        enable_capture(nn.Identity(), (2,), 6)
    enable_capture(nn.Identity(), (), 6)


def test_layers_that_sglang_sets_later_must_be_the_same():
    model = Model(adds_one)
    enable_capture(model, (2, 3), 6)
    model.set_eagle3_layers_to_capture([1, 2])
    require_captured(model, (2, 3))
    model.set_eagle3_layers_to_capture([2, 4])
    with pytest.raises(CaptureError, match=r"since set.*\[3, 5\].*HSTRANSPORT_LAYERS=3,5,final"):
        require_captured(model, (2, 3))
    require_captured(model, ())  # final alone: what else is captured is not looked at


@pytest.mark.parametrize(
    ("layers", "ids"), [(4, (1, 2)), (5, (2,)), (6, (2, 3)), (8, (2, 4, 5)), (36, (2, 18, 33))]
)
def test_eagle3_names_each_layer_once(layers, ids):
    choice = parse_layers("eagle3,2,final")
    assert choice.resolve(layers) == tuple(sorted({*ids, 2}))
    assert LayerChoice((), eagle3=True, final=True).resolve(layers) == ids


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_eagle3_of_a_model_that_is_too_small_says_what_to_name(layers):
    with pytest.raises(ConfigError, match=f"n={layers} layers: name layers from 1"):
        parse_layers("eagle3").resolve(layers)
    assert parse_layers("final").resolve(layers) == ()
