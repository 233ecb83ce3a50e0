"""Canaries: each private name of torch that the memory room uses still does what it is used for."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.optim import optimizer

from snugfit.memory import torch_compiler, torch_private
from snugfit.memory.cuda import autocast
from snugfit.memory.recording import Recorder
from snugfit.training import torch_private as training_private


def test_fake_mode_makes_tensors_without_data():
    with torch_private.FakeMode():
        tensor = torch.ones(1 << 40)
    assert isinstance(tensor, torch_private.Fake)
    assert tensor.untyped_storage().nbytes() == 4 << 40


def test_a_fake_tensor_made_from_the_template_is_as_torch_makes_it():
    mode = torch_private.FakeMode()
    weight = torch.empty(3, 4, device="meta", requires_grad=True)
    by_torch = torch_private.Fake(mode, weight, torch.device("cpu"))
    mode._fake(weight)  # the first one is the template
    ours = mode._fake(weight)
    assert type(ours) is type(by_torch)
    assert vars(ours) == vars(by_torch)
    assert (ours.shape, ours.device, ours.requires_grad) == (by_torch.shape, by_torch.device, True)
    with _warnings_each_time(), pytest.warns(match="Accessing the data pointer of FakeTensor"):
        ours.data_ptr()


def test_a_result_made_again_is_as_torch_makes_it_and_remembers_what_is_known_of_it():
    mode = torch_private.FakeMode()
    with mode:
        left, right = torch.empty(3, 4), torch.empty(4, 5).t().contiguous().t()
    found = []
    for _ in range(2):
        result = mode.run(torch.ops.aten.mm.default, (torch_private.Fake,), (left, right), {})
        found.append((result.shape, result.stride(), result.dtype, result.device, vars(result)))
        recipe = mode.recipe
        recipe.remembered["seen"] = recipe.remembered.get("seen", 0) + 1
    assert found[0] == found[1]
    assert recipe.remembered == {"seen": 2}
    view = mode.run(torch.ops.aten.t.default, (torch_private.Fake,), (left,), {})
    assert (view.shape, view.stride(), mode.recipe) == ((4, 3), (1, 4), None)
    assert view.untyped_storage()._cdata == left.untyped_storage()._cdata


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.zeros(3),
        lambda: torch.arange(0.0, 3.0),
        lambda: torch.ones(3, dtype=torch.int64) / 2,
        lambda: torch.ones(3, dtype=torch.int64).sqrt(),
        lambda: torch.ones(3, dtype=torch.int64) * 1.5,
    ],
)
def test_results_follow_the_default_dtype_where_it_changes_within_a_trace(make):
    types = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    found = []
    with Recorder(host_scalars=False):
        try:
            for dtype in types:
                torch.set_default_dtype(dtype)
                found.append(make().dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == types


def test_what_is_known_of_torch_s_operations_is_shared_and_of_others_is_not():
    with torch.library._scoped_library("snugfit_test", "DEF") as library:
        library.define("make(Tensor x) -> Tensor")
        seen = []
        for length in (3, 5):
            library.impl("make", lambda x, length=length: x.new_empty(length), "Meta", allow_override=True)
            with Recorder(host_scalars=False) as recorder:
                own = torch.ops.snugfit_test.make(torch.empty(2)).shape
                torch.empty(2).sin()
                seen.append((own, recorder.recipe))
    assert [shape for shape, _ in seen] == [(3,), (5,)]
    assert seen[0][1] is seen[1][1] is not None


@pytest.mark.parametrize("values", [[0.5], [[1, 2], [3, 4]], list(range(256)), [True, False], []])
def test_tensors_of_python_numbers_are_lifted_as_torch_lifts_them(values):
    found = []
    for mode in (torch_private.FakeMode(), FakeTensorMode(allow_non_fake_inputs=True)):
        real = torch.tensor(values)
        lift = torch.ops.aten.lift_fresh.default
        fake = mode.run(lift, (), (real,), {}) if mode.__class__ is torch_private.FakeMode else by_torch(mode, real)
        known = None if fake.constant is None else fake.constant.tolist()
        found.append((fake.shape, fake.stride(), fake.dtype, fake.device, fake.untyped_storage().nbytes(), known))
    assert found[0] == found[1]


def by_torch(mode, real):
    with mode:
        return torch.ops.aten.lift_fresh.default(real)


@contextlib.contextmanager
def _warnings_each_time():
    """torch gives this warning once in a process: another test may have had it."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def test_no_guard_of_torch_s_compiler_stands_around_an_operation_of_a_trace():
    assert not hasattr(Recorder.__torch_dispatch__, "__wrapped__")
    assert hasattr(torch._subclasses.FakeTensorMode.__torch_dispatch__, "__wrapped__")


def test_backward_is_seen_with_the_sequence_number_of_its_node():
    seen = []
    weight = torch.ones(2, requires_grad=True)
    before = torch_private.next_sequence_number()
    product = weight * 2
    product.register_hook(lambda gradient: seen.append(torch_private.in_backward()))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch_private.current_sequence_number())
            return gradient

    Probe.apply(product).sum().backward()
    assert not torch_private.in_backward()
    assert torch_private.current_sequence_number() is None
    assert seen == [before + 1, True]


def test_every_operator_of_the_autocast_lists_is_one_of_torch():
    registered = set(torch_private.autocast_registrations("AutocastCUDA"))
    named = autocast.LOWER_PRECISION | autocast.PROMOTE | autocast.FLOAT32_OUTPUT | autocast.BANNED
    assert named <= registered
    assert len(registered) > 100


def test_foreach_is_chosen_for_fake_tensors_only_inside_of_the_context():
    with torch_private.FakeMode():
        weight = torch.nn.Parameter(torch.empty(4))
        chosen = []
        for context in (torch_private.foreach_for_fake_tensors, torch.no_grad):
            with context():
                chosen.append(optimizer._default_to_fused_or_foreach([weight], False)[1])
    assert chosen == [True, False]


def test_the_order_of_the_kernels_for_attention_is_flash_memory_efficient_math():
    assert torch_private.attention_priority()[:4] == [1, 2, 0, 3]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH, set_priority=True):
        assert torch_private.attention_priority()[0] == 0


def test_a_custom_function_casts_its_inputs_through_one_function_of_torch():
    value = torch.zeros(2)
    assert torch.amp.autocast_mode._cast(value, "cpu", torch.float16).dtype == torch.float16
    assert torch.amp.autocast_mode._cast(value, "cuda", torch.float16) is value


@pytest.mark.parametrize(
    ("step", "made"),
    [
        (lambda w: w * 2 + w * 3, 0),  # nobody else holds the gradient that came first
        (lambda w: (w * 1 + w) * 1 + w, 1),  # the sum handed one gradient to both of its inputs
        (lambda w: Doubled.apply(w) * 1, 1),  # Python code
    ],
    ids=["autograd's own", "of a gradient that another holds", "a user's"],
)
def test_autograds_own_sum_of_gradients_is_told_from_others(step, made):
    recorder = Recorder(host_scalars=False)
    with recorder.recording_on():
        weight = torch.ones(4, 4, requires_grad=True)
        step(weight).backward(torch.ones(4, 4))
    sums = [birth for birth in recorder.recording.births if (birth.op, birth.phase) == ("add.Tensor", "backward")]
    assert len(sums) == made


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient


def test_plain_tensors_are_computed_for_real_without_modes():
    with torch_private.FakeMode():
        with torch_private.without_modes():
            assert torch.ones(2).sum().item() == 2
        with torch_private.no_modes():
            assert type(torch.ones(2)) is torch.Tensor
        assert isinstance(torch.ones(2), torch_private.Fake)


def test_a_torch_function_mode_stays_on_in_backward_and_can_be_passed_by():
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        @contextlib.contextmanager
        def entered(self):
            with self:
                yield

        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch_private.no_torch_function():
                gradient.sin()
            return gradient.cos()

    mode = Watching()
    with torch_private.engine_entered(mode), mode:
        Probe.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert "cos" in seen
    assert "sin" not in seen


def test_the_parts_of_a_sparse_tensor_are_its_own_storages():
    with torch_private.FakeMode():
        indices, values = torch.zeros(1, 5, dtype=torch.long), torch.zeros(5, 4)
        made = torch.sparse_coo_tensor(indices, values, (10, 4), check_invariants=False)
        parts = torch_private.sparse_parts(made)
    keys = [part.untyped_storage()._cdata for part in parts]
    assert keys == [indices.untyped_storage()._cdata, values.untyped_storage()._cdata]


def test_wrappers_of_functorch_and_tensors_of_the_meta_device_are_told_apart():
    seen = []

    def loss(x):
        seen.append(torch_private.is_functorch_wrapper(x))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert seen == [True]
    assert not torch_private.is_functorch_wrapper(torch.ones(2))
    with torch_private.FakeMode():
        assert torch_private.is_meta(torch.ones(2, device="meta"))
        assert not torch_private.is_meta(torch.ones(2))


def test_the_default_device_is_the_one_that_was_named():
    assert torch_private.default_device() is None
    torch.set_default_device("meta")
    try:
        assert torch_private.default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


def test_composite_operations_views_and_writes_are_told_apart():
    aten = torch.ops.aten
    assert [torch_private.is_composite(op) for op in (aten.matmul.default, aten.mm.default)] == [True, False]
    assert [torch_private.is_view(op) for op in (aten.view.default, aten.clone.default)] == [True, False]
    assert [torch_private.only_writes(op) for op in (aten.add_.Tensor, aten.add.Tensor)] == [True, False]


def test_compiled_code_runs_eagerly_inside_of_the_context_and_says_so():
    runs, said = [], []

    @torch.compile(backend="eager")
    def function(x):
        runs.append(torch.compiler.is_compiling())
        return x + 1

    with torch_private.compiled_run_eagerly(lambda: said.append("compiled")):
        function(torch.ones(2))
    assert runs == [False]
    assert said == ["compiled"]


def test_a_wrapper_subclass_of_a_card_is_made_on_the_host():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    with torch_private.subclasses_on_host():
        made = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), dtype=torch.float32, device=torch.device("cuda"))
    assert made.device.type == "cpu"


def test_padding_packed_sequences_is_the_function_that_torch_calls():
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func == torch_private.PAD_PACKED_SEQUENCE)
            return func(*args, **(kwargs or {}))

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with Watching():
        torch.nn.utils.rnn.pad_packed_sequence(packed)
    assert any(seen)


def test_packing_padded_sequences_is_the_function_that_torch_calls():
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func == torch_private.PACK_PADDED_SEQUENCE and len(args) == 3)
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 1]))
    assert any(seen)


@pytest.mark.parametrize(("kind", "name"), [(torch.nn.LSTM, "lstm"), (torch.nn.GRU, "gru"), (torch.nn.RNN, "rnn_tanh")])
def test_recurrent_networks_are_seen_by_their_functions(kind, name):
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func == torch_private.RECURRENT[name] and len(args) == 9)
            return func(*args, **(kwargs or {}))

    model, packed = kind(1, 2), torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    with Watching():
        model(packed)
    assert any(seen)


def test_a_backward_has_a_number_of_its_own_also_inside_of_another():
    numbers = []
    weight = torch.ones(2, requires_grad=True)

    def look(gradient):
        numbers.append(training_private.current_backward())
        if len(numbers) == 1:
            with torch.enable_grad():
                inner = torch.ones(2, requires_grad=True)
                inner.register_hook(look)
                inner.sum().backward()
            numbers.append(training_private.current_backward())

    weight.register_hook(look)
    weight.sum().backward()
    first, second, again = numbers
    assert first == again != second
    assert None not in numbers
    assert training_private.current_backward() is None


def test_an_alias_that_is_made_under_a_mode_counts_the_writes_into_either():
    aliases = []

    class Making(training_private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            aliases.append(training_private.counted_alias(result))
            return result

    weight = torch.ones(2, requires_grad=True)
    with Making():
        product = weight * 2
    (alias,) = aliases
    before = alias._version
    product.view(-1).mul_(3)
    assert alias._version == before + 1
    assert torch.equal(alias, product)
    assert not alias.requires_grad


def test_tensors_of_torch_s_fake_mode_are_told_from_real_ones():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert training_private.is_fake(fake)
    assert training_private.is_fake(torch.nn.Parameter(fake))
    assert not training_private.is_fake(torch.nn.Parameter(torch.ones(2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own looking
def test_a_function_that_is_never_compiled_is_left_alone_by_the_compiler_that_calls_it():
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.extend(node.target for node in graph.graph.nodes)
        return graph

    def look(mark):
        def pack(tensor):
            return tensor.detach().clone()

        compiled.clear()
        function = torch.compile(lambda x: x[x > 0] * 2, backend=backend)  # the compiler cannot take this index
        with torch.autograd.graph.saved_tensors_hooks(mark(pack), lambda tensor: tensor):
            function(torch.randn(5, requires_grad=True))
        return "clone" in compiled

    assert look(lambda function: function)
    assert not look(training_private.never_compiled)


# --- torch's compiler ---


def execute(graph):
    return torch.fx.Interpreter(graph).boxed_run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_function_is_captured_with_what_the_partitioner_saves():
    kept = []

    def function(weight, x):
        return [torch.sigmoid(x @ weight).sin()]

    tensors = [torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)]
    run = torch_compiler.captured(function, tensors, 1, execute)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        (result,) = run(*tensors)
    assert torch.equal(result, function(*tensors)[0])
    assert kept == [2 * 3, 2 * 3]  # the input and the product, for all else is computed again
    assert torch.autograd.grad(result.sum(), tensors[0])[0].shape == (3, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hooks_and_modes_around_a_capture_are_set_aside_and_come_back():
    seen = []

    def function(weight):
        seen.append(torch_compiler.is_captured(weight))
        return [nn.functional.linear(weight, weight).to("cuda")]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append("saved") or tensor, lambda tensor: tensor):
        torch_compiler.captured(function, [torch.ones(2, 2, requires_grad=True)], 1, execute)
        assert set(seen) == {True}
        torch.ones(2, requires_grad=True).exp()
    assert seen[-1] == "saved"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_saving_hooks_inside_of_a_capture_are_an_error():
    def function(weight):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return [weight.exp()]

    with pytest.raises(RuntimeError, match="inside of compiled code"):
        torch_compiler.captured(function, [torch.ones(2, requires_grad=True)], 1, execute)


def test_operations_that_the_compiler_joins_are_told_from_others():
    aten = torch.ops.aten
    joined = (aten.gelu.default, aten.sum.dim_IntList, aten.var_mean.correction, aten.cat.default, aten.full.default)
    others = (
        aten.mm.default,
        aten.convolution.default,
        aten.add_.Tensor,
        aten._scaled_dot_product_flash_attention.default,
    )
    assert [torch_compiler.is_fused(op) for op in (*joined, *others)] == [True] * 5 + [False] * 4
    assert [torch_compiler.writes(op) for op in (aten.add_.Tensor, aten.add.Tensor)] == [True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_is_another_function_inside_of_the_context():
    before = torch.compile
    earlier = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    asked = []

    def instead(function, backend):
        asked.append(backend)
        return lambda *args: "instead"

    with torch_compiler.called_instead(instead):
        assert torch.compile(lambda x: x)(1) == "instead"
        assert torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2)) == "instead"
        assert earlier(torch.ones(1, 2)) == "instead"
    assert asked == ["inductor", "aot_eager", "aot_eager"]
    assert torch.compile is before
    assert isinstance(earlier(torch.ones(1, 2)), torch.Tensor)


def test_what_parametrize_caches_is_that_of_its_modules_and_is_put_back():
    module, other = (parametrizations.weight_norm(nn.Linear(2, 2)) for _ in range(2))
    assert training_private.cached_weights([module]) is None
    with parametrize.cached():
        assert training_private.cached_weights([module]) == {}
        weight = module.weight
        assert other.weight is other.weight
        (found,) = training_private.cached_weights(list(module.modules())).values()
        assert found is weight
        with training_private.weights_cached(None):
            assert module.weight is not weight
        assert module.weight is weight
    with training_private.weights_cached({(id(module), "weight"): weight}):
        assert module.weight is weight
    assert module.weight is not weight


def test_torch_func_says_so_where_hooks_on_saved_tensors_are_on():
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with hooks, pytest.raises(RuntimeError, match=training_private.REFUSES_HOOKS):
        torch.func.grad(torch.sin)(torch.ones(()))
