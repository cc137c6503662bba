"""SGLang's own setters, taken from its model files, leave the layers asked for or are refused.

No list of models is trusted: each setter's code runs against a stand-in of its model, and what it
left is read back. Where the states are taken is read from the forward that uses it.
"""

import pytest
from rig.model_sources import (
    BARE,
    BEFORE,
    BY_LAYER,
    CHOICES,
    VERSIONS,
    NoSources,
    capture_point,
    left_by,
    mixed_before_captured,
    sources,
    table,
    written,
)

from hstransport.errors import CaptureError


@pytest.fixture(scope="module", params=VERSIONS)
def release(request):
    try:
        return sources(request.param)
    except NoSources as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def accepted(release):
    """(model, layers, what was left) of the models of which ``enable_capture`` takes layers."""
    taken = []
    for model in release.models():
        for n, layers in CHOICES:
            try:
                taken.append((model, layers, left_by(model, layers, n)))
            except CaptureError:
                continue
    return taken


def test_setters_leave_what_was_asked_or_are_refused(accepted):
    assert all(left == layers for _, layers, left in accepted)
    files = {model.file for model, _, _ in accepted}
    assert len(files) > 25, "hardly a model was understood"
    assert {"llama", "deepseek_v2", "kimi_k25", "qwen2_moe", "gpt_oss", "lfm2"} <= files


def test_an_id_is_the_input_of_its_layer_in_each_model_that_is_taken(accepted):
    models = {model.file: model for model, _, _ in accepted}
    points = {
        (file, capture_point(decoder))
        for file, model in models.items()
        for decoder in model.decoders()
    }
    others = {(file, point) for file, point in points if point not in (BEFORE, BY_LAYER)}
    # Told apart only by their states: the check on the live model stops them.
    assert others == {("gemma3_causal", BARE), ("gemma3_mm", BARE)}


def test_layers_that_capture_do_so_before_they_compute(release):
    assert mixed_before_captured(release) == []


def test_the_page_lists_the_models_as_they_are():
    try:
        fresh = table()
    except NoSources as e:
        pytest.skip(str(e))
    assert written() == fresh, "run: PYTHONPATH=tests python -m rig.model_sources"
