"""Finds the job, or the step of the user's own, that a command line or a child process names.

Entry points: ``load_target`` for a job and ``load_job_or_step``. A target is a file (``file.py`` or
``file.py:name``), a known model, or a ``config.json`` with a task. What a file raises is shown as one error that names
the user's own line.
"""

import ast
import difflib
import importlib.util
import inspect
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from snugfit import job_example
from snugfit.errors import PlanError, SnugfitError, warn
from snugfit.integrations import known_models
from snugfit.jobs import Job

DEFAULT_NAME = "job"
STEP_NAME = "make_step"
"A function whose name begins with this makes a step, as ``snugfit.trace`` takes it; all others return a job."


@contextmanager
def prints_on_stderr() -> Iterator[None]:
    """What the user's code prints goes to standard error, so that standard output holds the answer alone."""
    with redirect_stdout(sys.stderr):
        yield


def load_target(
    target: str,
    *,
    task: str | None = None,
    seq: int | None = None,
    image: int | None = None,
) -> Job:
    """Return the job that a target names.

    Args:
        target: ``file.py`` (its function ``job``), ``file.py:name`` (a function or a ``Job``), a name of
            ``known_models.NAMES``, or the path of a ``config.json``.
        task: What a ``config.json`` is trained for, one of ``known_models.TASKS``.
        seq: Tokens per sequence; handed to a job function that takes ``seq``.
        image: Pixels per side; handed to a job function that takes ``image``.

    Raises:
        PlanError: No such target, a file without the function, a function that fails or returns something else.
        UnsupportedError: A library that a known model needs is not installed.
    """
    sizes: dict[str, Any] = {"seq": seq, "image": image}
    path, name = _split(target)
    if path.suffix == ".json":
        return known_models.job_from_config(path, task or "", **sizes)
    if task is not None:
        raise PlanError(
            "only a config.json takes a task",
            got=f"task={task!r}, target={target!r}",
            expected="a target that is a config.json",
            hint="leave --task out",
        )
    if path.suffix == ".py":
        if name.startswith(STEP_NAME):
            raise PlanError(
                "a step can be estimated, and nothing else",
                got=target,
                expected="a function that returns a snugfit.Job, which says how its batch can be cut",
                hint=f"snugfit estimate {target}, or write a function job() that returns a snugfit.Job",
            )
        given = {key: value for key, value in sizes.items() if value is not None}
        return _job_in(_imported(path), path, name, given)
    if target in known_models.NAMES:
        return known_models.known_job(target, **sizes)
    near = tuple(difflib.get_close_matches(target, known_models.NAMES, n=3, cutoff=0.4))
    raise PlanError(
        f"unknown target {target!r}",
        got=repr(target),
        expected=f"file.py, file.py:name, config.json, or one of {', '.join(known_models.NAMES)}",
        hint=f"did you mean {' or '.join(near)}?" if near else "write a file with a function job() that returns a Job",
        suggestions=near,
    )


def load_job_or_step(
    target: str, *, task: str | None = None, seq: int | None = None, image: int | None = None
) -> Job | Callable[[], Callable[[], object]]:
    """Return the job that a target names, or the function that makes a step, which is not called.

    A step is made by ``file.py:make_step`` (and every other name that begins so), or by ``file.py`` if it has a
    function ``make_step`` and nothing named ``job``.

    Args:
        target: See ``load_target``.
        task: See ``load_target``.
        seq: Tokens per sequence; handed to a function that takes ``seq``.
        image: Pixels per side; handed to a function that takes ``image``.

    Raises:
        PlanError: See ``load_target``.
        UnsupportedError: See ``load_target``.
    """
    path, name = _split(target)
    if path.suffix != ".py" or task is not None:
        return load_target(target, task=task, seq=seq, image=image)
    sizes = {key: value for key, value in {"seq": seq, "image": image}.items() if value is not None}
    module = _imported(path)
    if target.endswith(".py") and not hasattr(module, DEFAULT_NAME) and hasattr(module, STEP_NAME):
        name = STEP_NAME
    if not name.startswith(STEP_NAME):
        return _job_in(module, path, name, sizes)
    found = _found(module, path, name, f"def {name}() that returns the step")
    if not callable(found):
        raise PlanError(
            f"{name} of {str(path)!r} is not a function",
            got=type(found).__name__,
            expected=f"def {name}() that builds model, optimizer and batch, and returns the step",
            hint="make it a function",
        )
    _refuse_unknown_sizes(found, path, name, sizes)
    _refuse_without_result(found, path, name, "the step")

    def make_step() -> Callable[[], object]:
        with _command_line_of(path):
            step: Callable[[], object] = found(**sizes)
            return step

    return make_step


def users_line(error: BaseException, path: Path | None = None) -> str | None:
    """Where an error left the user's code, as ``file.py:12 in job``; None when no such line is known.

    Args:
        error: The error with its traceback.
        path: The user's file; None takes the last line outside of this package and of installed ones.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if (Path(frame.filename) == path if path is not None else not _is_installed(frame.filename))
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else None


def _is_installed(filename: str) -> bool:
    folders = (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
    return filename.startswith("<") or any(folder in Path(filename).parents for folder in folders)


def _split(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    return Path(target), DEFAULT_NAME


def _job_in(module: ModuleType, path: Path, name: str, sizes: dict[str, Any]) -> Job:
    found = _found(module, path, name, f"def {name}() -> snugfit.Job; for estimate also def {STEP_NAME}()")
    if isinstance(found, Job):
        _refuse_sizes(path, name, sizes)
        return found
    if not callable(found):
        raise PlanError(
            f"{name} of {str(path)!r} is neither a job nor a function",
            got=type(found).__name__,
            expected=f"def {name}() -> snugfit.Job",
            hint="make it a function that returns the job",
        )
    _refuse_unknown_sizes(found, path, name, sizes)
    _refuse_without_result(found, path, name, "a snugfit.Job")
    job = _guarded(lambda: found(**sizes), f"{name}() of {str(path)!r} raised", path)
    if not isinstance(job, Job):
        hint = "end the function with `return snugfit.Job(...)`"
        raise PlanError(
            f"{name}() of {str(path)!r} did not return a job",
            got=type(job).__name__,
            expected="snugfit.Job",
            hint=f"{hint}, or name it {STEP_NAME}... if it makes a step: only functions whose names begin so do",
        )
    return job


def _found(module: ModuleType, path: Path, name: str, expected: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, functions, n=1, cutoff=0.4)
        raise PlanError(
            f"{str(path)!r} has no function {name}()",
            got=f"functions {', '.join(functions) or 'none'}",
            expected=expected,
            hint=f"pass {path}:{near[0]}" if near else _how_to_add_one(module, path, name),
        )
    return found


def _how_to_add_one(module: ModuleType, path: Path, name: str) -> str:
    """What to do where a file has no such function: one to copy, as far as the file tells what belongs into it."""
    if name != DEFAULT_NAME:
        return f"add the function, or pass {path}:NAME"
    code = job_example.example(module, path.read_text(encoding="utf-8"))
    shown = textwrap.indent(code, "      ")
    return f"add a function like this one (README: A job of your own), or pass {path}:NAME\n{shown}"


def _refuse_unknown_sizes(function: Callable[..., Any], path: Path, name: str, sizes: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        _refuse_sizes(path, name, {key: value for key, value in sizes.items() if key not in parameters})


def _refuse_without_result(function: Callable[..., Any], path: Path, name: str, result: str) -> None:
    """Refuse a function that can only return nothing before it is called: a ``main`` would train all its steps."""
    if inspect.isfunction(function) and inspect.unwrap(function) is function and not _returns(function):
        raise PlanError(
            f"{name}() of {str(path)!r} returns nothing, so it was not called",
            got=f"a function without `return VALUE` ({path.name}:{function.__code__.co_firstlineno})",
            expected=f"a function that returns {result}",
            hint=f"end it with a return of {result}, or pass {path}:NAME of one that does; it is no loop that trains",
        )


def _returns(function: FunctionType) -> bool:
    """Whether a function may return anything but None, or ends in an error of its own, as far as its source tells."""
    if inspect.isgeneratorfunction(function):
        return True
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return True
    if not isinstance(definition, ast.FunctionDef) or isinstance(definition.body[-1], ast.Raise):
        return True
    return any(_returns_inside(node) for node in definition.body)


def _returns_inside(node: ast.AST) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    if isinstance(node, ast.Return):
        return node.value is not None
    return any(_returns_inside(child) for child in ast.iter_child_nodes(node))


@contextmanager
def _command_line_of(path: Path) -> Iterator[None]:
    """``sys.argv`` as ``python file.py`` sets it: the words of snugfit's command line are not those of a script."""
    before = sys.argv
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = before


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.4)
        raise PlanError(
            f"there is no file {str(path)!r}",
            got=f"target={str(path)!r}",
            expected="a Python file with a function job()",
            hint=f"did you mean {path.parent / near[0]}?" if near else "check the path",
        )
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"snugfit_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"no loader for {path}")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    # As `python file.py` does: modules that lie beside the file can be imported, and classes find their module.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[spec.name] = module
    _warn_of_training(path)
    _guarded(lambda: loader.exec_module(module), f"importing {path.name!r} raised", path)
    return module


def _warn_of_training(path: Path) -> None:
    """Say before a file is imported that this trains, if it does: a loop, or a call of one, that has no guard."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # importing it says where
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    trains: set[str] = set()
    while found := {one.name for one in functions if any(_trains(node, trains) for node in one.body)} - trains:
        trains |= found  # and then those that call them
    for node in tree.body:
        is_guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not is_guard and _trains(node, trains):
            warn(
                f"{path.name} trains when it is imported (line {node.lineno}), which is done first here: put that "
                'under `if __name__ == "__main__":`',
            )
            return


def _trains(node: ast.AST, functions: set[str]) -> bool:
    """Whether running a statement calls ``.backward()``, or one of these functions by its bare name."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    if isinstance(node, ast.Call):
        called = node.func
        if getattr(called, "attr", "") == "backward" or (isinstance(called, ast.Name) and called.id in functions):
            return True
    return any(_trains(child, functions) for child in ast.iter_child_nodes(node))


def _guarded(call: Callable[[], Any], what: str, path: Path) -> Any:
    """Run the user's code; an error of it becomes one of ours that names the user's line, with the original chained."""
    try:
        with _command_line_of(path):
            return call()
    except SnugfitError:
        raise
    except (Exception, SystemExit) as error:
        where = users_line(error, path.resolve())
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{Path(error.filename).name}:{error.lineno}"
        raise PlanError(
            f"{what} {type(error).__name__}",
            got=f"{error or 'no message'} ({where or path.name})",
            expected="a file that imports and a function that returns a snugfit.Job",
            hint="run it with python to see the whole traceback, or pass --debug",
        ) from error


def _refuse_sizes(path: Path, name: str, sizes: dict[str, Any]) -> None:
    if sizes:
        first = next(iter(sizes))
        raise PlanError(
            f"{name} of {str(path)!r} takes no {', '.join(sizes)}",
            got=", ".join(f"{key}={value!r}" for key, value in sizes.items()),
            expected="a function with parameters of these names",
            hint=f"write `def {name}({first}=...)`, or leave --{first} out",
        )
