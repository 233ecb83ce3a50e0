"""Chains of units by formula: GPT-2 of any depth in bf16-mixed on an A100, and units of which no two are alike.

The tensors of a block are those that eager PyTorch saves under autocast with fused attention and dropout on the
residual stream; ``A`` is the number of elements of one activation. Times are a roofline per operation.
"""

import random
from dataclasses import dataclass

from snugfit.planning.chain import NOTHING, KeptInRun, Option, Unit

BATCH, CONTEXT, WIDTH, VOCABULARY, CHUNKS = 8, 1024, 768, 50257, 8
TOKENS = BATCH * CONTEXT
FLOPS, BANDWIDTH = 200e12, 1.4e12
"What an A100 reaches of its 312 TFLOP/s and 1.555 TB/s."
A = TOKENS * WIDTH
LOGITS = TOKENS * VOCABULARY
BLOCK_PARAMETERS = 12 * WIDTH * WIDTH


def roofline_ns(flops: float, moved: float) -> int:
    """Time of one operation."""
    return round(1e9 * max(flops / FLOPS, moved / BANDWIDTH))


@dataclass(frozen=True)
class Saved:
    """A tensor that a block keeps for backward, and the operations that make it again from those before it."""

    bytes: int
    again_ns: int


def _matmul(columns_in: int, columns_out: int) -> int:
    return roofline_ns(2 * TOKENS * columns_in * columns_out, 2 * TOKENS * (columns_in + columns_out))


_NORM = roofline_ns(0, 8 * A) + roofline_ns(0, 6 * A)  # float32 in and out, then the cast to bfloat16
_CONTRACT_NS = _matmul(4 * WIDTH, WIDTH)
_DROPOUT = roofline_ns(0, 5 * A)
_ADD = roofline_ns(0, 10 * A)
SAVED = {
    "norm of attention": Saved(2 * A, _NORM),
    "qkv": Saved(6 * A, _matmul(WIDTH, 3 * WIDTH)),
    "attention": Saved(2 * A, roofline_ns(4 * A * CONTEXT / 2, 8 * A)),
    "middle of the stream": Saved(5 * A, _matmul(WIDTH, WIDTH) + _DROPOUT + _ADD),
    "norm of feed-forward": Saved(2 * A, _NORM),
    "expanded": Saved(8 * A, _matmul(WIDTH, 4 * WIDTH)),
    "gelu": Saved(8 * A, roofline_ns(0, 16 * A)),
    "mask": Saved(A, _matmul(4 * WIDTH, WIDTH) + _DROPOUT),
}
"In the order of the forward; the middle of the stream comes with the mask of the dropout before it."
STREAM = 4 * A
TAIL_NS = _ADD
PLAIN_BYTES = STREAM + sum(one.bytes for one in SAVED.values())
FORWARD_NS = sum(one.again_ns for one in SAVED.values()) + TAIL_NS
_ATTENTION, _FEED_FORWARD = ("norm of attention", "qkv", "attention"), ("norm of feed-forward", "expanded", "gelu")
_IN_BACKWARD = 20 * A
"Gradients of the expanded features, before and behind the GELU, and of the stream."


def again_ns(dropped: tuple[str, ...]) -> int:
    """Time to make dropped tensors of a block again; each is made once, from what is there by then."""
    return sum(SAVED[name].again_ns for name in dropped)


def block_options() -> tuple[Option, ...]:
    """What snugfit's segments can do with one block; each of them is a plan of ``Segment`` with a policy."""
    made = PLAIN_BYTES + _IN_BACKWARD
    rest = ("norm of attention", "norm of feed-forward", "gelu", "mask")

    def option(name: str, dropped: tuple[str, ...], *, beside: int = 0, backward: int = made, extra: int = 0) -> Option:
        kept = PLAIN_BYTES - sum(SAVED[one].bytes for one in dropped) + beside
        again = again_ns(dropped) + extra
        return Option(
            name=name,
            kept_bytes=kept,
            forward_bytes=kept + 8 * A,
            backward_bytes=backward + beside,
            extra_ns=again,
        )

    less = sum(SAVED[one].bytes for one in _ATTENTION)
    of_feed_forward = ("norm of feed-forward", "gelu")
    matmul_outputs = 4 * A  # of the projection and of the contraction, which autograd itself does not keep
    of_stream = roofline_ns(0, 5 * A) + roofline_ns(0, 10 * A)  # the middle of the stream again, from the projection
    return (
        option(NOTHING, ()),
        option("attention", _ATTENTION, backward=made - less),
        option("feed-forward", _FEED_FORWARD),
        option("each part", _ATTENTION + _FEED_FORWARD, backward=made - less),
        option(
            "keep-matmul",
            ("norm of attention", "norm of feed-forward", "gelu", "mask"),
            beside=matmul_outputs - SAVED["middle of the stream"].bytes,
            extra=of_stream - _matmul(4 * WIDTH, WIDTH),
        ),
        option("feed-forward, keep-matmul", of_feed_forward, beside=2 * A),
        option(
            "attention; feed-forward, keep-matmul", _ATTENTION + of_feed_forward, beside=2 * A, backward=made - less
        ),
        option("keep-last", tuple(SAVED), beside=2 * A, extra=-_CONTRACT_NS),
        option(
            "keep-attention-last", (*rest, "qkv", "middle of the stream", "expanded"), beside=2 * A, extra=-_CONTRACT_NS
        ),
        option("full", tuple(SAVED)),
    )


def _in_runs() -> tuple[KeptInRun, ...]:
    """What a block keeps in a run that keeps its last product, attention as well, and all of its products."""
    mixed = SAVED["attention"]
    products = SAVED["qkv"].again_ns + SAVED["expanded"].again_ns + _matmul(WIDTH, WIDTH)

    def way(policy: str, kept: int, spared: int) -> KeptInRun:
        again = FORWARD_NS - _CONTRACT_NS - spared
        return KeptInRun(policy, 2 * A + kept, again, again - TAIL_NS)

    return (
        way("keep-last", 0, 0),
        way("keep-attention-last", mixed.bytes, mixed.again_ns),
        way("keep-matmul", 18 * A, mixed.again_ns + products),
    )


def gpt_chain(blocks: int = 12, *, accumulates: bool = True, chunked: bool = False) -> tuple[Unit, ...]:
    """Embedding, blocks and head of a GPT-2; where micro-batches accumulate, all gradients are always there."""
    parameters = blocks * BLOCK_PARAMETERS + (VOCABULARY + CONTEXT) * WIDTH
    held = 12 * parameters + (4 * parameters if accumulates else 0)  # weights, AdamW's state, gradients
    options = block_options()

    def unit(kept: tuple[Option, ...], done: int, *, spent: int, joins: bool = False) -> Unit:
        grown = 0 if accumulates else 4 * BLOCK_PARAMETERS * (blocks - done)
        return Unit(
            options=kept,
            input_bytes=STREAM,
            forward_static_bytes=held + STREAM,
            backward_static_bytes=held + STREAM + grown,
            forward_ns=spent,
            joins_next=joins,
            tail_ns=TAIL_NS if joins or spent == FORWARD_NS else 0,
            in_runs=_in_runs() if spent == FORWARD_NS else (),
        )

    def single(kept: int, most: int) -> tuple[Option, ...]:
        return (Option(name=NOTHING, kept_bytes=kept, forward_bytes=most, backward_bytes=most + kept, extra_ns=0),)

    logits = LOGITS // CHUNKS if chunked else LOGITS
    head = single(6 * A if chunked else 6 * A + 4 * LOGITS, 8 * logits)
    return (
        unit(single(A, 9 * A), 0, spent=roofline_ns(0, 9 * A)),
        *(unit(options, number, spent=FORWARD_NS, joins=number < blocks - 1) for number in range(blocks)),
        unit(head, blocks, spent=roofline_ns(2 * LOGITS * WIDTH, 8 * LOGITS)),
    )


def plain_ns(blocks: int = 12) -> int:
    """One forward and backward without recomputation: backward takes twice as long as forward."""
    return 3 * (blocks * FORWARD_NS + roofline_ns(2 * LOGITS * WIDTH, 8 * LOGITS) + roofline_ns(0, 9 * A))


def uneven_chain(units: int, *, options: int) -> tuple[Unit, ...]:
    """Units of random sizes and times, each with options on a random curve: the hardest case for the solver."""
    draw = random.Random(units)
    mib = 1 << 20

    def unit() -> Unit:
        kept, spent = draw.randrange(50 * mib, 400 * mib), draw.randrange(10**6, 10**7)
        smallest = draw.randrange(8 * mib, 30 * mib)
        shares = [0.0, *sorted(draw.random() for _ in range(options - 1))]
        return Unit(
            options=tuple(
                Option(
                    name=NOTHING if k == 0 else f"drops {share:.3f}",
                    kept_bytes=kept - round((kept - smallest) * share),
                    forward_bytes=kept,
                    backward_bytes=kept + draw.randrange(200 * mib),
                    extra_ns=round(spent * share**2 * draw.uniform(0.8, 1.2)),
                )
                for k, share in enumerate(shares)
            ),
            input_bytes=smallest,
            forward_static_bytes=2048 * mib,
            backward_static_bytes=2048 * mib,
            forward_ns=spent,
            joins_next=True,
        )

    return tuple(unit() for _ in range(units))
