"""What a unit keeps whose segment keeps results: read off a forward of it, whatever that forward drops.

Entry points: ``kept_in_runs`` and ``keeping_products``. In a run, other than by itself, the result of a unit's last
product is needed by the unit behind it. The options of a unit by itself are measured by ``probing``, as far as there
are units enough that are alike.
"""

import fnmatch
import functools
from collections.abc import Sequence

from snugfit.memory.events import Recording
from snugfit.planning.chain import KeptInRun, Option
from snugfit.planning.cutting import Element, Sizes
from snugfit.planning.held_up import Spent
from snugfit.planning.units import FULL, KEEP_ATTENTION_LAST, KEEP_LAST, KEEP_PRODUCTS
from snugfit.training.keeping import ATTENTION, MATRIX_PRODUCTS


def kept_in_runs(
    recording: Recording,
    element: Element,
    sizes: Sizes,
    spent: Spent,
    forward_ns: int,
    options: Sequence[Option],
) -> tuple[KeptInRun, ...]:
    """The policies that runs of a unit may have; none where it has no matrix product.

    Args:
        recording: Where the unit's forward is.
        element: The unit.
        sizes: Bytes of each birth of the recording.
        spent: Time of each piece of its work.
        forward_ns: What recomputing all of the unit costs.
        options: What was measured of the unit by itself, recomputing all of it among them.
    """
    births = [event - 1 for event in recording.events[slice(*element.forward)] if event > 0]

    def results_of(names: tuple[str, ...]) -> list[int]:
        found = [(recording.births[i], int(sizes[i])) for i in births]
        return [size for birth, size in found if birth.category != "workspace" and _is_one_of(birth.op, names)]

    def times_of(names: tuple[str, ...]) -> list[int]:
        pieces = [i for i in range(*element.forward_work) if _is_one_of(recording.work[i][1].op, names)]
        return [int(spent.if_repeated[i]) for i in pieces]

    products, times = results_of(MATRIX_PRODUCTS), times_of(MATRIX_PRODUCTS)
    watching = int(spent.by_watching[slice(*element.forward_work)].sum())
    known = {option.name: option for option in options}
    if not products or not times or FULL not in known:
        return ()
    full = known[FULL]

    def way(policy: str, kept_bytes: int, spared_ns: int) -> KeptInRun:
        own = known.get(policy)
        if own is None:
            again_ns = forward_ns - spared_ns + watching
            return KeptInRun(policy, kept_bytes, again_ns, again_ns)
        # Where nothing behind the last product is saved, the unit by itself neither keeps nor repeats that.
        keeps_last = own.kept_bytes - full.kept_bytes > kept_bytes - products[-1]
        again_ns = own.extra_ns + forward_ns - full.extra_ns - (0 if keeps_last else times[-1])
        return KeptInRun(policy, kept_bytes, max(again_ns, 0), own.extra_ns)

    mixed, mixing = sum(results_of(ATTENTION)), sum(times_of(ATTENTION))
    found = [way(KEEP_LAST, products[-1], times[-1])]
    if mixed:
        found.append(way(KEEP_ATTENTION_LAST, products[-1] + mixed, times[-1] + mixing))
    if mixed or len(products) > 1:
        found.append(way(KEEP_PRODUCTS, sum(products) + mixed, sum(times) + mixing))
    return tuple(found)


def keeping_products(in_runs: Sequence[KeptInRun], plain: Option, full: Option, again_ns: int) -> Option | None:
    """A unit by itself that keeps its products, where that was not measured; None where it has none.

    What is repeated ends with the last tensor that backward needs, as where all of it is recomputed: where that leaves
    no time for the last product, this neither repeats nor keeps it.

    Args:
        in_runs: Of the unit.
        plain: The unit as it is.
        full: The unit recomputed.
        again_ns: What recomputing all of it costs in a run.
    """
    known = {way.policy: way for way in in_runs}
    if KEEP_PRODUCTS not in known:
        return None
    kept, spared_ns = known[KEEP_PRODUCTS].kept_bytes, again_ns - known[KEEP_PRODUCTS].again_ns
    last = known[KEEP_LAST]
    last_ns = again_ns - last.again_ns
    if again_ns - full.extra_ns >= last_ns:
        kept, spared_ns = kept - last.kept_bytes, spared_ns - last_ns
    if kept <= 0:
        return None
    return Option(
        name=KEEP_PRODUCTS,
        kept_bytes=full.kept_bytes + kept,
        forward_bytes=max(min(plain.forward_bytes, full.forward_bytes + kept), kept),
        backward_bytes=max(full.backward_bytes, full.kept_bytes + kept),
        extra_ns=max(full.extra_ns - spared_ns, 0),
    )


@functools.cache
def _is_one_of(op: str, names: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(op.partition(".")[0], name) for name in names)
