"""The numbers of a finite job: head room, masked rows, gradients below the range."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diagnosed_jobs import Around, Maps, found_in, one_weight, plan_of
from snugfit import LossScale


def test_a_finite_job_says_so_with_its_head_room():
    model = Around(torch.exp, value=3.0)
    found = found_in(model)
    assert (found.cause, found.module, found.op, found.phase) == ("none", "", "", "")
    assert found.is_finite
    (room,) = found.head_room
    assert (room.module, room.op, room.dtype, room.largest) == ("inner", "exp", "float32", pytest.approx(3.0))
    assert room.limit == pytest.approx(88.72, abs=0.01)
    assert "88.72" in str(found)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 11.09), (torch.bfloat16, 88.72), (torch.float32, 88.72)])
def test_head_room_is_that_of_the_type_in_which_the_operation_runs(dtype, limit):
    found = found_in(Around(lambda x: torch.exp(x.to(dtype)).float()))
    assert found.head_room[0].limit == pytest.approx(limit, abs=0.01)
    assert found.head_room[0].dtype == str(dtype).removeprefix("torch.")


def test_head_room_of_an_attention_is_that_of_its_scores_with_masked_positions_left_out():
    def attend(x):
        heads = x.reshape(1, 1, *x.shape)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0, 0]

    found = found_in(Around(attend, value=2.0), plan=plan_of(4))
    (room,) = found.head_room
    assert room.largest == pytest.approx(4 * 4 / 2)
    assert (room.masked_fraction, room.num_masked_rows) == (pytest.approx(6 / 16), 0)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_masked_rows_are_counted(op):
    def masked(x):
        scores = x.masked_fill(torch.tensor([True, False, True, True]), -math.inf)
        scores = torch.cat([scores, torch.full_like(scores[:1], -math.inf)])
        values = getattr(torch, op)(scores, dim=-1)
        return values.reshape(len(scores), -1)[: len(x)].nan_to_num(neginf=0.0).expand(len(x), 4)

    room = found_in(Around(masked)).head_room[0]
    assert room.num_masked_rows == 1


@pytest.mark.parametrize(("scale", "share"), [(1.0, 1.0), (65536.0, 0.0)])
def test_the_share_of_gradients_below_the_range_is_that_at_the_scale(scale, share):
    model = one_weight()
    found = found_in(
        model,
        batch=torch.full((4, 1), 1e-8),
        plan=plan_of(4, precision="16-mixed"),
        loss_scale=LossScale(init_scale=scale),
    )
    assert found.underflow_fraction == share
    assert found.underflow[0].fp16_fraction == share
    assert found.underflow[0].bf16_fraction == 0.0


def test_underflow_is_told_by_module_worst_first():
    model = nn.ModuleDict({"small": nn.Linear(4, 4, bias=False), "large": nn.Linear(4, 4, bias=False)})
    found = found_in(model, loss=lambda model, x: (model["small"](x) * 1e-9 + model["large"](x)).mean())
    assert [row.module for row in found.underflow] == ["small", "large"]
    assert [row.fp16_fraction for row in found.underflow] == [1.0, 0.0]
    assert [row.num_values for row in found.underflow] == [16, 16]


def test_a_diagnosis_is_json_and_reads_as_text():
    found = found_in(Maps(), plan=plan_of(4, precision="16-mixed"))
    written = json.loads(json.dumps(found.to_dict()))
    assert (written["module"], written["tried"][0]["is_finite"]) == ("b", True)
    text = str(found)
    for part in ("linear in forward, module 'b', micro-batch 0, rank 0", "cause:", "remedy:", "tried:"):
        assert part in text
