"""Canonical layer ids reach a model whatever its setter adds to them; the rest is refused."""

import pytest

from hstransport.errors import CaptureError
from hstransport.layers import enable_capture


class Inner:
    layers_to_capture = ()


class Model:
    """A model whose setter leaves ``translate(ids)``, as SGLang's do in several ways."""

    def __init__(self, translate):
        self.model = Inner()
        self._translate = translate

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = self._translate(ids)


def adds_one(ids):
    return [k + 1 for k in ids]


def adds_one_if_first_is_one(ids):  # deepseek_v2
    return [k + 1 for k in ids] if ids[0] == 1 else list(ids)


def adds_one_unless_last(ids):  # gpt_oss, of 6 layers
    return list(ids) if max(ids) == 6 else [k + 1 for k in ids]


@pytest.mark.parametrize("translate", [adds_one, adds_one_if_first_is_one, adds_one_unless_last])
@pytest.mark.parametrize("layers", [(2, 3), (3, 5), (5,), (2, 3, 4, 5)])
def test_what_the_setter_leaves_is_what_was_asked(translate, layers):
    model = Model(translate)
    enable_capture(model, layers, 6)
    assert model.model.layers_to_capture == list(layers)


@pytest.mark.parametrize("layer", [0, 6, 7])
def test_layers_that_cannot_be_captured_are_named(layer):
    with pytest.raises(CaptureError, match=f"layer {layer} of Model.*'final'"):
        enable_capture(Model(adds_one), (layer,), 6)


def test_a_setter_that_leaves_other_layers_is_refused():
    with pytest.raises(CaptureError, match=r"asked for layers \[2, 3\] and would capture \[4, 5\]"):
        enable_capture(Model(lambda ids: [4, 5]), (2, 3), 6)


def test_a_model_without_a_setter_gives_final_only():
    with pytest.raises(CaptureError, match="HSTRANSPORT_LAYERS=final"):
        enable_capture(object(), (2,), 6)
    enable_capture(object(), (), 6)
