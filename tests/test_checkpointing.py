import copy
import gc
import warnings
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from torch import nn

import snugfit
from models import (
    WIDTH,
    Block,
    ConvBatchNorm,
    LinearStack,
    Transformer,
    WithDropout,
    gradients,
    same_bits,
    squared_error,
    state_of,
    token_batch,
    token_loss,
)
from saved_tensors import saved_bytes
from snugfit import Job, Plan, PlanError, Segment, UnsupportedError, build, estimate, tokens
from snugfit.training import segment_run
from snugfit.training import segments as segments_module
from snugfit.training.checkpointing import apply, blocks, every, is_recomputing, match, segments
from tolerances import EXACT_VALUE, FLOAT64


def same_gradients(model, twin, run):
    """Whether two models get the same gradients, bit for bit, from the same random state."""
    for one in (model, twin):
        torch.manual_seed(3)
        run(one).backward()
    ours, theirs = gradients(model), gradients(twin)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda model: blocks(model),
        lambda model: every(model, 2),
        lambda model: segments(model, 2),
        lambda model: match(model, "*.attn"),
        lambda model: (Segment(("blocks.0", "blocks.1", "blocks.2")), Segment("head")),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_without_recomputation_bit_for_bit(chosen, autocast):
    model = Transformer(depth=3, dropout=0.3)
    twin = copy.deepcopy(model)
    handle = apply(model, chosen(model))
    batch = token_batch(4)

    def run(one):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return token_loss(one, batch)

    assert handle.covered
    assert same_gradients(model, twin, run)


def test_less_is_saved_and_the_input_of_a_segment_is_what_stays():
    model = LinearStack(depth=4, width=16)
    x = torch.randn(32, 16)
    plain = saved_bytes(lambda: model(x))
    apply(model, [Segment(tuple(f"layers.{i}" for i in range(4)))])
    later_weights = (
        sum(layer.weight.numel() for layer in model.layers[1:]) * 4
    )  # the first one's needs no saving: x is data
    assert plain - saved_bytes(lambda: model(x)) == later_weights + 3 * x.numel() * 4


def test_c050_the_recomputation_runs_under_the_forward_s_autocast():
    model = LinearStack(depth=1)
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return super().forward(x)

    model.layers[0] = Spy(6, 6)
    apply(model, [Segment("layers.0")])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 6)).float().sum()
    loss.backward()
    assert seen == [(True, torch.bfloat16)] * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_c054_a_first_block_whose_input_needs_no_gradient_is_trained(frozen):
    model = Transformer(depth=2)
    if frozen:
        model.requires_grad_(False)
        model.blocks[0].ff.requires_grad_(True)
    twin = copy.deepcopy(model)
    apply(model, blocks(model))
    batch = token_batch(3)
    assert same_gradients(model, twin, lambda one: token_loss(one, batch))
    assert gradients(model)


def test_c055_dropout_draws_the_same_mask_again():
    model = nn.Sequential(nn.Dropout(0.5))
    apply(model, [Segment("0")])
    x = torch.ones(1000, requires_grad=True)
    output = model(x)
    output.sum().backward()
    assert torch.equal(x.grad != 0, output != 0)


def test_dropout_under_recomputation_leaves_the_random_stream_where_it_was():
    model = WithDropout()
    twin = copy.deepcopy(model)
    apply(model, blocks(model))
    drawn = []
    for one in (model, twin):
        torch.manual_seed(5)
        one(torch.ones(2, 6)).sum().backward()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class Counting(nn.Module):
    """Counts its calls in a buffer, in an attribute that asks is_recomputing, and in one that does not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.zeros(()))
        self.seen = self.runs = 0

    def forward(self, x):
        self.calls.add_(1)
        self.replaced = self.replaced + 1
        self.runs += 1
        if not is_recomputing():
            self.seen += 1
        return torch.tanh(self.layer(x))


def test_c061_side_effects_in_buffers_happen_once_and_attributes_can_ask():
    model = nn.Sequential(nn.Sequential(Counting(), Counting(), Counting()))
    hooked = []
    for counting in model[0]:
        counting.register_forward_hook(lambda *_: None if is_recomputing() else hooked.append(1))
    apply(model, [Segment("0")])
    model(torch.randn(2, 4)).sum().backward()
    assert [int(counting.calls) for counting in model[0]] == [1, 1, 1]
    assert [float(counting.replaced) for counting in model[0]] == [1, 1, 1]
    assert [counting.seen for counting in model[0]] == [1, 1, 1]
    assert len(hooked) == 3
    assert model[0][0].runs == 2  # it was recomputed indeed
    assert not is_recomputing()


def test_c063_torch_s_own_checkpoint_may_lie_inside_of_a_segment():
    calls = []

    class Inner(nn.Module):
        def forward(self, t):
            def inner(t):
                calls.append(1)
                return torch.sin(t) * t

            return torch.utils.checkpoint.checkpoint(inner, t, use_reentrant=False) ** 2

    model = nn.Sequential(Inner())
    apply(model, [Segment("0")])
    t = torch.tensor(2.0, requires_grad=True)
    model(t).backward()
    plain = torch.tensor(2.0, requires_grad=True)
    ((torch.sin(plain) * plain) ** 2).backward()
    assert t.grad.item() == plain.grad.item() == pytest.approx(0.2800770, abs=EXACT_VALUE)
    assert len(calls) <= 3


def power(exponent):
    class Power(nn.Module):
        def forward(self, t):
            return t**exponent

    return nn.Sequential(Power())


def test_c064_a_gradient_penalty_and_two_losses_from_one_forward():
    model = power(3)
    apply(model, [Segment("0")])
    t = torch.tensor(2.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(t), t, create_graph=True)
    assert gradient.item() == 12.0
    (gradient**2).backward()
    assert float(t.grad) == 288.0

    model = power(2)
    apply(model, [Segment("0")])
    t = torch.tensor(3.0, requires_grad=True)
    y = model(t)
    y.backward(retain_graph=True)
    (2 * y).backward()
    assert float(t.grad) == 18.0


def test_buffers_are_moved_once_also_under_several_backwards():
    model = nn.Sequential(Counting())
    apply(model, [Segment("0")])
    y = model(torch.randn(2, 4)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert int(model[0].calls) == 1


def test_c065_a_frozen_model_in_evaluation_mode_is_recomputed_where_gradients_flow_through_it():
    model = LinearStack(depth=3, width=16).eval().requires_grad_(False)
    x = torch.randn(64, 16, requires_grad=True)
    calls = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    apply(model, [Segment("layers.1")])
    model(x).sum().backward()
    assert x.grad is not None
    assert "forward" in model.layers[1].__dict__


def test_c065_without_gradients_a_call_is_one_plain_forward_even_in_training_mode():
    class Spy(nn.Linear):
        calls = 0

        def forward(self, x):
            Spy.calls += 1
            return super().forward(x)

    model = nn.Sequential(Spy(4, 4), Spy(4, 4)).train()
    apply(model, [Segment(("0", "1"))])
    state = torch.get_rng_state()
    with torch.no_grad():
        assert saved_bytes(lambda: model(torch.randn(2, 4))) == 0
    assert Spy.calls == 2
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.random, "fork_rng", None)
        patch.setattr(segment_run, "_Pass", None)
        model(torch.ones(2, 4))
    assert state is not None


def test_c075_batchnorm_learns_once_from_a_recomputed_forward():
    model = nn.Sequential(nn.BatchNorm1d(1))
    apply(model, [Segment("0")])
    model(torch.tensor([[0.0], [2.0]])).square().sum().backward()
    norm = model[0]
    assert float(norm.running_mean) == pytest.approx(0.1, abs=EXACT_VALUE)
    assert float(norm.running_var) == pytest.approx(1.1, abs=EXACT_VALUE)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("windows", [1, 3])
def test_batchnorm_weights_and_statistics_are_those_without_recomputation_bit_for_bit(windows):
    model = ConvBatchNorm()
    twin = copy.deepcopy(model)
    apply(model, blocks(model))
    for _ in range(windows):
        batch = {"x": torch.randn(4, 3, 6, 6), "y": torch.randn(4, 2)}
        assert same_gradients(model, twin, lambda one, batch=batch: squared_error(one, batch))
    assert same_bits(state_of(model), state_of(twin))


def test_statistics_that_the_output_depends_on_are_seen_as_before_the_forward():
    """Spectral norm iterates in its buffers: recomputed from the iterated ones, gradients belong to another weight."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
    twin = copy.deepcopy(model)
    apply(model, [Segment("0")])
    x = torch.randn(4, 8)
    for _ in range(2):
        assert same_gradients(model, twin, lambda one: one(x).square().sum())
    assert same_bits(state_of(model), state_of(twin))


def test_structures_keyword_arguments_and_none_pass_through():
    @dataclass
    class Output:
        value: torch.Tensor
        rest: object

    class Module(nn.Module):
        def forward(self, inputs, *, scale=None, mask=None):
            return Output(inputs["h"][0] ** 2 * scale["s"], (mask, 3))

    model = nn.Sequential(Module())
    apply(model, [Segment("0")])
    h = torch.tensor(2.0, requires_grad=True)
    s = torch.tensor(1.0, requires_grad=True)
    output = model[0]({"h": [h]}, scale={"s": s})
    assert type(output) is Output
    assert output.rest == (None, 3)
    output.value.backward()
    assert (float(h.grad), float(s.grad)) == (4.0, 4.0)


def test_an_argument_may_have_the_name_of_an_option_of_torch_s_checkpoint():
    class Module(nn.Module):
        def forward(self, *, use_reentrant, debug):
            return use_reentrant * debug

    model = nn.Sequential(Module())
    apply(model, [Segment("0")])
    x = torch.tensor(3.0, requires_grad=True)
    model[0](use_reentrant=x, debug=2).backward()
    assert float(x.grad) == 2.0


def test_a_run_of_modules_keeps_its_hooks_and_extra_arguments():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask, scale=1.0):
            return torch.tanh(self.linear(x)) * mask * scale

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, mask):
            for layer in self.layers:
                x = layer(x, mask, scale=2.0)
            return x

    model = Model()
    twin = copy.deepcopy(model)
    called = []
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, i=i: called.append(i))
    apply(model, [Segment(("layers.0", "layers.1", "layers.2"))])
    x, mask = torch.randn(2, 4), torch.ones(4)
    assert same_gradients(model, twin, lambda one: one(x, mask).sum())
    assert called == [0, 1, 2]


def test_what_lies_between_the_modules_of_a_run_is_kept_and_not_repeated():
    class Model(LinearStack):
        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = Model()
    twin = copy.deepcopy(model)
    apply(model, [Segment(("layers.0", "layers.1", "layers.2"))])
    x = torch.randn(5, 6)
    assert same_gradients(model, twin, lambda one: one(x).sum())
    # tanh saves its result three times; the first two of them are what the later layers are called with
    assert saved_bytes(lambda: model(x)) == 3 * x.nbytes + x.nbytes


def test_removing_restores_every_forward_exactly():
    model = Transformer()
    own = lambda x: x  # noqa: E731
    model.blocks[1].forward = own
    before = [dict(module.__dict__) for module in model.modules()]
    handle = apply(model, blocks(model))
    assert model.blocks[1].forward is not own
    for _ in range(2):
        handle.remove()
        assert [dict(module.__dict__) for module in model.modules()] == before
    assert model.blocks[1].forward is own


def test_applying_the_same_again_changes_nothing_and_either_handle_removes_it():
    model = LinearStack()
    chosen = [Segment("layers.0"), Segment(("layers.1", "layers.2"))]
    apply(model, chosen)
    forwards = [layer.__dict__["forward"] for layer in model.layers]
    again = apply(model, chosen)
    assert [layer.__dict__["forward"] for layer in model.layers] == forwards
    assert again.covered == ("layers.0", "layers.1", "layers.2")
    again.remove()
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_a_failed_application_undoes_its_partial_work():
    model = LinearStack()
    apply(model, [Segment("layers.2")])
    with pytest.raises(PlanError, match="already"):
        apply(model, [Segment("layers.0"), Segment(("layers.1", "layers.2"))])
    assert ["forward" in layer.__dict__ for layer in model.layers] == [False, False, True]


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ([], "no segment"),
        ([Segment("blocks.7"), Segment("bocks.0")], "blocks.7, bocks.0"),
        ([Segment("blocks.0"), Segment("blocks.0")], "blocks.0 twice"),
        ([Segment(("blocks.0", "blocks.1")), Segment(("blocks.1", "blocks.2"))], "blocks.1, blocks.2 and blocks.0"),
        ([Segment(("blocks.0.ff", "blocks.1")), Segment("blocks.0")], "blocks.0 and blocks.0.ff"),
        ([Segment(("blocks.0.ff", "blocks.0"))], "blocks.0.ff inside of blocks.0"),
    ],
)
def test_segments_that_cover_nothing_or_overlap_are_refused_by_name(chosen, named):
    model = Transformer(depth=3)
    with pytest.raises(PlanError) as caught:
        apply(model, chosen)
    assert named in caught.value.got
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_blocks_are_the_repeated_containers_and_of_several_all_that_matter():
    class EncoderDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(Block(4) for _ in range(3))
            self.decoder = nn.Sequential(Block(4), Block(4))
            self.small = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

    names = [segment.modules for segment in blocks(EncoderDecoder())]
    assert names == [("encoder.0",), ("encoder.1",), ("encoder.2",), ("decoder.0",), ("decoder.1",)]


class Staged(nn.Module):
    """A list of stages, each a list of blocks, as in PVT."""

    def __init__(self, depths=(3, 2)):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block(4) for _ in range(depth)) for depth in depths)

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


def test_blocks_of_a_list_of_lists_are_the_modules_that_run():
    model = Staged()
    twin = copy.deepcopy(model)
    names = [segment.modules[0] for segment in blocks(model)]
    assert names == ["stages.0.0", "stages.0.1", "stages.0.2", "stages.1.0", "stages.1.1"]
    apply(model, blocks(model))
    assert same_gradients(model, twin, lambda one: one(torch.ones(2, 4)).square().sum())
    assert [len(segment.modules) for segment in segments(Staged(), 2)] == [1, 2, 1, 1]


def test_a_plan_recomputes_the_modules_that_run_in_a_list_of_lists():
    job = Job(
        lambda: Staged((6, 6)),
        lambda model, batch: model(batch["x"]).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: {"x": torch.ones(n, 4)},
    )
    whole = estimate(job, Plan(batch_size=4096, micro_batch_size=4096), "cpu")
    found = snugfit.plan(job, "cpu", 4096, budget=whole.needed_bytes // 2, fixed={"micro_batch_size": 4096})
    names = {name for segment in found.plan.recompute for name in segment.modules}
    assert names
    assert all(name.count(".") >= 2 for name in names)


def test_blocks_of_a_bert_are_its_layers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=20
    )
    model = transformers.BertForSequenceClassification(config)
    twin = copy.deepcopy(model)
    assert [s.modules[0] for s in blocks(model)] == [f"bert.encoder.layer.{i}" for i in range(3)]
    apply(model, segments(model, 2))
    ids = torch.randint(20, (2, 5))
    run = lambda one: one(input_ids=ids, labels=torch.tensor([0, 1])).loss  # noqa: E731
    assert same_gradients(model, twin, run)


def test_every_takes_the_first_of_each_k_blocks_and_segments_share_them_out():
    model = LinearStack(depth=7)
    assert [segment.modules[0] for segment in every(model, 3)] == ["layers.0", "layers.3", "layers.6"]
    assert [len(segment.modules) for segment in segments(model, 3)] == [2, 2, 3]
    assert [name for segment in segments(model, 3) for name in segment.modules] == [f"layers.{i}" for i in range(7)]


@pytest.mark.parametrize("number", [0, -1, 8, 2.0])
def test_a_number_of_blocks_or_segments_that_does_not_fit_is_refused(number):
    model = LinearStack(depth=7)
    for choose in (every, segments):
        with pytest.raises(PlanError, match="number of blocks"):
            choose(model, number)


def test_every_k_th_block_is_counted_in_each_chain_of_its_own():
    class EncoderDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(Block(4) for _ in range(3))
            self.decoder = nn.ModuleList(Block(4) for _ in range(4))

    names = [segment.modules[0] for segment in every(EncoderDecoder(), 2)]
    assert names == ["encoder.0", "encoder.2", "decoder.0", "decoder.2"]


def test_one_block_that_is_run_again_and_again_is_found_where_it_holds_the_weights():
    class Again(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embedding, self.groups = nn.Embedding(100, 4), nn.ModuleList([nn.Linear(width, width)])

        def forward(self, ids):
            x = self.embedding(ids)
            for _ in range(5):
                x = self.groups[0](x).sin()
            return x.sum()

    model = nn.ModuleDict({"body": Again(4)})["body"]
    with pytest.raises(PlanError, match="no repeated blocks"):  # 20 of 420 weights
        blocks(model)
    assert [segment.modules for segment in blocks(Again(16))] == [("groups.0",)]
    twin = copy.deepcopy(model)
    apply(model, [Segment("groups.0")])
    assert same_gradients(model, twin, lambda one: one(torch.arange(6)))


def test_a_model_without_blocks_and_a_pattern_without_a_match_are_refused():
    with pytest.raises(PlanError, match="no repeated blocks"):
        blocks(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="matches no module"):
        match(LinearStack(), "*.attn")


def test_a_deep_copy_of_a_recomputed_model_refers_to_itself():
    model = LinearStack()
    apply(model, [Segment("layers.0")])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers[0].weight.zero_()
        twin.layers[0].bias.zero_()
    x = torch.ones(1, 6)
    assert not torch.equal(model(x), twin(x))
    twin(x).sum().backward()
    assert model.layers[0].weight.grad is None
    assert twin.layers[0].weight.grad is not None


def test_what_a_segment_made_is_freed_without_the_collector():
    model = LinearStack()
    apply(model, [Segment(("layers.0", "layers.1"))])
    gc.disable()
    try:
        output = model(torch.randn(2, 6))
        alive = weakref.ref(output)
        output.sum().backward()
        del output
        assert alive() is None
    finally:
        gc.enable()


# models of transformers, and compiled ones


def causal(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **sizes, **dropout))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
        )
    return model.double().train()


def padded_tokens():
    ids = torch.randint(0, 50, (6, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < torch.tensor([8, 5, 8, 3, 2, 8])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def own_loss(model, micro_batch):
    return model(**micro_batch).loss


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_causal_model_with_its_cache_on_has_the_gradients_of_one_without_recomputation(kind):
    model, twin, batch = causal(kind), causal(kind), padded_tokens()
    assert model.config.use_cache is True
    with pytest.warns(UserWarning, match="use_cache.*False while blocks are recomputed") as caught:
        handle = apply(model, blocks(model))
    assert len(caught) == 1
    assert model.config.use_cache is False
    own_loss(model, batch).backward(), own_loss(twin, batch).backward()
    for name, gradient in gradients(twin).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=FLOAT64, atol=FLOAT64)
    again = apply(model, blocks(model))  # warnings are errors
    handle.remove()
    assert model.config.use_cache is False
    again.remove()
    assert model.config.use_cache is True
    model.config.use_cache = False
    apply(model, blocks(model)).remove()
    assert model.config.use_cache is False


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_engines_estimates_and_copies_of_causal_models_take_the_same_way(kind):
    model, batch = causal(kind), padded_tokens()
    plan = Plan(batch_size=6, micro_batch_size=3, recompute=blocks(model))
    job = Job(model, own_loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), batch, count=tokens(shift=True))
    with pytest.warns(UserWarning, match="use_cache"):
        estimate(job, plan, "cpu")
    assert model.config.use_cache is True
    with pytest.warns(UserWarning, match="use_cache"):
        engine = build(job, plan, "cpu")
    assert not engine.step(batch).skipped
    twin = copy.deepcopy(engine)
    assert not twin.step(batch).skipped
    assert engine.close().config.use_cache is True
    assert twin.model.config.use_cache is False
    assert twin.close().config.use_cache is True


def test_an_encoder_of_transformers_is_not_warned_of():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertModel(config)
    apply(model, blocks(model)).remove()  # warnings are errors
    assert model.config.use_cache is True


def compiled_whole():
    return torch.compile(LinearStack(), backend="eager")


def compiled_inside():
    model = LinearStack()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    return model


def compiled_in_place():
    model = LinearStack()
    model.layers[1].compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:segments that are recomputed run uncompiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own looking
@pytest.mark.parametrize("kind", [compiled_whole, compiled_inside, compiled_in_place])
@pytest.mark.parametrize("chosen", [("layers.1",), ("layers.0", "layers.1", "layers.2")])
def test_segments_of_compiled_modules_are_recomputed_and_names_are_those_of_the_plain_model(kind, chosen):
    torch._dynamo.reset()
    model = kind()
    twin = LinearStack()
    twin.load_state_dict({segments_module.without_wrappers(n): value for n, value in model.state_dict().items()})
    x = torch.randn(4, 6)
    plain = saved_bytes(lambda: model(x))
    handle = apply(model, [Segment(chosen)])
    assert handle.covered == chosen
    assert same_bits([p.grad for p in both(model, x)], [p.grad for p in both(twin, x)])
    weights = len(set(chosen) - {"layers.0"}) * 6 * 6 * 4  # the first one's needs no saving: x is data
    assert plain - saved_bytes(lambda: model(x)) == weights + (len(chosen) - 1) * x.nbytes
    handle.remove()
    assert saved_bytes(lambda: model(x)) == plain


def both(model, x):
    model(x).sum().backward()
    return list(model.parameters())


class Sines(nn.Module):
    def forward(self, x):
        for _ in range(6):
            x = x.sin()
        return x


@pytest.mark.filterwarnings("ignore:segments that are recomputed run uncompiled")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c123_six_sines_checkpointed_then_compiled_and_compiled_then_checkpointed_keep_4000_bytes(backend):
    torch._dynamo.reset()
    x = torch.randn(1000, requires_grad=True)
    expected = x
    for _ in range(6):
        expected = expected.sin()
    (expected,) = torch.autograd.grad(expected.sum(), x)

    first = nn.Sequential(Sines())
    apply(first, [Segment("0")])
    first = torch.compile(first, backend=backend)
    second = nn.Sequential(torch.compile(Sines(), backend=backend))
    apply(second, [Segment("0")])
    late = torch.compile(nn.Sequential(Sines()), backend=backend)
    late(x)  # compiled before there is a segment
    apply(late, [Segment("0")])
    for model in (first, second, late):
        assert saved_bytes(lambda model=model: model(x)) == 4000
        assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], expected)


@pytest.mark.filterwarnings("ignore:segments that are recomputed run uncompiled")
def test_c123_a_model_that_passes_twice_through_the_same_blocks_keeps_the_input_of_each_pass():
    torch._dynamo.reset()
    block = Sines()
    model = nn.Sequential(block, block)
    apply(model, [Segment("0")])
    model = torch.compile(model, backend="eager")
    x = torch.randn(1000, requires_grad=True)
    assert saved_bytes(lambda: model(x)) == 8000
    plain = x
    for _ in range(12):
        plain = plain.sin()
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], torch.autograd.grad(plain.sum(), x)[0])


def test_a_compiled_model_says_once_that_its_segments_run_uncompiled():
    torch._dynamo.reset()
    model = LinearStack()
    apply(model, [Segment(("layers.0", "layers.1"))])
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="run uncompiled") as caught:
        compiled(torch.randn(2, 6))
    compiled(torch.randn(2, 6))
    assert len(caught) == 1


def forward_mode(model, x):
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize(
    ("differentiate", "named"),
    [
        (lambda model, x: torch.func.grad(lambda x: model(x).sum())(x), "torch.func"),
        (
            lambda model, x: torch.func.grad(lambda own: torch.func.functional_call(model, own, x).sum())(
                dict(model.named_parameters())
            ),
            "torch.func",
        ),
        (lambda model, x: torch.func.vmap(model)(x), "torch.func"),
        (lambda model, x: torch.func.jacrev(model)(x), "torch.func"),
        (forward_mode, "forward_ad"),
    ],
)
def test_gradients_of_torch_func_and_of_forward_mode_are_refused_by_name_and_leave_no_trace(differentiate, named):
    model, x = LinearStack(), torch.randn(3, 6)
    twin = copy.deepcopy(model)
    apply(model, [Segment("layers.0"), Segment(("layers.1", "layers.2"))])
    with pytest.raises(UnsupportedError, match="ordinary backward") as caught:
        differentiate(model, x)
    assert named in caught.value.got
    assert caught.value.names == ("layers.0",)
    assert same_bits([p.grad for p in both(model, x)], [p.grad for p in both(twin, x)])


def test_torch_func_without_gradients_goes_through_segments():
    model, x = LinearStack(), torch.randn(3, 6)
    apply(model, [Segment("layers.0")])
    with torch.no_grad():
        assert torch.allclose(torch.func.vmap(model)(x), model(x))


def test_segments_of_scripted_modules_are_refused_by_name():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="TorchScript") as caught:
        apply(model, [Segment("0")])
    assert caught.value.names == ("0",)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_names_of_the_plain_model_are_found_behind_an_adapter_library():
    peft = pytest.importorskip("peft")
    model = causal("llama")
    model.config.use_cache = False
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    twin, batch = copy.deepcopy(adapted), padded_tokens()
    assert apply(adapted, [Segment("model.layers.0")]).covered == ("model.layers.0",)
    assert same_gradients(adapted, twin, lambda one: own_loss(one, batch))
    apply(twin, blocks(twin))
    assert same_gradients(adapted, twin, lambda one: own_loss(one, batch))


# segments that do nothing


class _Spare(LinearStack):
    """Has a layer that its forward never calls."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 4)


def _spare_job():
    def batch(n):
        return {"x": torch.ones(n, WIDTH), "y": torch.zeros(n, WIDTH)}

    return Job(_Spare, squared_error, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch)


def _spare_plan(*runs):
    return Plan(batch_size=4, micro_batch_size=2, recompute=tuple(map(Segment, runs)))


@pytest.mark.parametrize("container", [nn.ModuleList, lambda layers: nn.ModuleDict({str(i): m for i, m in layers})])
def test_a_container_that_is_never_called_is_refused_with_the_names_of_its_entries(container):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Module()
    model.layers = container(layers if container is nn.ModuleList else enumerate(layers))
    with pytest.raises(PlanError, match="no forward of its own") as caught:
        apply(model, [Segment("layers")])
    assert "'layers'" in caught.value.got
    assert "match:layers.*" in caught.value.hint
    assert "layers.0" in caught.value.hint


def test_segments_none_of_which_runs_are_refused_before_the_first_update_and_in_an_estimate():
    job, plan = _spare_job(), _spare_plan("spare")
    engine = build(job, plan, "cpu")
    before = state_of(engine.model)
    with pytest.raises(PlanError, match="no segment has run") as caught:
        engine.step(job.batch(4))
    assert caught.value.got.startswith("spare")
    assert same_bits(state_of(engine.model), before)
    with pytest.raises(PlanError, match="no segment has run"):
        estimate(job, plan, "cpu")


def test_a_segment_that_does_not_run_beside_others_that_do_is_a_warning_once():
    job = _spare_job()
    engine = build(job, _spare_plan("spare", "layers.0"), "cpu")
    with pytest.warns(UserWarning, match="did not run in the first window.*: spare$"):
        engine.step(job.batch(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(job.batch(4))


def test_a_run_named_in_another_order_than_it_runs_in_is_a_warning_and_trains_alike():
    job = _spare_job()
    torch.manual_seed(0)
    plain = build(job, _spare_plan(), "cpu")
    torch.manual_seed(0)
    reversed_ = build(job, _spare_plan(("layers.1", "layers.0")), "cpu")
    with pytest.warns(UserWarning, match="not run in the order.*: layers.1\\+layers.0;"):
        reversed_.step(job.batch(4))
    plain.step(job.batch(4))
    assert same_bits(state_of(reversed_.model), state_of(plain.model))


def test_models_that_share_a_configuration_get_their_cache_back_when_none_is_recomputed():
    config = causal("gpt2").config
    first, second = (transformers.GPT2LMHeadModel(config) for _ in range(2))
    with pytest.warns(UserWarning, match="use_cache"):
        handles = [apply(model, blocks(model)) for model in (first, second)]
    handles[0].remove()
    assert config.use_cache is False
    handles[1].remove()
    assert config.use_cache is True


def test_a_configuration_gets_its_cache_back_when_its_recomputed_model_is_gone():
    config = causal("gpt2").config
    model = transformers.GPT2LMHeadModel(config)
    with pytest.warns(UserWarning, match="use_cache"):
        apply(model, blocks(model))
    assert config.use_cache is False
    del model
    gc.collect()
    assert config.use_cache is True


@pytest.mark.filterwarnings("ignore:config.use_cache")
def test_an_estimate_leaves_a_configuration_that_its_models_share_as_it_was():
    config = causal("gpt2").config
    job = Job(
        lambda: transformers.GPT2LMHeadModel(config),
        own_loss,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        padded_tokens(),
        count=tokens(shift=True),
    )
    plain = Plan(batch_size=6, micro_batch_size=3)
    before = estimate(job, plain, "rtx-3090")
    estimate(job, replace(plain, recompute=blocks(transformers.GPT2LMHeadModel(config))), "rtx-3090")
    assert config.use_cache is True
    assert estimate(job, plain, "rtx-3090").peak_allocated_bytes == before.peak_allocated_bytes
    torn = replace(plain, recompute=blocks(job.model()))
    with pytest.raises(ZeroDivisionError):
        estimate(replace(job, optimizer=lambda m: 1 / 0), torn, "rtx-3090")
    gc.collect()
    assert config.use_cache is True
