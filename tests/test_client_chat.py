"""Chats: the tokens are the template's, and the loss mask is what the assistant said."""

from __future__ import annotations

import numpy as np
import pytest

from hstransport.client.chat import ChatTokenizer, UnusableChat
from hstransport.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is assistant a word?"},
    {"role": "assistant", "content": "assistant\nYes, and it is «naïve» 日本 🙂."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "You're welcome!  \n"},
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def smollm2(model_dir):
    return transformers.AutoTokenizer.from_pretrained(model_dir("smollm2"))


@pytest.fixture
def chat(smollm2):
    """A ChatTokenizer with another template, put back afterwards."""
    before = smollm2.chat_template

    def make(template=None, fast=True):
        smollm2.chat_template = before if template is None else template
        return ChatTokenizer(smollm2 if fast else Slow(smollm2), "smollm2")

    yield make
    smollm2.chat_template = before


class Slow:
    """A tokenizer that cannot say where its tokens stand in the text, as tiktoken's cannot."""

    is_fast = False

    def __init__(self, fast):
        self._fast = fast
        self.chat_template = fast.chat_template
        self.get_chat_template = fast.get_chat_template
        self.apply_chat_template = fast.apply_chat_template

    def __call__(self, text, **options):
        assert not options.pop("return_offsets_mapping", False)
        return self._fast(text, **options)


def masked(tokenizer, ids, mask):
    """The text of each run of tokens that the mask keeps."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def said(messages):
    return [m["content"] for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize("fast", [True, False])
def test_mask_of_a_chat_is_what_the_assistant_said(chat, smollm2, fast):
    ids, mask = chat(fast=fast).encode(CHAT)
    template = smollm2.apply_chat_template(CHAT, tokenize=True, return_dict=True)
    assert ids.tolist() == template["input_ids"]
    assert masked(smollm2, ids, mask) == said(CHAT)


def test_chat_without_an_answer_gets_the_generation_prompt(chat, smollm2):
    ids, mask = chat().encode(CHAT[:4])
    assert smollm2.decode(ids).endswith("<|im_start|>assistant\n")
    assert masked(smollm2, ids, mask) == said(CHAT[:4])


def test_template_that_marks_the_generation_is_believed(chat, smollm2):
    marked = CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
    )
    ids, mask = chat(marked).encode(CHAT)
    assert masked(smollm2, ids, mask) == [text + "<|im_end|>" for text in said(CHAT)]


def test_template_that_strips_content_masks_what_it_kept(chat, smollm2):
    ids, mask = chat(CHATML.replace("m.content", "m.content | trim")).encode(CHAT)
    assert masked(smollm2, ids, mask) == [text.strip() for text in said(CHAT)]


@pytest.mark.parametrize("fast", [True, False])
def test_answer_that_repeats_the_header_is_found_where_it_stands(chat, smollm2, fast):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "<|im_start|>assistant\nassistant"},
    ]
    ids, mask = chat(CHATML, fast).encode(messages)
    assert masked(smollm2, ids, mask) == said(messages)
    assert mask.sum() < len(ids) / 2


def test_template_that_looks_into_the_message_is_refused(chat):
    template = CHATML.replace(
        "<|im_start|>{{ m.role }}",
        "<|im_start|>{{ m.role }}{% if 'Yes' in m.content %} (sure){% endif %}",
    )
    with pytest.raises(UnusableChat, match=r"messages\[2\].*depends on its content"):
        chat(template).encode(CHAT)


def test_template_that_drops_earlier_answers_is_refused(chat):
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    with pytest.raises(UnusableChat, match=r"messages\[2\]"):
        chat(template).encode(CHAT)


def test_templates_own_complaint_is_passed_on(chat):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UnusableChat, match="roles must alternate"):
        chat(template).encode(CHAT)


def test_token_across_the_border_belongs_to_the_template(chat, smollm2):
    # "assistant" and "ship" share the token "ants".
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "ship is a word"}]
    ids, mask = chat(template).encode(messages)
    assert masked(smollm2, ids, mask) == ["hip is a word"]
    # Which token that is can only be told by a tokenizer that says where its tokens stand.
    with pytest.raises(UnusableChat, match="joins characters"):
        chat(template, fast=False).encode(messages)


def test_tokenizer_without_a_template_names_the_way_out(chat, smollm2):
    tokenizer = chat()
    tokenizer._template = None
    with pytest.raises(ConfigError, match="no chat template: give text or input_ids"):
        tokenizer.encode(CHAT)


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'hstransport\[chat\]'"):
        ChatTokenizer.load("anything")


def test_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer could be loaded from .*--tokenizer"):
        ChatTokenizer.load(str(tmp_path))
