"""What a page is about: a plan with the details that lie beside it, and the run if there was one.

Entry point: ``find``. Tracing a plan again, where its details are not kept, is ``details``'s.
"""

from dataclasses import dataclass
from pathlib import Path

from snugfit import runs
from snugfit.errors import PlanError
from snugfit.page import details, run_folder
from snugfit.page.details import Details
from snugfit.page.run_folder import Run
from snugfit.plans import Plan


@dataclass(frozen=True, slots=True)
class Subject:
    """A plan file or a run folder."""

    file: Path
    "Of the plan."
    plan: Plan
    run: Run | None
    "None for a plan file."

    def details(self) -> Details:
        """What was found out when the plan was made.

        Raises:
            PlanError: It was not kept, or what lies there is something else.
        """
        file = details.beside(self.file)
        if not file.exists():
            raise PlanError(
                "of this plan nothing is known but the plan itself",
                got=f"no file {str(file)!r}",
                expected="what snugfit plan -o writes beside a plan, and train into a folder where it planned itself",
                hint=f"name the job, to trace it again: snugfit report {self.file} --target TARGET --device DEVICE",
            )
        return details.load(file, self.plan)


def find(source: Path) -> Subject:
    """Read a plan file, or a run folder.

    Raises:
        PlanError: Neither, or one whose files are not what snugfit writes.
    """
    is_run = source.is_dir()
    file = source / runs.PLAN if is_run else source
    return Subject(file, Plan.load(file), run_folder.read(source) if is_run else None)
