"""The command line: ``snugfit estimate | plan | train | measure | gpus``, thin over the functions of the package.

Entry point: ``main``. Tables go to standard output, or one JSON document with ``--json``; messages go to standard
error. Exit status: 0 fits or done, 1 does not fit, 2 user error.
"""

import inspect
import json
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from torch.utils.data import DataLoader

from snugfit import capped, hardware, runs, sizes, tables
from snugfit.errors import DeviceMemoryError, InfeasibleError, PlanError, SnugfitError
from snugfit.jobs import Job
from snugfit.memory import measuring, tracing
from snugfit.memory.reports import MemoryReport
from snugfit.planning import search
from snugfit.plans import Plan, Segment, write_atomically
from snugfit.targets import load_target, prints_on_stderr, users_line
from snugfit.training import checkpointing, splitting

DONE, DOES_NOT_FIT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
_DEFAULT_BATCH_SIZE = 32
_LONGEST_GOT = 1000

app = typer.Typer(
    help="Does a PyTorch training job fit, what is the fastest way that does, and running it exactly so.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """Options that every command takes."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request(_Output):
    """A job, a device and what is given of the plan; None where it is left open."""

    target: Annotated[str, typer.Argument(help="file.py, file.py:name, a known model, or config.json with --task.")]
    device: Annotated[str, typer.Option("--device", help='A name of "snugfit gpus", auto, cpu, or a size.')] = "auto"
    budget: Annotated[str | None, typer.Option("--budget", help="What the job may use, 10GiB for example.")] = None
    batch: Annotated[int | None, typer.Option("--batch", help="Samples per update over all ranks.")] = None
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Samples of one forward.")] = None
    precision: Annotated[str | None, typer.Option("--precision", help="32-true, 16-mixed or bf16-mixed.")] = None
    recompute: Annotated[str | None, typer.Option("--recompute", help="none, blocks, every:K, segments:N.")] = None
    world_size: Annotated[int, typer.Option("--world-size", help="Number of ranks.")] = 1
    shard: Annotated[str | None, typer.Option("--shard", help="none, ddp or fsdp.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens per sequence.")] = None
    image: Annotated[int | None, typer.Option("--image", help="Pixels per side.")] = None
    task: Annotated[str | None, typer.Option("--task", help="What a config.json is trained for.")] = None

    def options(self) -> dict[str, Any]:
        """Further arguments of ``load_target``."""
        options = {"seq": self.seq, "image": self.image, "task": self.task}
        return {name: value for name, value in options.items() if value is not None}

    def card(self) -> tuple[hardware.Device, int]:
        """The device and the budget in bytes; without ``--budget`` all of its memory."""
        card = hardware.resolve(self.device)
        return card, card.memory_bytes if self.budget is None else sizes.parse(self.budget)

    def batch_size(self, job: Job) -> int:
        """The batch size: as given, else that of the job's example, else a default."""
        if self.batch is not None:
            return self.batch
        if isinstance(job.batch, DataLoader) and job.batch.batch_size is not None:
            return job.batch.batch_size * self.world_size
        if callable(job.batch) or isinstance(job.batch, DataLoader):
            return _DEFAULT_BATCH_SIZE
        return splitting.num_samples(job.batch) * self.world_size

    def given(self, job: Job) -> dict[str, Any]:
        """The fields of the plan that are given."""
        segments = None if self.recompute is None else _segments(self.recompute, job)
        values = {
            "micro_batch_size": self.micro_batch,
            "precision": self.precision,
            "recompute": segments,
            "shard": self.shard,
        }
        return {name: value for name, value in values.items() if value is not None}

    def plan(self, job: Job) -> Plan:
        """The plan that the options describe: whole batch, fp32, nothing recomputed where they are silent."""
        size = self.batch_size(job)
        whole = max(1, -(-size // max(1, self.world_size)))
        return Plan(**{"micro_batch_size": whole, **self.given(job)}, batch_size=size, world_size=self.world_size)

    def search(self, job: Job, card: hardware.Device, budget_bytes: int) -> search.PlanReport:
        """The plan that the search finds around what is given."""
        return search.plan(
            job,
            card,
            batch_size=self.batch_size(job),
            budget=budget_bytes,
            world_size=self.world_size,
            fixed=self.given(job),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileRequest(_Request):
    """A request whose answer can be saved."""

    output: Annotated[Path | None, typer.Option("-o", help="Write the plan (plan) or the JSON document here.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainRequest(_Request):
    """A request to train."""

    steps: Annotated[int, typer.Option("--steps", help="Number of updates.")]
    plan_file: Annotated[Path | None, typer.Option("--plan", help="plan.json to run; else one is made.")] = None
    memory_cap: Annotated[str | None, typer.Option("--memory-cap", help="Hard limit of the process (Linux).")] = None
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Folder of the run; else runs/NAME.")] = None

    def folder(self) -> Path:
        """The run folder: as given, else named after the target."""
        return self.run_dir or Path("runs") / Path(self.target.rpartition(".py:")[0] or self.target).stem

    def chosen(self, job: Job, card: hardware.Device, budget_bytes: int) -> tuple[Plan, MemoryReport]:
        """The plan to run, from the file or from the search, and what it is predicted to need."""
        if self.plan_file is None:
            found = self.search(job, card, budget_bytes)
            return found.plan, found.memory
        values = {"--batch": self.batch, "--micro-batch": self.micro_batch, "--precision": self.precision}
        values |= {"--recompute": self.recompute, "--shard": self.shard}
        named = [option for option, value in values.items() if value is not None]
        if named:
            raise PlanError(
                "the plan is given twice",
                got=f"--plan and {', '.join(named)}",
                expected="either a plan file or options that describe one",
                hint=f"leave {' '.join(named)} out",
            )
        plan = Plan.load(self.plan_file)
        return plan, tracing.estimate(job, plan, card)


_Kind = TypeVar("_Kind", bound=_Output)


def _command(kind: type[_Kind]) -> Callable[[Callable[[_Kind], int]], Callable[[_Kind], int]]:
    """Make a command of a function of one request: the fields of the request are its arguments and options."""
    hints = get_type_hints(kind, include_extras=True)

    def register(act: Callable[[_Kind], int]) -> Callable[[_Kind], int]:
        def run(**values: Any) -> int:
            request = kind(**values)
            return _answer(lambda: act(request), request)

        parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        app.command(name=act.__name__, help=act.__doc__)(run)
        return act

    return register


@_command(_FileRequest)
def estimate(request: _FileRequest) -> int:
    """Predict what a job needs on a device, without running it."""
    return _memory(request, tracing.estimate)


@_command(_FileRequest)
def measure(request: _FileRequest) -> int:
    """Run a few updates here and measure what they need."""
    return _memory(request, measuring.measure)


@_command(_FileRequest)
def plan(request: _FileRequest) -> int:
    """Find the fastest plan that fits; -o saves it for train."""
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        card, budget_bytes = request.card()
        found = request.search(job, card, budget_bytes)
    if request.output is not None:
        found.plan.save(request.output)
    if request.as_json:
        print(_document(tables.plan_document(found, budget_bytes)))
        return DONE
    out = tables.console()
    tables.ladder(out, found, budget_bytes)
    tables.reasons(out, found)
    out.print(f"\n{tables.verdict(found.memory, budget_bytes)}")
    return DONE


@_command(_TrainRequest)
def train(request: _TrainRequest) -> int:
    """Train a job for some steps, under a plan and a memory cap if these are given."""
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        status = _train(request, job) if request.memory_cap is None else _train_capped(request, job)
    if status != DONE:
        return status
    report = json.loads((request.folder() / runs.REPORT).read_text(encoding="utf-8"))
    if request.as_json:
        print(_document(report))
    else:
        tables.run(tables.console(), report)
    return DONE


@_command(_Output)
def gpus(request: _Output) -> int:
    """List the devices of the catalogue."""
    catalogue = [hardware.resolve(name) for name in hardware.devices()]
    if request.as_json:
        print(_document({"devices": [{**asdict(card), "flops": dict(card.flops)} for card in catalogue]}))
    else:
        tables.devices(tables.console(), catalogue)
    return DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: Words after the program's name; None takes those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(given, prog_name="snugfit", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        show = getattr(error, "format_message", None)  # what typer's parser raises has no public type
        if show is None:
            raise
        command = f"snugfit {given[0]}" if given and not given[0].startswith("-") else "snugfit"
        unreadable = PlanError(
            f"cannot read the command line: {show()}",
            got=shlex.join(["snugfit", *given]),
            expected="the arguments and options of the command",
            hint=f"{command} --help",
        )
        print(unreadable, file=sys.stderr)
        return USER_ERROR
    return status if isinstance(status, int) else DONE


def _memory(request: _FileRequest, predict: Callable[[Job, Plan, hardware.Device], MemoryReport]) -> int:
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        card, budget_bytes = request.card()
        described = request.plan(job)
        report = predict(job, described, card)
    fits = report.fits(budget_bytes)
    document = {
        "plan": described.to_dict(),
        "budget_bytes": budget_bytes,
        "needed_bytes": report.needed_bytes,
        "fits": fits,
        "memory": report.to_dict(),
    }
    if request.output is not None:
        write_atomically(request.output, _document(document) + "\n")
    if request.as_json:
        print(_document(document))
    else:
        tables.memory(tables.console(), described, report, budget_bytes)
    return DONE if fits else DOES_NOT_FIT


def _train(request: _TrainRequest, job: Job) -> int:
    card, budget_bytes = request.card()
    chosen, predicted = request.chosen(job, card, budget_bytes)
    runs.train(job, chosen, steps=request.steps, run_dir=request.folder(), device=card, predicted=predicted.to_dict())
    return DONE


def _train_capped(request: _TrainRequest, job: Job) -> int:
    cap_bytes = sizes.parse(request.memory_cap or "")
    if request.device not in ("auto", "cpu"):
        raise PlanError(
            "a memory cap is for training on the CPU",
            got=f"--memory-cap {request.memory_cap} --device {request.device}",
            expected="--device cpu",
            hint="leave --device out, or use --budget for a card",
        )
    allowed = capped.budget_under_cap(cap_bytes, capped.measure_baseline(request.target, request.options()))
    try:
        chosen, predicted = request.chosen(job, hardware.resolve("cpu"), allowed)
    except InfeasibleError as error:
        capped.check_static(error.smallest, allowed)  # type: ignore[attr-defined]
        raise
    capped.check_static(predicted, allowed)
    plan_file = request.folder() / runs.PLAN
    chosen.save(plan_file)
    status = capped.run_capped(
        request.target,
        plan_file,
        cap_bytes=cap_bytes,
        steps=request.steps,
        run_dir=request.folder(),
        options=request.options(),
        predicted=predicted.to_dict(),
    )
    if status < 0:
        raise DeviceMemoryError(
            f"the run under the memory cap was ended by signal {-status}",
            got=f"cap {sizes.text(cap_bytes)}, plan {tables.plan_line(chosen)}",
            expected="a library that survives a refused allocation",
            hint="use a larger cap, or a plan with smaller micro-batches",
        )
    if status == capped.EXIT_OUT_OF_MEMORY:  # the child has said so
        return DOES_NOT_FIT
    return DONE if status == capped.EXIT_DONE else USER_ERROR


def _segments(text: str, job: Job) -> tuple[Segment, ...]:
    kind, _, number = text.partition(":")
    if text == "none":
        return ()
    if text == "blocks":
        return tuple(checkpointing.blocks(tracing.skeleton(job)))
    if kind in ("every", "segments") and number.isdecimal() and int(number) > 0:
        cut = checkpointing.every if kind == "every" else checkpointing.segments
        return tuple(cut(tracing.skeleton(job), int(number)))
    raise PlanError(
        "cannot read what to recompute",
        got=f"--recompute {text}",
        expected="none | blocks | every:K | segments:N",
        hint="write for example --recompute every:2",
    )


def _answer(act: Callable[[], int], request: _Output) -> int:
    """Run a command; an error becomes one message and an exit status, a warning one line."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: tables.warning(str(message), said)
        try:
            return act()
        except Exception as error:
            if request.debug:
                traceback.print_exc()
            named = error if isinstance(error, SnugfitError) else _named(error)
            print(named, file=sys.stderr)
            if not isinstance(error, (InfeasibleError, DeviceMemoryError)):
                return USER_ERROR
            if request.as_json:
                print(_document(tables.error_document(named)))
            return DOES_NOT_FIT


def _named(error: Exception) -> SnugfitError:
    """An error that is not ours, most often of the user's model or loss, in the form of ours."""
    where = users_line(error)
    message = str(error).strip()
    shown = message if len(message) <= _LONGEST_GOT else f"{message[:_LONGEST_GOT]} ..."
    return SnugfitError(
        f"the job raised {type(error).__name__}" if where else f"unexpected {type(error).__name__}",
        got=f"{shown or 'no message'}{f' ({where})' if where else ''}",
        expected="a job whose model, loss, optimizer and batch run without an error",
        hint="pass --debug to see the whole traceback",
    )


def _document(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)


if __name__ == "__main__":
    sys.exit(main())
