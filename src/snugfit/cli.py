"""The command line: ``snugfit estimate | plan | train | measure | check | diagnose | replay | report |
calibrate | gpus``, thin over the functions of the package.

Entry point: ``main``. Tables go to standard output, or one JSON document with ``--json``; messages go to standard
error. Exit status: 0 fits or done, 1 does not fit or check failed, 2 user error.
"""

import inspect
import json
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console

from snugfit import __version__, capped, estimates, foreign_errors, hardware, outputs, plan_tables, runs, sizes, tables
from snugfit.arguments import (
    CalibrateRequest,
    DiagnoseRequest,
    EstimateRequest,
    FileRequest,
    Output,
    PlannedRequest,
    ProofRequest,
    ReplayRequest,
    ReportRequest,
    SearchRequest,
    TrainRequest,
    size,
)
from snugfit.errors import DeviceMemoryError, InfeasibleError, NonFiniteError, PlanError, SnugfitError
from snugfit.jobs import Job
from snugfit.memory.replay import replaying, snapshots
from snugfit.option_names import spelled
from snugfit.page import details, html, subject
from snugfit.planning import calibration
from snugfit.plans import Plan, write_atomically
from snugfit.targets import load_target, prints_on_stderr
from snugfit.training import build
from snugfit.training.checking import check as checking
from snugfit.training.diagnosing import diagnose as diagnosing

DONE, DOES_NOT_FIT, USER_ERROR, INTERRUPTED, NOBODY_READS = 0, 1, 2, 130, 141
CHECK_FAILED = PARTED = DOES_NOT_FIT

app = typer.Typer(
    help="Does a PyTorch training job fit, what is the fastest way that does, and running it exactly so.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"snugfit {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    del version


_Kind = TypeVar("_Kind", bound=Output)


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


@_command(EstimateRequest)
def estimate(request: EstimateRequest) -> int:
    """Predict what a job, or a step of your own (make_step), needs on a device, without running it."""
    return _memory(request, estimates.estimate(request))


@_command(PlannedRequest)
def measure(request: PlannedRequest) -> int:
    """Run a few updates here and measure what they need."""
    return _memory(request, estimates.measure(request))


@_command(SearchRequest)
def plan(request: SearchRequest) -> int:
    """Find the fastest plan that fits; -o saves it for train."""
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        card, budget_bytes = request.card()
        try:
            found = request.tried_out(job, card, request.search(job, card, budget_bytes))
        except InfeasibleError:
            if request.output is not None:
                kept = "; the plan that is there is an older one" if request.output.exists() else ""
                print(f"no plan was written to {request.output}{kept}", file=sys.stderr)
            raise
        for way in found.changes:
            tables.warning(f"the plan is for a job that was changed: {way.change}", set())
    try:
        if request.output is not None:
            found.plan.save(request.output)
            with prints_on_stderr():
                details.save(request.shown(job, card, budget_bytes, found), details.beside(request.output))
    finally:
        if request.as_json:
            print(_document(plan_tables.document(found, request.saved_as())))
        else:
            plan_tables.show(tables.console(), found, request.saved_as())
    return DONE


@_command(TrainRequest)
def train(request: TrainRequest) -> int:
    """Train a job for some steps, under a plan and a memory cap if these are given."""
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        status = _train(request, job) if request.memory_cap is None else _train_capped(request, job)
    if status != DONE:
        return status
    report = json.loads((request.folder() / runs.REPORT).read_text(encoding="utf-8"))
    _give(request, report, lambda out: tables.run(out, report))
    if report["skipped"] < report["steps"]:
        return DONE
    raise NonFiniteError(
        "no window of the run made an update",
        got=f"{report['skipped']} of {report['steps']} windows skipped, see {request.folder() / runs.METRICS}",
        expected="at least one update",
        hint=f"snugfit diagnose {request.target} says where the first non-finite value comes from",
    )


@_command(ProofRequest)
def check(request: ProofRequest) -> int:
    """Prove on the job that the split is exact and recomputation changes nothing; list what is dangerous."""
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        described = request.planned(job)
        report = checking.check(job, described, request.device)
    document = {"plan": described.to_dict(), **report.to_dict()}
    _give(request, document, lambda out: tables.check(out, described, report))
    return DONE if report.ok else CHECK_FAILED


@_command(DiagnoseRequest)
def diagnose(request: DiagnoseRequest) -> int:
    """Find the module and the operation that made the first value that is not finite."""
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        described = request.planned(job)
        found = diagnosing.diagnose(job, described, request.device, steps=request.steps, window=request.window)
    document = {"plan": described.to_dict(), **found.to_dict()}
    _give(request, document, lambda out: tables.diagnosis(out, described, found))
    return DONE if found.is_finite else CHECK_FAILED


@_command(ReplayRequest)
def replay(request: ReplayRequest) -> int:
    """Run a recording of the CUDA allocator through the simulated one and show where they part."""
    found = replaying.replay(snapshots.read(request.file, request.device_index))
    _give(request, found.to_dict(), lambda out: tables.replay(out, found))
    return DONE if found.matched else PARTED


@_command(ReportRequest)
def report(request: ReportRequest) -> int:
    """Write one HTML page about a plan, or about the folder of a run."""
    about, again = subject.find(request.source), request.again()
    if again is None:
        known = about.details()
    else:
        with prints_on_stderr():
            job = load_target(again.target, **again.options())
            known = details.again(job, about.plan, *again.card(), target=again.target, options=again.options())
    known = replace(known, plan_file=about.file.as_posix())
    page = request.page()
    num_bytes = html.write(page, known, about.run)
    if request.as_json:
        print(_document({"page": str(page), "num_bytes": num_bytes}))
    else:
        tables.console().print(f"{page}, {sizes.text(num_bytes)}")
    return DONE


@_command(CalibrateRequest)
def calibrate(request: CalibrateRequest) -> int:
    """Measure how fast this device is, in under a minute; plan --rates then predicts its own times."""
    found = calibration.calibrate(request.device)
    _give(request, found.to_dict(), lambda out: tables.rates(out, found))
    return DONE


@_command(Output)
def gpus(request: Output) -> int:
    """List the devices of the catalogue."""
    catalogue = [hardware.resolve(name) for name in hardware.devices()]
    if request.as_json:
        print(_document({"devices": [_catalogued(card) for card in catalogue]}))
    else:
        tables.devices(tables.console(), catalogue)
    return DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: Words after the program's name; None takes those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = app(given, prog_name="snugfit", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except OSError as error:  # of help and versions, which are printed outside of any command
        print(foreign_errors.named(error), file=sys.stderr)
        return USER_ERROR
    except Exception as error:
        show = getattr(error, "format_message", None)  # what typer's parser raises has no public type
        if show is None:
            raise
        known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
        command = f"snugfit {given[0]}" if given[0] in known else "snugfit"
        unreadable = PlanError(
            f"cannot read the command line: {show()}",
            got=shlex.join(["snugfit", *given]),
            expected="the arguments and options of the command",
            hint=f"{command} --help",
        )
        print(unreadable, file=sys.stderr)
        return USER_ERROR
    return status if isinstance(status, int) else DONE


def _memory(request: FileRequest, answer: estimates.Answer) -> int:
    _give(request, answer.document(), answer.show)
    return DONE if answer.fits else DOES_NOT_FIT


def _catalogued(card: hardware.Device) -> dict[str, Any]:
    values = {**asdict(card), "flops": dict(card.flops)}
    del values["rates"]  # nobody measured those of the catalogue
    return values


def _give(
    request: FileRequest | ReplayRequest | CalibrateRequest, document: dict[str, Any], show: Callable[[Console], None]
) -> None:
    """Write an answer to the file of ``-o``, and print it as a document or as tables."""
    try:
        if request.output is not None:
            write_atomically(request.output, _document(document) + "\n")
    finally:
        if request.as_json:
            print(_document(document))
        else:
            show(tables.console())


def _train(request: TrainRequest, job: Job) -> int:
    card, budget_bytes = request.card()
    build.present(card)  # refused before a search and its files, not after
    chosen, predicted = request.chosen(job, card, budget_bytes)
    _say_plan(request, chosen, card.name)
    runs.train(job, chosen, steps=request.steps, run_dir=request.folder(), device=card, predicted=predicted.to_dict())
    return DONE


def _say_plan(request: TrainRequest, chosen: Plan, device: str) -> None:
    """Say under what plan a run begins, and where; a plan for another device runs as well, at other times."""
    print(f"plan: {tables.plan_line(chosen)}", file=sys.stderr)
    made_for = None if request.plan_file is None else details.device_of(request.plan_file, chosen)
    elsewhere = "" if made_for in (None, device) else f"; the plan was made for {made_for}"
    print(f"device: {device}{elsewhere}", file=sys.stderr)


def _train_capped(request: TrainRequest, job: Job) -> int:
    cap_bytes = size("--memory-cap", request.memory_cap or "")
    if request.device not in ("auto", "cpu"):
        raise PlanError(
            "a memory cap is for training on the CPU",
            got=f"--memory-cap {request.memory_cap} --device {request.device}",
            expected="--device cpu",
            hint="leave --device out, or use --budget for a card",
        )
    baseline = capped.measure_baseline(request.target, request.options(), cap_bytes=cap_bytes)
    allowed = capped.budget_under_cap(cap_bytes, baseline)
    try:
        chosen, predicted = request.chosen(job, hardware.resolve("cpu"), allowed)
    except InfeasibleError as error:
        capped.check_static(error.smallest, allowed)  # type: ignore[attr-defined]
        raise
    capped.check_static(predicted, allowed)
    _say_plan(request, chosen, "cpu")
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


def _answer(act: Callable[[], int], request: Output) -> int:
    """Run a command; an error becomes one message and an exit status, a warning one line."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: tables.warning(str(message), said)
        try:
            outputs.check_standard_output()
            if (path := getattr(request, "output", None)) is not None:
                outputs.check_file(path)
            status = act()
            sys.stdout.flush()  # here, not when the process ends
            return status
        except (Exception, SystemExit) as error:
            if isinstance(error, OSError):
                outputs.drop_what_cannot_be_written()
            if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
                return NOBODY_READS  # whoever reads has seen enough; rich makes a SystemExit of it
            if request.debug:
                traceback.print_exc()
            named = error if isinstance(error, SnugfitError) else foreign_errors.named(error)
            print(spelled(named), file=sys.stderr)
            if not isinstance(error, (InfeasibleError, DeviceMemoryError, NonFiniteError)):
                return USER_ERROR
            if request.as_json:
                print(_document(tables.error_document(named)))
            return DOES_NOT_FIT


def _document(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)


if __name__ == "__main__":
    sys.exit(main())
