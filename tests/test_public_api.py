"""The public surface: the names users may rely on, and what importing them costs."""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest

import snugfit

SURFACE = {
    # name: the module that defines it, once it is built
    "SnugfitError": "snugfit.errors",
    "PlanError": "snugfit.errors",
    "BatchError": "snugfit.errors",
    "InfeasibleError": "snugfit.errors",
    "UnsupportedError": "snugfit.errors",
    "NonFiniteError": "snugfit.errors",
    "DeviceMemoryError": "snugfit.errors",
    "Job": "snugfit.jobs",
    "Loss": "snugfit.jobs",
    "LossScale": "snugfit.jobs",
    "Shared": "snugfit.jobs",
    "Plan": "snugfit.plans",
    "Segment": "snugfit.plans",
    "devices": "snugfit.hardware",
    "tokens": "snugfit.training.counting",
    "split": "snugfit.training.splitting",
    "build": "snugfit.training.build",
    "Engine": "snugfit.training.engine",
    "StepResult": "snugfit.training.windows",
    "is_recomputing": "snugfit.training.recomputation",
    "chunked_cross_entropy": "snugfit.training.chunked_loss",
    "check": "snugfit.training.checking.check",
    "CheckReport": "snugfit.training.checking.check",
    "Hazard": "snugfit.training.checking.check",
    "diagnose": "snugfit.training.diagnosing.diagnose",
    "Diagnosis": "snugfit.training.diagnosing.diagnosis",
    "MemoryReport": "snugfit.memory.reports",
    "trace": "snugfit.memory.tracing",
    "estimate": "snugfit.memory.tracing",
    "measure": "snugfit.memory.measuring",
    "opaque": "snugfit.memory.steps.opaque",
    "plan": "snugfit.planning.search",
    "PlanReport": "snugfit.planning.plan_report",
    "train": "snugfit.runs",
}
MODULES = {
    "checkpointing": "snugfit.training.checkpointing",
    "precision": "snugfit.training.precision",
    "norms": "snugfit.training.norms",
    "learning_rate": "snugfit.training.learning_rate",
    "gradient_noise": "snugfit.training.gradient_noise",
}
EXTRAS = {"transformers", "diffusers", "accelerate", "lightning", "rich", "typer", "pydantic", "scipy", "plotly"}


def module_is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def built():
    """Names of the surface whose defining module is there and defines them."""
    names = {
        name for name, home in SURFACE.items() if module_is_there(home) and hasattr(importlib.import_module(home), name)
    }
    return names | {name for name, home in MODULES.items() if module_is_there(home)}


def test_every_exported_name_is_on_the_surface():
    assert set(snugfit.__all__) - SURFACE.keys() - MODULES.keys() - {"__version__"} == set()


def test_every_built_name_of_the_surface_is_exported():
    assert built() - set(snugfit.__all__) == set()


def test_an_export_is_the_object_that_its_module_defines():
    for name in set(snugfit.__all__) & SURFACE.keys():
        assert getattr(snugfit, name) is getattr(importlib.import_module(SURFACE[name]), name), name
    for name in set(snugfit.__all__) & MODULES.keys():
        assert getattr(snugfit, name) is importlib.import_module(MODULES[name]), name


def test_every_other_public_attribute_of_the_package_is_a_submodule():
    others = {name for name in vars(snugfit) if not name.startswith("_")} - set(snugfit.__all__)
    assert {name for name in others if not module_is_there(f"snugfit.{name}")} == set()


def test_no_exported_function_has_the_name_of_a_top_level_module():
    assert {name for name in snugfit.__all__ if module_is_there(f"snugfit.{name}")} == set()


@pytest.mark.parametrize("statement", ["import snugfit", "from snugfit import *"])
def test_importing_the_package_imports_no_extra(statement):
    script = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    imported = set(json.loads(done.stdout))
    assert "snugfit" in imported
    assert imported & EXTRAS == set()
    assert done.stderr == ""
