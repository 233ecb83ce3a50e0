"""The rules of the house: who may import whom, file sizes, and where private torch is touched."""

import ast
from pathlib import Path

import pytest

import snugfit

SOURCE = Path(snugfit.__file__).parent
HALL = {"errors", "sizes", "plans", "jobs", "hardware", "rates"}
ROOMS = {
    "training": {"training"},
    "memory": {"training", "memory"},
    "planning": {"training", "memory", "planning"},
    "page": {"training", "memory", "planning", "page", "runs", "tables"},
    "integrations": {"training", "memory", "planning", "integrations"},
}
APART = {"splitting", "counting", "precision", "checkpointing", "norms"}
PRIVATE_TORCH = {
    "training/torch_private.py",
    "memory/torch_private.py",
    "memory/torch_compiler.py",
    "memory/fake_mode.py",
}
MAX_LINES = 400


def violations(root):
    """Sentences, one for each place in the tree of a package named snugfit that breaks a rule."""
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        if len(source.splitlines()) > MAX_LINES:
            found.append(f"{name} has more than {MAX_LINES} lines")
        if {part.removesuffix(".py") for part in name.split("/")} & {"utils", "util"}:
            found.append(f"{name} has no name of its own")
        own = imported_modules(tree, package=("snugfit", *name.split("/")[:-1]), root=root)
        found += [f"{name} imports {module}" for module in sorted(own) if not may_import(name, module)]
        if name not in PRIVATE_TORCH:
            found += [f"{name} uses {private}" for private in sorted(private_torch(tree))]
    return found


def imported_modules(tree, *, package, root):
    """Modules of the package that a file imports anywhere, as paths such as ``memory/reports``."""
    dotted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            dotted |= {f"{base}.{alias.name}" for alias in node.names}
    return {module_of(name, root) for name in dotted if name.split(".")[0] == "snugfit"}


def module_of(dotted, root):
    """The longest leading part of a dotted name that is a file or a folder; ``snugfit`` itself is an empty path."""
    parts = dotted.split(".")[1:]
    while parts and not ((root / "/".join(parts)).with_suffix(".py").exists() or (root / "/".join(parts)).is_dir()):
        parts.pop()
    return "/".join(parts)


def may_import(name, module):
    room, target = name.split("/")[0], module.split("/")[0]
    if "/" not in name and room.removesuffix(".py") not in HALL:
        return True  # on top: __init__, cli and the like
    if target in HALL:
        return True
    if room not in ROOMS or target not in ROOMS[room]:
        return False
    file, other = Path(name).stem, module.split("/")[-1]
    if room == target == "training" and "checking" in module.split("/") and "checking" not in name.split("/"):
        return False  # the oracle looks at training, not the other way round
    return not (room == target == "training" and {file, other} <= APART and file != other)


def private_torch(tree):
    """Dotted private names of torch that a file imports, or reaches through the name ``torch``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found |= {name for name in names if is_private_torch(name)}
    return found


def is_private_torch(dotted):
    root, *parts = dotted.split(".")
    is_operator = parts[:1] == ["ops"]  # the names of operators are data, wherever they begin with an underscore
    return root == "torch" and not is_operator and any(p.startswith("_") and not p.startswith("__") for p in parts)


def test_the_package_keeps_the_rules_of_the_house():
    assert violations(SOURCE) == []


def plant(root, name, source):
    for module in (
        "errors",
        "hardware",
        "cli",
        "training/splitting",
        "training/norms",
        "training/step",
        "training/checking/hazards",
    ):
        path = root / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for module in ("memory/reports", "planning/cost", "integrations/known_models", "__init__"):
        path = root / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(source)
    return violations(root)


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("errors.py", "import snugfit.training.step", "errors.py imports training/step"),
        ("hardware.py", "from snugfit.memory import reports", "hardware.py imports memory/reports"),
        ("hardware.py", "import snugfit", "hardware.py imports "),
        (
            "training/step.py",
            "from snugfit.memory.reports import MemoryReport",
            "training/step.py imports memory/reports",
        ),
        ("training/step.py", "def f():\n    from snugfit import planning", "training/step.py imports planning"),
        ("training/step.py", "from ..planning import cost", "training/step.py imports planning/cost"),
        ("training/step.py", "from snugfit import cli", "training/step.py imports cli"),
        ("training/norms.py", "from snugfit.training import splitting", "training/norms.py imports training/splitting"),
        (
            "training/step.py",
            "from snugfit.training.checking import hazards",
            "training/step.py imports training/checking/hazards",
        ),
        ("training/norms.py", "from .splitting import split", "training/norms.py imports training/splitting"),
        ("memory/reports.py", "import snugfit.planning.cost as cost", "memory/reports.py imports planning/cost"),
        (
            "planning/cost.py",
            "from snugfit.integrations import known_models",
            "planning/cost.py imports integrations/known_models",
        ),
        ("integrations/known_models.py", "from snugfit import cli", "integrations/known_models.py imports cli"),
        ("memory/reports.py", "import torch._dynamo", "memory/reports.py uses torch._dynamo"),
        ("memory/reports.py", "from torch import _C", "memory/reports.py uses torch._C"),
        (
            "memory/reports.py",
            "from torch.utils._pytree import tree_map",
            "memory/reports.py uses torch.utils._pytree.tree_map",
        ),
        ("cli.py", "import torch\ntorch._C._cuda_init", "cli.py uses torch._C"),
        ("utils.py", "", "utils.py has no name of its own"),
        ("training/utils/text.py", "", "training/utils/text.py has no name of its own"),
        ("cli.py", "\n" * (MAX_LINES + 1), f"cli.py has more than {MAX_LINES} lines"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path, name, source, found):
    assert found in plant(tmp_path, name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cli.py", "import snugfit\nfrom snugfit.planning import cost\nfrom snugfit import errors"),
        (
            "memory/reports.py",
            "from snugfit.training.step import Hooks\nfrom snugfit.errors import PlanError\nimport torch",
        ),
        ("planning/cost.py", "from snugfit.memory.reports import MemoryReport\nfrom snugfit import errors, hardware"),
        ("training/step.py", "from snugfit.training import norms, splitting"),
        ("memory/torch_private.py", "from torch._subclasses import FakeTensorMode"),
        ("memory/reports.py", "import torch\nversion = torch.__version__\nop = torch.ops.aten._foobar"),
        ("cli.py", "\n" * MAX_LINES),
    ],
)
def test_what_is_allowed_is_not_caught(tmp_path, name, source):
    assert plant(tmp_path, name, source) == []
