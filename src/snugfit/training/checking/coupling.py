"""Why a split batch does not give the gradient of the whole one: wrong counts, a sum for a mean, coupled samples.

Entry point: ``explain``. Asked only after a split was found to differ.

NOTE [Telling causes apart]
1. Let A and B be two micro-batches and AB both at once; f is a loss, g its gradient. A mean over units is
   f(AB) = a f(A) + (1 - a) f(B), g(AB) = a g(A) + (1 - a) g(B), with one and the same a between 0 and 1: the true
   share of A in the count. So a fitted to the gradients that leaves no rest says that only the count is wrong.
2. A sum is f(AB) = f(A) + f(B). It is split rightly once it says that it is one.
3. Anything else couples the samples: what A contributes depends on B. No count can repair that.
   Unless the loss adds means over different units: that is no coupling, but needs a count for each of its terms.
4. A module that couples them gives A another output in AB than alone; if none does, the loss function couples them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.jobs import Count, Loss
from snugfit.training.checking import alternatives, influence, side_effects
from snugfit.training.checking.agreement import Tolerance, errors, loss_error
from snugfit.training.checking.comparison import Bench, Setting, Trial
from snugfit.training.checking.hazards import Hazard

_MAX_PAIRS = 8
_NOTHING = 1e-9


def agree(first: Trial, second: Trial, tolerance: Tolerance) -> bool:
    """Whether two windows have the same gradient and loss."""
    if not (first.is_finite and second.is_finite):
        return False
    overall, by_module = errors(first.gradients, second.gradients, tolerance.floor)
    found = [overall, loss_error(first.loss, second.loss), *by_module.values()]
    return all(error <= tolerance.relative for error in found)


def explain(
    bench: Bench, batch: Any, micro_batch_size: int, full: Trial, setting: Setting, tolerance: Tolerance
) -> list[Hazard]:
    """Find out why a split differs from the full batch, by running parts of it.

    Args:
        bench: Runs the parts.
        batch: The full batch.
        micro_batch_size: Of the split.
        full: The window of the full batch.
        setting: In which it differs.
        tolerance: Within which two windows agree.
    """
    remedy = _count_that_helps(bench, batch, micro_batch_size, full, setting, tolerance)
    if remedy is not None:
        return [_wrong_count(bench, batch, micro_batch_size, remedy)]
    pair = _differing_pair(bench, batch, micro_batch_size, setting, tolerance)
    if pair is None:
        return []
    parts, sizes = pair
    forms: list[bool] = []

    def note(value: Any) -> None:
        forms.append(isinstance(value, Loss))

    first, second, together = (bench.run([part], [1.0], setting, on_loss=note) for part in parts)
    if not (first.is_finite and second.is_finite and together.is_finite):
        return []
    if all(forms):
        counts = sizes if first.count == second.count == 1.0 else (first.count, second.count)
        a, b, both = (_times(trial, trial.count) for trial in (first, second, together))
        if _matches(a, b, both, counts[0] / sum(counts), counts[1] / sum(counts), tolerance):
            return [_mean_as_sum(a.loss, b.loss, both.loss)]
    is_additive = _matches(first, second, together, 1.0, 1.0, tolerance)
    if is_additive and _is_sum(bench, batch, micro_batch_size, setting, tolerance):
        return [_sum_as_mean(together.loss, first.loss, second.loss)]
    given = sizes[0] / (sum(sizes) or 1.0)
    if agree(together, _mixed(first, second, given, 1 - given), tolerance):
        return [_carried(bench, parts[0], setting)]
    share = _share(first, second, together)
    if share is not None and _matches(first, second, together, share, 1 - share, tolerance):
        rest = _distance(together, _mixed(first, second, share, 1 - share))
        if rest < 0.1 * _distance(together, _mixed(first, second, given, 1 - given)):
            return [_unknown_count(share, sizes)]
    found = [_carried(bench, parts[0], setting)] if _is_carried(bench, parts[0], first, setting, tolerance) else []
    module = influence.coupling_module(bench, parts[0], parts[2], setting)
    if module is None and influence.is_separable(bench, parts[0], parts[2], setting, 1e-3 * tolerance.relative):
        if not influence.uses_statistics(bench, parts[2], setting):
            return [*found, _several_denominators(first.loss, second.loss, together.loss)]
    module = None if module == influence.LOSS_FUNCTION else module
    return [*found, _coupled(module, first.loss, second.loss, together.loss)]


def _count_that_helps(
    bench: Bench, batch: Any, micro_batch_size: int, full: Trial, setting: Setting, tolerance: Tolerance
) -> tuple[str, Count] | None:
    given = alternatives.ratios(bench.cut(batch, micro_batch_size)[1])
    ignored = getattr(bench.job.count, "ignore_index", -100)
    tried: list[tuple[list[float], bool]] = [(given, False)]
    found: list[tuple[str, Count]] = []

    def cut(count: Count) -> tuple[list[Any], list[float]]:
        return bench.cut(batch, micro_batch_size, count)

    for text, count, parts, counts in alternatives.countable(batch, cut, ignored):
        ratios = alternatives.ratios(counts)
        helps = next((helps for seen, helps in tried if seen == ratios), None)
        if helps is None and any(counts):
            helps = agree(full, bench.run(parts, counts, setting), tolerance)
            tried.append((ratios, helps))
        if helps:
            found.append((text, count))
    if len(found) < 2:
        return found[0] if found else None
    return next(
        (one for one in found if _helps_ragged(bench, batch, micro_batch_size, one[1], setting, tolerance)), found[0]
    )


def _helps_ragged(
    bench: Bench, batch: Any, micro_batch_size: int, count: Any, setting: Setting, tolerance: Tolerance
) -> bool:
    """Whether a count also helps where labels have other lengths, so that counts that are alike here can be told."""
    other = alternatives.ragged(batch, getattr(count, "key", None), getattr(count, "ignore_index", -100))
    if other is None:
        return False
    parts, counts = bench.cut(other, micro_batch_size, count)
    return agree(bench.run(*bench.cut(other, None, count), setting), bench.run(parts, counts, setting), tolerance)


def _differing_pair(
    bench: Bench, batch: Any, micro_batch_size: int, setting: Setting, tolerance: Tolerance
) -> tuple[tuple[Any, Any, Any], tuple[float, float]] | None:
    """Two neighbouring parts of the batch that differ from both at once, and the counts that they were given."""
    small, counts = bench.cut(batch, micro_batch_size)
    large, _ = bench.cut(batch, 2 * micro_batch_size)
    pairs = [(small[2 * i : 2 * i + 2], counts[2 * i : 2 * i + 2], both) for i, both in enumerate(large)]
    pairs = [pair for pair in pairs if len(pair[0]) == 2][:_MAX_PAIRS]
    whole, number = bench.cut(batch, None)[0], bench.plan.samples_per_rank
    for size in sorted({-(-number // 2), number - micro_batch_size, number - 1}):  # the rest is one part
        parts, shares = bench.cut(batch, max(size, 1))
        pairs += [(parts, shares, whole[0])] if len(parts) == 2 else []
    for pair, shares, both in pairs:
        split, together = bench.run(pair, shares, setting), bench.run([both], [sum(shares) or 1.0], setting)
        if not together.ran_out_of_memory and not agree(together, split, tolerance):
            return (pair[0], pair[1], both), (shares[0], shares[1])
    return None


def _matches(first: Trial, second: Trial, together: Trial, a: float, b: float, tolerance: Tolerance) -> bool:
    # fitting loses some digits
    loose = Tolerance(100 * tolerance.relative, tolerance.floor, tolerance.reason)
    return agree(together, _mixed(first, second, a, b), loose)


def _mixed(first: Trial, second: Trial, a: float, b: float) -> Trial:
    names = dict.fromkeys([*first.gradients, *second.gradients])
    return Trial(
        gradients={name: _mix(first.gradients.get(name), second.gradients.get(name), a, b) for name in names},
        loss=a * first.loss + b * second.loss,
    )


def _distance(first: Trial, second: Trial) -> float:
    return max(errors(first.gradients, second.gradients, 0.0)[0], loss_error(first.loss, second.loss))


def _is_sum(bench: Bench, batch: Any, micro_batch_size: int, setting: Setting, tolerance: Tolerance) -> bool:
    """Whether a micro-batch is the sum of its parts, too: ln 4 = ln 2 + ln 2 alone may be a coincidence."""
    if micro_batch_size == 1:
        return True
    whole, parts = bench.cut(batch, micro_batch_size)[0][0], bench.cut(batch, 1)[0][:micro_batch_size]
    trials = [bench.run([part], [1.0], setting) for part in (whole, *parts)]
    if not all(trial.is_finite for trial in trials):
        return False
    summed = sum(trial.loss for trial in trials[1:])
    return loss_error(trials[0].loss, summed) <= 100 * tolerance.relative


def _mix(first: Tensor | None, second: Tensor | None, a: float, b: float) -> Tensor:
    given = first if first is not None else second
    assert given is not None
    zero = torch.zeros_like(given)
    return a * (zero if first is None else first) + b * (zero if second is None else second)


def _share(first: Trial, second: Trial, together: Trial) -> float | None:
    """The share of the first micro-batch that fits the gradients best; None if they are equal or it is none."""
    above = below = 0.0
    for name in dict.fromkeys([*first.gradients, *second.gradients]):
        step = _mix(first.gradients.get(name), second.gradients.get(name), 1.0, -1.0)
        rest = _mix(together.gradients.get(name, torch.zeros_like(step)), second.gradients.get(name), 1.0, -1.0)
        above += float((step * rest).sum())
        below += float(step.square().sum())
    if below == 0:
        above, below = together.loss - second.loss, first.loss - second.loss
    share = above / below if below else -1.0
    left_out = first if share < _NOTHING else second if share > 1 - _NOTHING else None
    if left_out is not None and any(bool(gradient.any()) for gradient in left_out.gradients.values()):
        return None  # a loss that picks one of the two, such as a maximum
    return share if -_NOTHING <= share <= 1 + _NOTHING else None


def _wrong_count(bench: Bench, batch: Any, micro_batch_size: int, remedy: tuple[str, Count]) -> Hazard:
    text, count = remedy
    given, right = bench.cut(batch, micro_batch_size)[1], bench.cut(batch, micro_batch_size, count)[1]
    return Hazard(
        "wrong-count",
        "",
        f"the loss is not a mean over what the job counts: micro-batches count {_listed(given)} but weigh "
        f"{_listed(right)}; tried: count={text} gives the gradient of the full batch",
    )


def _is_carried(bench: Bench, part: Any, once: Trial, setting: Setting, tolerance: Tolerance) -> bool:
    """Whether the same micro-batch twice is another one the second time."""
    twice = bench.run([part, part], [1.0, 1.0], setting)
    return twice.is_finite and not agree(once, twice, tolerance)


def _carried(bench: Bench, part: Any, setting: Setting) -> Hazard:
    """Each micro-batch alone is right, but not after another one: something is carried from one to the next."""
    states: list[Any] = []

    @contextmanager
    def before(model: nn.Module) -> Iterator[None]:
        states.append(side_effects.state(model))
        yield

    trial = bench.run([part], [1.0], setting, around_model=before, look=side_effects.state)
    after = trial.state or {}
    changed = [key for key, value in after.items() if not side_effects.same(states[0].get(key), value, exactly=True)]
    module, name = changed[0] if changed else ("", "something outside of the model")
    return Hazard(
        "carried-state",
        module,
        f"a micro-batch alone has another gradient than after another one: its forward changes {name} of "
        f"{repr(module) if module else 'the model itself'}, which the next forward reads, once per micro-batch instead "
        "of once per update; change such state only between updates, or keep that module in evaluation mode",
    )


def _mean_as_sum(first: float, second: float, together: float) -> Hazard:
    return Hazard(
        "mean-returned-as-sum",
        "",
        f"Loss.total has to be a sum over the counted units, but two micro-batches have totals {first:.6g} and "
        f"{second:.6g}, and {together:.6g} together, as means have; return the mean itself, or use reduction='sum'",
    )


def _several_denominators(first: float, second: float, together: float) -> Hazard:
    return Hazard(
        "several-denominators",
        "",
        "the loss adds terms that are means over different things (tokens and samples, for example), which one count "
        f"cannot weigh: two micro-batches have loss {first:.6g} and {second:.6g}, both at once {together:.6g}, though "
        "no sample depends on another; return them apart, each with its own count: [Loss(total, count), ...]",
    )


def _times(trial: Trial, factor: float) -> Trial:
    return Trial(gradients={name: g * factor for name, g in trial.gradients.items()}, loss=trial.loss * factor)


def _sum_as_mean(together: float, first: float, second: float) -> Hazard:
    return Hazard(
        "sum-returned-as-mean",
        "",
        f"the loss is a sum, or divided by a fixed number: two micro-batches of loss {first:.6g} and {second:.6g} have "
        f"{together:.6g} together, where a mean lies in between; return snugfit.Loss(total), or use reduction='mean'",
    )


def _unknown_count(share: float, given: tuple[float, float]) -> Hazard:
    return Hazard(
        "wrong-count",
        "",
        f"the loss is not a mean over what the job counts: two micro-batches count {given[0]:g} and {given[1]:g}, but "
        f"the loss weighs them {share:.4f} to {1 - share:.4f}; pass as count what it divides by, or return "
        "snugfit.Loss(total, count)",
    )


def _coupled(module: str | None, first: float, second: float, together: float) -> Hazard:
    place = repr(module) if module else "the model itself"
    seen = f"two micro-batches have loss {first:.6g} and {second:.6g}, both at once {together:.6g}"
    if module is not None:
        return Hazard(
            "batch-coupled-model",
            module,
            f"the output of {place} for a sample depends on the other samples of its micro-batch ({seen}): no "
            "split gives the gradient of the full batch; normalise over each sample alone (GroupNorm, LayerNorm), or "
            "use a micro-batch as large as the batch",
        )
    return Hazard(
        "batch-coupled-loss",
        "",
        f"batch-coupled loss: the loss compares the samples of a batch with each other ({seen}, and no weights make "
        "the one out of the others), so no split gives the gradient of the full batch; use a micro-batch as large as "
        "the batch and save memory by recomputing, or cache the features of all samples first",
    )


def _listed(counts: Sequence[float]) -> str:
    shown = ", ".join(f"{count:g}" for count in counts[:6])
    return f"{shown}, ..." if len(counts) > 6 else shown
