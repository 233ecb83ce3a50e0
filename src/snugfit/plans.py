"""How a job is run: the ``Plan``, its validation and its JSON form.

Entry points: ``Plan`` and ``Segment``. A plan holds built-in values only, so it prints, compares, hashes and
goes to JSON as it is. Choosing one is ``planning``'s; carrying one out is ``training``'s.
"""

import difflib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from snugfit.errors import PlanError, warn

VERSION = 1
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true")
SEGMENT_POLICIES = ("full", "offload", "keep-matmul", "keep-attention", "keep-last", "keep-attention-last")
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "norm_policy": ("micro", "window", "frozen"),
    "optimizer_impl": ("as-given", "for-loop", "foreach", "fused"),
    "gradient_dtype": ("float32", "parameter"),
    "bf16_update": ("master-weights", "stochastic-rounding", "nearest"),
    "sync": ("window", "micro"),
    "shard": ("none", "ddp", "fsdp"),
}
_TYPES: tuple[tuple[str, type | tuple[type, ...], str, str], ...] = (
    ("recompute", (tuple, list), "a tuple of snugfit.Segment", "write recompute=snugfit.checkpointing.blocks(model)"),
    ("uneven", bool, "True or False", "leave it out for its default"),
    ("fingerprint", (str, type(None)), "a string or None", "leave it out for its default"),
)
_COUNTS = ("batch_size", "micro_batch_size", "world_size", "loss_chunks")
_LARGEST_COUNT = 2**63 - 1
"torch's numbers end here."


@dataclass(frozen=True, slots=True)
class Segment:
    """Modules that are recomputed as one unit during backward.

    Args:
        modules: Fully qualified names of modules that run one after the other; one name may be a plain string.
        policy: ``"full"`` keeps the inputs only; ``"offload"`` recomputes nothing and moves saved tensors to the host;
            ``"keep-matmul"`` (matrix products, convolutions and attention) and ``"keep-attention"`` also keep the
            results of those operations, ``"keep-last"`` that of each module's last matrix product,
            ``"keep-attention-last"`` both, ``"keep:mm,addmm"`` those of torch's operators with these names.

    Raises:
        PlanError: No module, or an unknown policy.
    """

    modules: tuple[str, ...]
    policy: str = "full"

    def __post_init__(self) -> None:
        given: Any = self.modules
        names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise PlanError(
                "a segment names no module",
                got=f"modules={self.modules!r}",
                expected="one or more fully qualified module names",
                hint='write Segment(("encoder.layer.0",))',
            )
        object.__setattr__(self, "modules", names)
        if not (isinstance(self.policy, str) and self.policy.startswith("keep:")):
            _check_choice("policy", self.policy, SEGMENT_POLICIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides how one update is carried out.

    The batch size is global: samples per update over all ranks. A micro-batch larger than a rank's share is
    clamped to that share, with a warning.

    Raises:
        PlanError: A value outside of its range, or a batch size that the ranks do not share evenly.

    Example:
        >>> plan = Plan(batch_size=32, micro_batch_size=5, precision="bf16-mixed")
        >>> plan.accumulation_steps
        7
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    batch_size: int
    "Samples per update over all ranks."
    micro_batch_size: int
    "Samples of one forward and backward on one rank; the last micro-batch of a window may be shorter."
    world_size: int = 1
    "Number of ranks that share a batch."
    precision: str = "32-true"
    'One of ``"32-true" "16-mixed" "bf16-mixed" "bf16-true"``.'
    recompute: tuple[Segment, ...] = ()
    "What is recomputed during backward (activation checkpointing)."
    norm_policy: str = "micro"
    'BatchNorm\'s running statistics: ``"micro" "window" "frozen"``.'
    optimizer_impl: str = "as-given"
    'Implementation of the optimizer: ``"as-given" "for-loop" "foreach" "fused"``.'
    loss_chunks: int = 1
    "Number of chunks of a loss that calls ``chunked_cross_entropy``."
    gradient_dtype: str = "float32"
    'Type of the gradients of bf16-true weights: ``"float32"`` or ``"parameter"``.'
    bf16_update: str = "master-weights"
    """How bf16-true weights are updated: on fp32 ``"master-weights"``, or without them by ``"stochastic-rounding"``.

    ``"nearest"`` rounds small updates away.
    """
    sync: str = "window"
    'When ranks reduce gradients: once per ``"window"`` or every ``"micro"`` step.'
    shard: str = "none"
    'How ranks share the model: ``"none" "ddp" "fsdp"``.'
    uneven: bool = False
    "Accept a batch size that the ranks do not share evenly."
    fingerprint: str | None = None
    "Identifies the job that the plan was made for; None: any."
    version: int = VERSION
    "Version of this schema."

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        for name, type_, expected, hint in _TYPES:
            if not isinstance(getattr(self, name), type_):
                raise PlanError(
                    f"{name} has a wrong type",
                    got=f"{name}={getattr(self, name)!r}",
                    expected=expected,
                    hint=hint,
                )
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        if self.bf16_update != "master-weights" and self.precision != "bf16-true":
            raise PlanError(
                "bf16_update says how bf16-true weights are updated, and there are none",
                got=f"bf16_update={self.bf16_update!r}, precision={self.precision!r}",
                expected='precision="bf16-true", or bf16_update left out',
                hint="leave bf16_update out",
            )
        if not isinstance(self.version, int) or self.version != VERSION or isinstance(self.version, bool):
            raise PlanError(
                "the plan has another version of the schema",
                got=f"version={self.version!r}",
                expected=f"version={VERSION}",
                hint="make the plan again with this version of snugfit",
            )
        if self.batch_size % self.world_size and not self.uneven:
            raise PlanError(
                "the ranks do not share the batch evenly",
                got=f"batch_size={self.batch_size}, world_size={self.world_size}",
                expected="a batch_size that world_size divides",
                hint=f"use batch_size={_round_up(self.batch_size, self.world_size)}; in Python also "
                'fixed={"uneven": True} of snugfit.plan, or uneven=True of a Plan',
            )
        segments = tuple(self.recompute)
        if not all(isinstance(segment, Segment) for segment in segments):
            raise PlanError(
                "recompute holds something that is not a Segment",
                got=f"recompute={self.recompute!r}",
                expected="a tuple of snugfit.Segment",
                hint="write recompute=(Segment(('encoder.layer.0',)),)",
            )
        _refuse_overlaps(segments)
        object.__setattr__(self, "recompute", segments)
        share = self.samples_per_rank
        if self.micro_batch_size > share:
            given = f"micro_batch_size={self.micro_batch_size}"
            warn(f"{given} exceeds a rank's {share} samples per update; clamped to {share}")
            object.__setattr__(self, "micro_batch_size", share)

    @property
    def samples_per_rank(self) -> int:
        """Largest number of samples per update on one rank."""
        return -(-self.batch_size // self.world_size)

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches whose gradients are summed before one update."""
        return -(-self.samples_per_rank // self.micro_batch_size)

    def to_dict(self) -> dict[str, Any]:
        """The plan as built-in values, ready for JSON."""
        values = asdict(self)
        values["recompute"] = [{"modules": list(s.modules), "policy": s.policy} for s in self.recompute]
        return {"version": values.pop("version"), **values}

    @classmethod
    def from_dict(cls, values: object) -> "Plan":
        """Read what ``to_dict`` made, checking every key and type.

        Raises:
            PlanError: Unknown or missing keys (named), a wrong type, another version.
        """
        known = {field.name for field in fields(cls)}
        values = dict(_mapping(values, "the plan", required={"batch_size", "micro_batch_size", "version"}, known=known))
        if isinstance(values.get("recompute"), list):
            values["recompute"] = tuple(_segment(item) for item in values["recompute"])
        return cls(**values)

    def to_json(self) -> str:
        """The plan as a JSON document."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, document: str) -> "Plan":
        """Read a JSON document.

        Raises:
            PlanError: Not JSON (cut off, for example), a key that is there twice, or see ``from_dict``.
        """
        try:
            values = json.loads(document, object_pairs_hook=_object)
        except PlanError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            shown = f"{len(document)} characters" if isinstance(document, str) else type(document).__name__
            raise PlanError(
                "the plan is not a JSON document",
                got=f"{shown}; {error}",
                expected="what Plan.save wrote",
                hint="the file may be cut off; make the plan again",
            ) from error
        return cls.from_dict(values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file; the file is complete or untouched, never half-written."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan from a file.

        Raises:
            PlanError: The file cannot be read or is not a plan (the message names the file).
        """
        try:
            document = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        except (OSError, TypeError, ValueError) as error:  # no file, no path, no text
            raise PlanError(
                f"cannot read the plan {str(path)!r}",
                got=str(error),
                expected="a text file that Plan.save wrote",
                hint="check the path",
            ) from error
        try:
            return cls.from_json(document)
        except PlanError as error:
            raise PlanError(
                f"{error.what} (in {os.fspath(path)!r})", got=error.got, expected=error.expected, hint=error.hint
            ) from error


def write_atomically(path: Path, document: str) -> None:
    """Write a text file so that a reader sees the old content or the new one, whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(document)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _segment(item: object) -> Segment:
    values = _mapping(item, "a segment of recompute", required={"modules"}, known={"modules", "policy"})
    if not isinstance(values["modules"], list):
        raise PlanError(
            "modules of a segment is not a list",
            got=repr(values["modules"]),
            expected="a list of module names",
            hint='write "modules": ["encoder.layer.0"]',
        )
    return Segment(tuple(values["modules"]), values.get("policy", "full"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that is there twice nobody knows which value was meant."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise PlanError(
            "the plan has a key twice",
            got=", ".join(repr(key) for key, number in Counter(key for key, _ in pairs).items() if number > 1),
            expected="each key once",
            hint="remove one of the two lines",
        )
    return values


def _refuse_overlaps(segments: tuple[Segment, ...]) -> None:
    """Refuse names in two segments neither of which holds the other; modules inside of modules only a model knows."""
    inner: dict[str, Segment] = {}
    "The smallest segment so far of each name."
    for segment in sorted(segments, key=lambda one: -len(one.modules)):
        around = {inner.get(name) for name in segment.modules}
        other = next((one for one in around if one is not None), None)
        if other is not None and (len(around) > 1 or len(set(other.modules)) == len(set(segment.modules))):
            raise PlanError(
                "segments overlap",
                got=f"{', '.join(segment.modules[:4])} and {', '.join(other.modules[:4])}",
                expected="segments that are apart, or one wholly inside of the other",
                hint="name each module once, and let runs end where others begin",
            )
        inner.update(dict.fromkeys(segment.modules, segment))


def _mapping(values: object, what: str, *, required: set[str], known: set[str]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise PlanError(
            f"{what} is not a JSON object",
            got=type(values).__name__,
            expected="an object with named keys",
            hint="make the plan again with Plan.save",
        )
    unknown, missing = sorted(set(values) - known), sorted(required - set(values))
    if unknown:
        raise PlanError(
            f"{what} has unknown keys: {', '.join(map(repr, unknown))}",
            got=f"keys {', '.join(sorted(map(str, values)))}",
            expected=f"only {', '.join(sorted(known))}",
            hint=f"remove {unknown[0]!r}, or use the version of snugfit that wrote the file",
        )
    if missing:
        raise PlanError(
            f"{what} lacks keys: {', '.join(map(repr, missing))}",
            got=f"keys {', '.join(sorted(map(str, values)))}",
            expected=f"at least {', '.join(sorted(required))}",
            hint="make the plan again with Plan.save",
        )
    return values


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(
            f"{name} must be a whole number of at least 1",
            got=f"{name}={value!r}",
            expected=">= 1",
            hint=f"pass {name}=1 or more",
        )
    if value > _LARGEST_COUNT:
        raise PlanError(
            f"{name} is beyond any batch",
            got=f"a whole number of {value.bit_length()} bits",
            expected=f"<= {_LARGEST_COUNT}",
            hint=f"pass a smaller {name}",
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise PlanError(
            f"unknown {name}",
            got=f"{name}={value!r}",
            expected=" | ".join(map(repr, choices)),
            hint=f"choose {name}={nearest(str(value), choices)!r}",
        )


def cut(plan: Plan) -> str:
    """How the samples of one rank are cut, the last micro-batch by itself if it is a smaller one.

    Example:
        >>> cut(Plan(batch_size=128, micro_batch_size=43)), cut(Plan(batch_size=128, micro_batch_size=32))
        ('2 x 43 + 42', '4 x 32')
    """
    full, tail = divmod(plan.samples_per_rank, plan.micro_batch_size)
    return f"{full} x {plan.micro_batch_size}" + (f" + {tail}" if tail else "")


def nearest(value: str, choices: tuple[str, ...]) -> str:
    """The choice that was probably meant: ``bf16`` means ``bf16-mixed``, ``fp16`` means ``16-mixed``."""
    begun = [choice for choice in choices if value and choice.startswith(value)]
    named = [choice for choice in choices if choice.partition("-")[0] in value]
    return (begun or named or difflib.get_close_matches(value, choices, 1) or choices)[0]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
