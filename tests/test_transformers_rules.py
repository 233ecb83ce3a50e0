"""What a trace answers for transformers, in its present version and, by a stand-in, in those before 4.53."""

import sys
import types

import pytest
import torch

from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.steps import transformers_rules

CARD = hardware.resolve("rtx-3060-12gb")


def test_a_batch_of_one_step_does_not_outlive_it_in_a_model_that_warns_of_padding():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

    def make_step(_):
        model = transformers.DebertaModel(transformers.DebertaConfig(vocab_size=50, **sizes)).to("cuda")

        def step():
            tokens = torch.randint(0, 50, (2, 9)).to("cuda")
            model(input_ids=tokens).last_hidden_state.sum().backward()
            model.zero_grad()

        return step

    recording = tracing.record(make_step, CARD, 3).recording
    dead = {-event - 1 for event in recording.events if event < 0}
    moved = [(i, birth) for i, birth in enumerate(recording.births) if birth.category == "input" and birth.window]
    tokens = [i for i, birth in moved if birth.num_bytes == 2 * 9 * 8]
    assert len(tokens) == 3
    assert dead.issuperset(tokens)


class _Converter:
    """The parts of transformers 4.46's ``AttentionMaskConverter`` that the rules touch."""

    @staticmethod
    def _expand_mask(mask, dtype, tgt_len=None):
        return mask[:, None, None, :].expand(-1, 1, tgt_len, -1).to(dtype)

    @staticmethod
    def _ignore_causal_mask_sdpa(attention_mask, inputs_embeds, past_key_values_length=0):
        if attention_mask is None:
            return True
        return bool(torch.all(attention_mask == 1))


def _prepare(mask, dtype, tgt_len=None):
    return None if torch.all(mask == 1) else _Converter._expand_mask(mask, dtype, tgt_len)


@pytest.fixture
def old_transformers(monkeypatch):
    home = types.ModuleType("transformers.modeling_attn_mask_utils")
    home.AttentionMaskConverter = _Converter
    home._prepare_4d_attention_mask_for_sdpa = _prepare
    model = types.ModuleType("transformers.models.old")
    model._prepare_4d_attention_mask_for_sdpa = _prepare
    for name in ("transformers.modeling_utils", "transformers.masking_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setitem(sys.modules, model.__name__, model)
    return model


@pytest.mark.parametrize(
    ("made_by", "values", "is_dropped", "num_assumed"),
    [
        ("ones.default", None, True, 0),
        ("clone.default", torch.ones(2, 4), True, 0),
        ("clone.default", torch.tensor([[1, 1, 0, 0]] * 2), False, 0),
        ("clone.default", None, False, 1),
    ],
)
def test_a_mask_of_an_old_model_is_dropped_only_where_it_is_known_to_mask_nothing(
    old_transformers, made_by, values, is_dropped, num_assumed
):
    assumed = []
    mask = torch.zeros(2, 4)  # what it holds must not be looked at
    with transformers_rules.rules(lambda _: made_by, lambda _: values, assumed.append):
        expanded = old_transformers._prepare_4d_attention_mask_for_sdpa(mask, torch.float16)
        is_ignored = _Converter._ignore_causal_mask_sdpa(attention_mask=mask, inputs_embeds=None)
    assert is_ignored is is_dropped
    assert (expanded is None) is is_dropped
    assert is_dropped or expanded.shape == (2, 1, 4, 4)
    assert assumed == [transformers_rules.PADDING] * 2 * num_assumed


def test_old_functions_are_back_after_a_trace(old_transformers):
    with transformers_rules.rules(lambda _: "", lambda _: None, lambda _: None):
        assert old_transformers._prepare_4d_attention_mask_for_sdpa is not _prepare
    assert old_transformers._prepare_4d_attention_mask_for_sdpa is _prepare
    assert _Converter._ignore_causal_mask_sdpa(torch.ones(2), None) is True
