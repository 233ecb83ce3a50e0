"""What a command line asks for: the options of every command, and what they say about a job, a device and a plan.

Entry points: ``Request`` and its kinds, whose fields are the arguments and options. Acting on them is ``cli``'s.
"""

import difflib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.utils.data import DataLoader

from snugfit import hardware, runs, sizes, tables
from snugfit.errors import PlanError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.allocation import allocator_settings
from snugfit.memory.reports import MemoryReport
from snugfit.page import details
from snugfit.page.details import Details
from snugfit.planning import search, trying_out, ways_out
from snugfit.planning.calibration import calibrated
from snugfit.planning.plan_report import PlanReport
from snugfit.plans import Plan, Segment
from snugfit.rates import Rates
from snugfit.training import checkpointing, splitting

_DEFAULT_BATCH_SIZE = 32
_PROOF_BATCH_SIZE, _PROOF_MICRO_BATCHES = 8, 3
_FORMS = ("none", "blocks", "every", "segments", "match")
"Of what to recompute."


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Options that every command takes."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Output):
    """A job, a device and what is given of the plan; None where it is left open."""

    target: Annotated[str, typer.Argument(help="file.py, file.py:name, a known model, or config.json with --task.")]
    device: Annotated[str, typer.Option("--device", help='A name of "snugfit gpus", auto, cpu, or a size.')] = "auto"
    budget: Annotated[str | None, typer.Option("--budget", help="What the job may use, 10GiB for example.")] = None
    batch: Annotated[
        int | None, typer.Option("--batch", help="Samples per update, all ranks; else the example's, or 32.")
    ] = None
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Samples of one forward.")] = None
    precision: Annotated[str | None, typer.Option("--precision", help="32-true, 16-mixed, bf16-mixed, bf16-true.")] = (
        None
    )
    bf16_update: Annotated[str | None, typer.Option("--bf16-update", help="Of bf16-true: see Plan.bf16_update.")] = None
    norm_policy: Annotated[str | None, typer.Option("--norm-policy", help="micro, window or frozen.")] = None
    recompute: Annotated[
        str | None,
        typer.Option("--recompute", help="none, blocks, every:K, segments:N, match:GLOB; @POLICY."),
    ] = None
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
        """The device and the budget in bytes; without ``--budget`` all of its memory that the allocator may take."""
        card = hardware.resolve(self.device)
        budget_bytes = card.memory_bytes if self.budget is None else size("--budget", self.budget)
        if card.kind == "cuda":
            limit = allocator_settings.from_environment().limit_bytes(card.memory_bytes)
            budget_bytes = budget_bytes if limit is None else min(budget_bytes, limit + card.context_bytes)
        return card, budget_bytes

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
            "bf16_update": self.bf16_update,
            "norm_policy": self.norm_policy,
            "shard": self.shard,
        }
        return {name: value for name, value in values.items() if value is not None}

    def plan(self, job: Job) -> Plan:
        """The plan that the options describe: whole batch, fp32, nothing recomputed where they are silent."""
        size = self.batch_size(job)
        whole = max(1, -(-size // max(1, self.world_size)))
        return Plan(**{"micro_batch_size": whole, **self.given(job)}, batch_size=size, world_size=self.world_size)

    def search(self, job: Job, card: hardware.Device, budget_bytes: int) -> PlanReport:
        """The plan that the search finds around what is given."""
        with tables.progress() as say:
            found = search.plan(
                job,
                card,
                batch_size=self.batch_size(job),
                budget=budget_bytes,
                world_size=self.world_size,
                fixed=self.given(job),
                allow=self.allowed(),
                progress=say,
            )
        return found if self.batch is not None else replace(found, reasons={**found.reasons, **self._batch_of(job)})

    def _batch_of(self, job: Job) -> dict[str, str]:
        """Why the batch size is what it is, where no option says it."""
        is_example = isinstance(job.batch, DataLoader) or not callable(job.batch)
        whose = "that of the job's example batch" if is_example else "a default"
        return {"batch_size": f"{whose}: --batch says another one; the search never changes it"}

    def allowed(self) -> tuple[str, ...]:
        """Changes of the job that may be made."""
        return ()

    def shown(self, job: Job, card: hardware.Device, budget_bytes: int, found: PlanReport) -> Details:
        """What a page shows of a search."""
        described = self.options()
        return details.of(job, found.plan, card, budget_bytes, target=self.target, options=described, found=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest(Request):
    """A request whose answer can be saved."""

    output: Annotated[Path | None, typer.Option("-o", help="Write the plan (plan) or the JSON document here.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest(FileRequest):
    """A request to find a plan."""

    rates_file: Annotated[
        Path | None, typer.Option("--rates", help="What calibrate measured here; times then rest on it.")
    ] = None

    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help=ways_out.OFFER),
    ] = None
    measure: Annotated[
        int | None, typer.Option("--measure", help="Run the best K plans here, and take the fastest.", metavar="K")
    ] = None

    def allowed(self) -> tuple[str, ...]:
        """Changes of the job that may be made."""
        return tuple(self.allow or ())

    def saved_as(self) -> str | None:
        """Where the plan is saved, as it is written in a script."""
        return None if self.output is None else self.output.as_posix()

    def tried_out(self, job: Job, card: hardware.Device, found: PlanReport) -> PlanReport:
        """What was found, after its best plans were run where that is asked for."""
        if self.measure is None:
            return found
        with tables.progress() as say:
            say(f"running the best {self.measure} plans")
            return trying_out.measured(found.job or job, found, card, self.measure)

    def card(self) -> tuple[hardware.Device, int]:
        """The device, with its measured rates where they are given, and the budget in bytes."""
        card, budget_bytes = FileRequest.card(self)
        return card if self.rates_file is None else calibrated(card, Rates.load(self.rates_file)), budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest(Output):
    """A request to measure how fast a device of this machine is."""

    device: Annotated[str, typer.Option("--device", help="auto, cpu, or a CUDA device of this machine.")] = "auto"
    output: Annotated[Path | None, typer.Option("-o", help="Write the rates here, for plan --rates.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest(Output):
    """A request to replay what an allocator recorded."""

    file: Annotated[Path, typer.Argument(help="What torch.cuda.memory._dump_snapshot wrote, or a JSON event list.")]
    device_index: Annotated[
        int | None, typer.Option("--device-index", help="Of a recording of several devices: which one.")
    ] = None
    output: Annotated[Path | None, typer.Option("-o", help="Write the JSON document here.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest(FileRequest):
    """A request about one plan: that of a file, or the one that the options describe."""

    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan.json; else the options tell.")] = None

    def planned(self, job: Job) -> Plan:
        """The plan of the file, or the one that the options describe."""
        return self.plan(job) if self.plan_file is None else self.loaded(self.plan_file)

    def named(self) -> list[str]:
        """The options that say something of a plan."""
        values = {"--batch": self.batch, "--micro-batch": self.micro_batch, "--precision": self.precision}
        values |= {"--recompute": self.recompute, "--shard": self.shard}
        values |= {"--bf16-update": self.bf16_update, "--norm-policy": self.norm_policy}
        return [option for option, value in values.items() if value is not None]

    def loaded(self, file: Path) -> Plan:
        """The plan of a file, which no option may contradict."""
        named = self.named()
        if named:
            raise PlanError(
                "the plan is given twice",
                got=f"--plan and {', '.join(named)}",
                expected="either a plan file or options that describe one",
                hint=f"leave {' '.join(named)} out",
            )
        return Plan.load(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest(PlannedRequest):
    """A request to predict, for a job under one plan or for a step of the user's own."""

    compare: Annotated[bool, typer.Option("--compare", help="Measure here as well, and print the difference.")] = False
    what_if: Annotated[
        bool | None,
        typer.Option("--what-if/--no-what-if", help="What other plans would free; by default if that is quick."),
    ] = None

    def said_of_a_plan(self) -> list[str]:
        """The options that a step of the user's own cannot follow."""
        values = {"--plan": self.plan_file is not None, "--world-size": self.world_size != 1}
        values |= {"--compare": self.compare, "--what-if": bool(self.what_if)}
        return [*self.named(), *(option for option, is_given in values.items() if is_given)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRequest(PlannedRequest):
    """A request to run a few small windows; without a batch size or a split they are small and ragged."""

    def plan(self, job: Job) -> Plan:
        """The plan that the options describe: three micro-batches where they are silent."""
        is_open = self.batch is None and callable(job.batch)
        size = _PROOF_BATCH_SIZE * self.world_size if is_open else self.batch_size(job)
        third = max(1, -(-size // max(1, self.world_size) // _PROOF_MICRO_BATCHES))
        return Plan(**{"micro_batch_size": third, **self.given(job)}, batch_size=size, world_size=self.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseRequest(ProofRequest):
    """A request to find where the first non-finite value comes from."""

    window: Annotated[Path | None, typer.Option("--window", help="A window that train saved.")] = None
    steps: Annotated[
        int | None, typer.Option("--steps", help="Windows to look at; else 20 of the job's data, 3 without data.")
    ] = None

    def planned(self, job: Job) -> Plan:
        """The plan of the file, the one that lies beside a saved window, or the one that the options describe."""
        beside = None if self.window is None else self.window.parent / runs.PLAN
        is_open = self.plan_file is None and not self.given(job) and self.batch is None
        return (
            self.loaded(beside)
            if beside is not None and is_open and beside.exists()
            else ProofRequest.planned(self, job)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest(Output):
    """A request for a page about a plan or a run; what is said of a job is for tracing the plan again."""

    source: Annotated[Path, typer.Argument(help="A plan.json, or the folder of a run.", metavar="PLAN|RUN_DIR")]
    target: Annotated[
        str | None, typer.Option("--target", help="The job, to trace the plan again; else what plan -o wrote is shown.")
    ] = None
    device: Annotated[str | None, typer.Option("--device", help="With --target: what to trace it for.")] = None
    budget: Annotated[str | None, typer.Option("--budget", help="With --target: what the job may use.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="With --target: tokens per sequence.")] = None
    image: Annotated[int | None, typer.Option("--image", help="With --target: pixels per side.")] = None
    task: Annotated[str | None, typer.Option("--task", help="With --target: what a config.json is trained for.")] = None
    output: Annotated[Path | None, typer.Option("-o", help="The page; else plan.html, or page.html in the run.")] = None

    def again(self) -> Request | None:
        """What to trace again, if anything.

        Raises:
            PlanError: Something is said of a job that is not named.
        """
        said = {"device": self.device, "budget": self.budget, "seq": self.seq, "image": self.image, "task": self.task}
        given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        if self.target is not None:
            return Request(target=self.target, **given)
        if given:
            raise PlanError(
                "nothing is traced again without the job's name",
                got=" ".join(f"--{name} {value}" for name, value in given.items()),
                expected="these options together with --target",
                hint="add --target TARGET, or leave them out to show what plan -o wrote",
            )
        return None

    def page(self) -> Path:
        """Where the page goes."""
        beside = self.source / "page.html" if self.source.is_dir() else self.source.with_suffix(".html")
        return self.output or beside


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest(PlannedRequest):
    """A request to train."""

    steps: Annotated[int, typer.Option("--steps", help="Number of updates.")]
    memory_cap: Annotated[str | None, typer.Option("--memory-cap", help="Hard limit of the process (Linux).")] = None
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Folder of the run; else runs/NAME.")] = None

    def folder(self) -> Path:
        """The run folder: as given, else named after the target."""
        return self.run_dir or Path("runs") / Path(self.target.rpartition(".py:")[0] or self.target).stem

    def chosen(self, job: Job, card: hardware.Device, budget_bytes: int) -> tuple[Plan, MemoryReport]:
        """The plan to run, from the file or from the search, and what it is predicted to need.

        What the search found out is left in the run folder, or what lies beside the plan file.
        """
        kept = details.beside(self.folder() / runs.PLAN)
        if self.plan_file is None:
            found = self.search(job, card, budget_bytes)
            details.save(self.shown(job, card, budget_bytes, found), kept)
            return found.plan, found.memory
        plan = self.loaded(self.plan_file)
        beside = details.beside(self.plan_file)
        if beside.resolve() != kept.resolve():
            kept.unlink(missing_ok=True)  # of an earlier run
            if beside.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(beside, kept)
        return plan, tracing.estimate(job, plan, card)


def size(option: str, text: str) -> int:
    """The size that an option gives, in bytes.

    Raises:
        PlanError: Not a size, or a small number whose unit was forgotten.
    """
    num_bytes = sizes.parse(text)
    if text.strip().isdigit() and num_bytes < sizes.MIB:
        raise PlanError(
            f"{option} has no unit, and so few bytes hold nothing",
            got=f"{option} {text}",
            expected="a size with its unit; a number alone is bytes",
            hint=f"did you mean {option} {num_bytes}MiB or {option} {num_bytes}GiB?",
        )
    return num_bytes


def _segments(text: str, job: Job) -> tuple[Segment, ...]:
    if text == "none":
        return ()
    form, _, policy = text.partition("@")
    kind, _, value = form.partition(":")
    number = int(value) if value.isdecimal() and int(value) > 0 else None
    model, keep = tracing.skeleton(job), policy or "full"
    if form == "blocks":
        return checkpointing.blocks(model, keep)
    if form == "segments" or (kind == "segments" and number is not None):
        return checkpointing.segments(model, number, keep)
    if kind == "every" and number is not None:
        return checkpointing.every(model, number, keep)
    if kind == "match" and value:
        return checkpointing.match(model, value, keep)
    near = [] if kind in _FORMS else difflib.get_close_matches(kind, _FORMS, 1)
    raise PlanError(
        "cannot read what to recompute",
        got=f"--recompute {text}",
        expected="none | blocks | every:K | segments | segments:N | match:PATTERN, and @POLICY behind it",
        hint=f"did you mean --recompute {near[0]}{text[len(kind) :]}?"
        if near
        else "write for example --recompute every:2, or blocks@keep-matmul",
    )
