import dataclasses
import itertools
import json
import os
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit import Plan, PlanError, Segment
from snugfit.plans import PRECISIONS, SEGMENT_POLICIES, VERSION

SMALL = {"batch_size": 8, "micro_batch_size": 2}
FQNS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@st.composite
def segments_apart(draw):
    names = draw(st.lists(FQNS, max_size=6, unique=True))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, max(1, len(names)))))), len(names)]
    runs = [tuple(names[a:b]) for a, b in itertools.pairwise(cuts) if names[a:b]]
    return tuple(Segment(run, draw(st.sampled_from(SEGMENT_POLICIES))) for run in runs)


@st.composite
def plans(draw):
    world_size = draw(st.integers(1, 64))
    share = draw(st.integers(1, 512))
    return Plan(
        batch_size=share * world_size,
        micro_batch_size=draw(st.integers(1, share)),
        world_size=world_size,
        precision=draw(st.sampled_from(PRECISIONS)),
        recompute=draw(segments_apart()),
        norm_policy=draw(st.sampled_from(["micro", "window", "frozen"])),
        optimizer_impl=draw(st.sampled_from(["as-given", "for-loop", "foreach", "fused"])),
        loss_chunks=draw(st.integers(1, 32)),
        gradient_dtype=draw(st.sampled_from(["float32", "parameter"])),
        sync=draw(st.sampled_from(["window", "micro"])),
        shard=draw(st.sampled_from(["none", "ddp", "fsdp"])),
        uneven=draw(st.booleans()),
        fingerprint=draw(st.none() | st.text(max_size=12)),
    )


@given(plans())
def test_a_plan_read_from_its_json_is_the_same_plan(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)


@given(plans())
def test_the_micro_batches_of_a_plan_cover_a_rank_s_share(plan):
    whole = (plan.accumulation_steps - 1) * plan.micro_batch_size
    assert whole < plan.samples_per_rank <= whole + plan.micro_batch_size


def test_the_json_of_a_plan_holds_built_in_values_and_its_version_first():
    values = json.loads(Plan(**SMALL, recompute=(Segment("a.b", policy="offload"),)).to_json())
    assert next(iter(values)) == "version"
    assert values["version"] == VERSION
    assert values["recompute"] == [{"modules": ["a.b"], "policy": "offload"}]
    assert set(values) == {field.name for field in dataclasses.fields(Plan)}


def test_a_plan_is_frozen_and_takes_no_positional_values():
    plan = Plan(**SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch_size = 4
    with pytest.raises(TypeError):
        Plan(8, 2)


def test_a_single_name_makes_a_segment_of_one_module():
    assert Segment("encoder.layer.0") == Segment(("encoder.layer.0",))


def test_accumulation_steps_count_the_tail():
    assert Plan(batch_size=32, micro_batch_size=5).accumulation_steps == 7
    assert Plan(batch_size=32, micro_batch_size=4, world_size=2).accumulation_steps == 4


@pytest.mark.parametrize("name", ["batch_size", "micro_batch_size", "world_size", "loss_chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True])
def test_a_count_that_is_not_a_positive_whole_number_is_refused(name, value):
    with pytest.raises(PlanError) as caught:
        Plan(**{**SMALL, name: value})
    assert name in caught.value.what
    assert repr(value) in caught.value.got


@pytest.mark.parametrize(
    "name", ["precision", "norm_policy", "optimizer_impl", "gradient_dtype", "sync", "shard", "version"]
)
@pytest.mark.parametrize("value", ["fp16", "", None, 0, ["32-true"]])
def test_an_unknown_choice_is_refused_with_the_choices(name, value):
    with pytest.raises(PlanError) as caught:
        Plan(**{**SMALL, name: value})
    assert repr(value) in caught.value.got
    assert caught.value.expected
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"), [("version", True), ("fingerprint", 5), ("uneven", "yes"), ("recompute", 5), ("recompute", None)]
)
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(PlanError) as caught:
        Plan(**SMALL, **{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize("recompute", [("encoder.layer.0",), [("a",)], (Segment("a"), None)])
def test_recompute_holds_segments_only(recompute):
    with pytest.raises(PlanError, match="not a Segment"):
        Plan(**SMALL, recompute=recompute)


@pytest.mark.parametrize("modules", [(), [], (1,), None, 5])
def test_a_segment_without_module_names_is_refused(modules):
    with pytest.raises(PlanError, match="names no module"):
        Segment(modules)


def test_an_unknown_segment_policy_is_refused():
    with pytest.raises(PlanError, match="policy"):
        Segment("a", policy="half")


def test_a_batch_that_the_ranks_do_not_share_is_refused_unless_uneven():
    with pytest.raises(PlanError) as caught:
        Plan(batch_size=10, micro_batch_size=1, world_size=4)
    assert "batch_size=12" in caught.value.hint
    assert Plan(batch_size=10, micro_batch_size=1, world_size=4, uneven=True).samples_per_rank == 3


def test_a_micro_batch_larger_than_the_batch_is_clamped_and_said():
    with pytest.warns(UserWarning, match="micro_batch_size=64 exceeds a rank's 8 samples"):
        plan = Plan(batch_size=16, micro_batch_size=64, world_size=2)
    assert plan.micro_batch_size == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Plan(batch_size=16, micro_batch_size=8, world_size=2)


def test_a_saved_plan_is_loaded_again(tmp_path):
    plan = Plan(**SMALL, recompute=(Segment(("a", "b")),), fingerprint="abc")
    plan.save(tmp_path / "new" / "plan.json")
    assert Plan.load(tmp_path / "new" / "plan.json") == plan
    assert os.listdir(tmp_path / "new") == ["plan.json"]


def test_a_plan_that_an_editor_saved_with_a_byte_order_mark_is_read(tmp_path):
    plan = Plan(**SMALL)
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8-sig")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_file_cut_off_at_any_byte_is_refused_by_name(tmp_path):
    plan = Plan(**SMALL, recompute=(Segment(("a", "b")),), fingerprint="abc")
    complete = plan.to_json().encode()
    path = tmp_path / "plan.json"
    for length in range(len(complete) - 1):  # the last byte is the newline after the document
        path.write_bytes(complete[:length])
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert str(path) in caught.value.what
    path.write_bytes(complete[:-1])
    assert Plan.load(path) == plan


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 64, b"[]", b"5", b'"plan"', b"null", b"[" * 100_000])
def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in caught.value.what


@pytest.mark.parametrize("path", ["a\0b", None, 5, b"plan.json"])
def test_what_is_no_path_is_refused_by_name(path):
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(path)
    with pytest.raises(PlanError, match="not a JSON document"):
        Plan.from_json(None)


def test_a_key_that_is_in_a_plan_twice_is_named_instead_of_the_last_one_winning():
    document = Plan(**SMALL).to_json().replace('"batch_size": 8', '"batch_size": 8, "batch_size": 4')
    with pytest.raises(PlanError, match="a key twice") as caught:
        Plan.from_json(document)
    assert caught.value.got == "'batch_size'"


@pytest.mark.parametrize("value", [2**63, 10**400, 10**5000], ids=["2^63", "10^400", "10^5000"])
def test_a_count_beyond_torch_s_numbers_is_refused(value):
    with pytest.raises(PlanError, match="batch_size is beyond any batch"):
        Plan(batch_size=value, micro_batch_size=1)
    assert Plan(batch_size=2**63 - 1, micro_batch_size=1).batch_size == 2**63 - 1


@pytest.mark.parametrize(
    "runs",
    [
        (("a",), ("a",)),
        (("a", "b"), ("b", "a")),
        (("a", "b"), ("b", "c")),
        (("a", "b", "c"), ("a",), ("a", "b"), ("b", "c")),
    ],
)
def test_segments_that_overlap_by_name_are_refused_with_the_plan(runs):
    with pytest.raises(PlanError, match="segments overlap"):
        Plan(**SMALL, recompute=tuple(map(Segment, runs)))


def test_segments_inside_of_others_are_a_plan():
    runs = ("a", ("a", "b", "c"), ("b", "c"), "d")
    assert len(Plan(**SMALL, recompute=tuple(map(Segment, runs))).recompute) == 4


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match="cannot read the plan") as caught:
            Plan.load(path)
        assert str(path) in caught.value.what


def test_every_unknown_key_is_named():
    values = {**Plan(**SMALL).to_dict(), "microbatch": 1, "extra": 2}
    with pytest.raises(PlanError, match="unknown keys: 'extra', 'microbatch'"):
        Plan.from_dict(values)


def test_an_unknown_key_of_a_segment_is_named():
    values = {**Plan(**SMALL).to_dict(), "recompute": [{"modules": ["a"], "keep": "matmul"}]}
    with pytest.raises(PlanError, match="unknown keys: 'keep'"):
        Plan.from_dict(values)


@pytest.mark.parametrize("missing", ["version", "batch_size", "micro_batch_size"])
def test_a_missing_key_is_named(missing):
    values = Plan(**SMALL).to_dict()
    del values[missing]
    with pytest.raises(PlanError, match=f"lacks keys: '{missing}'"):
        Plan.from_dict(values)


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", None])
def test_another_version_is_refused_with_both_numbers(version):
    with pytest.raises(PlanError, match="another version") as caught:
        Plan.from_dict({**Plan(**SMALL).to_dict(), "version": version})
    assert repr(version) in caught.value.got
    assert str(VERSION) in caught.value.expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "8"),
        ("uneven", 1),
        ("fingerprint", 5),
        ("recompute", "encoder"),
        ("recompute", [5]),
        ("recompute", [{"policy": "full"}]),
        ("recompute", [{"modules": "a"}]),
        ("recompute", [{"modules": [5]}]),
        ("recompute", [{"modules": ["a"], "policy": 5}]),
    ],
)
def test_a_wrong_type_in_a_file_is_refused(name, value):
    with pytest.raises(PlanError):
        Plan.from_dict({**Plan(**SMALL).to_dict(), name: value})


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "plan.json"
    Plan(**SMALL).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="no space left"):
        Plan(batch_size=16, micro_batch_size=1).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupted_first_write_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Plan(**SMALL).save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []
