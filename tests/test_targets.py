import sys
import textwrap

import pytest
import torch
from torch import nn

from snugfit import Job, PlanError
from snugfit.targets import load_job_or_step, load_target, users_line

JOB = """
    import torch
    from torch import nn
    import snugfit

    def make(width=2):
        return snugfit.Job(
            lambda: nn.Linear(width, 1),
            lambda model, x: model(x).mean(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            torch.zeros(4, width),
        )
"""


def write(tmp_path, source, name="training.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(JOB) + textwrap.dedent(source))
    return path


def test_a_file_gives_what_its_function_job_returns(tmp_path):
    path = write(tmp_path, "def job():\n    return make()")
    assert isinstance(load_target(str(path)), Job)


def test_a_name_chooses_another_function_or_a_job_itself(tmp_path):
    path = write(tmp_path, "def other():\n    return make(3)\nready = make(5)")
    assert load_target(f"{path}:other").batch.shape == (4, 3)
    assert load_target(f"{path}:ready").batch.shape == (4, 5)


def test_sizes_are_handed_to_a_function_that_takes_them(tmp_path):
    path = write(tmp_path, "def job(seq=2):\n    return make(seq)\ndef fixed():\n    return make()")
    assert load_target(str(path)).batch.shape == (4, 2)
    assert load_target(str(path), seq=7).batch.shape == (4, 7)
    with pytest.raises(PlanError, match="takes no seq"):
        load_target(f"{path}:fixed", seq=7)


def test_a_file_imports_the_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_neighbour_of_the_job.py").write_text("WIDTH = 6")
    path = write(tmp_path, "import a_neighbour_of_the_job\ndef job():\n    return make(a_neighbour_of_the_job.WIDTH)")
    assert load_target(str(path)).batch.shape == (4, 6)


def test_a_known_model_is_found_by_name():
    assert isinstance(load_target("bert-base", seq=8), Job)


def test_an_unknown_target_is_refused_with_the_nearest_names():
    with pytest.raises(PlanError) as caught:
        load_target("bert-lage")
    assert "bert-large" in caught.value.suggestions
    assert "did you mean" in caught.value.hint
    with pytest.raises(PlanError, match="unknown target"):
        load_target("")


def test_a_missing_file_is_refused_with_the_nearest_file(tmp_path):
    write(tmp_path, "", name="training.py")
    with pytest.raises(PlanError, match="there is no file") as caught:
        load_target(str(tmp_path / "trainings.py"))
    assert "training.py" in caught.value.hint


def test_a_file_without_the_function_says_which_it_has(tmp_path):
    with pytest.raises(PlanError, match=r"has no function job\(\)") as caught:
        load_target(str(write(tmp_path, "def jobs():\n    return make()")))
    assert caught.value.got == "functions make, jobs"
    assert caught.value.hint.endswith("training.py:jobs")


@pytest.mark.parametrize(
    ("source", "part", "where"),
    [
        ("def job():\n    return 1 / 0", "job() of", "in job"),
        ("def job():\n    raise SystemExit(3)", "SystemExit", "in job"),
        ("import no_such_module_anywhere", "importing 'training.py' raised ModuleNotFoundError", "in <module>"),
        ("def job(:\n    pass", "raised SyntaxError", "training.py:"),
    ],
)
def test_what_a_file_raises_is_named_with_the_user_s_line(tmp_path, source, part, where):
    with pytest.raises(PlanError) as caught:
        load_target(str(write(tmp_path, source)))
    assert part in caught.value.what
    assert where in caught.value.got
    assert "training.py:" in caught.value.got
    assert caught.value.__cause__ is not None


def test_an_error_of_ours_is_shown_as_it_is(tmp_path):
    path = write(tmp_path, "def job():\n    return snugfit.Job(5, 5, 5, 5)")
    with pytest.raises(PlanError, match="cannot be called"):
        load_target(str(path))


@pytest.mark.parametrize("source", ["def job():\n    return 5", "job = 5"])
def test_what_is_no_job_is_refused(tmp_path, source):
    with pytest.raises(PlanError, match=r"did not return a job|neither a job nor a function"):
        load_target(str(write(tmp_path, source)))


@pytest.mark.parametrize("name", ["job", "make_step", "main"])
def test_a_function_that_returns_nothing_is_refused_before_it_trains(tmp_path, name):
    body = "    def inner():\n        return make()\n    raise AssertionError('it was called')\n    return"
    path = write(tmp_path, f"def {name}():\n{body}")
    with pytest.raises(PlanError, match="returns nothing, so it was not called") as caught:
        load_job_or_step(f"{path}:{name}")
    assert "training.py:" in caught.value.got


@pytest.mark.parametrize(
    "source",
    [
        "job = lambda: make()",
        "def job(deep=True):\n    with torch.no_grad():\n        if deep:\n            return make()",
        "import functools\njob = functools.partial(make, 2)",
        "exec('def job():\\n    return make()')",
    ],
)
def test_every_way_to_return_a_job_is_taken(tmp_path, source):
    assert isinstance(load_target(str(write(tmp_path, source))), Job)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = torch.ones(1, requires_grad=True)\nfor _ in range(2):\n    x.sum().backward()", 2),
        ("def step(x):\n    x.sum().backward()\ndef main():\n    step(torch.ones(1, requires_grad=True))\nmain()", 5),
        ("def main():\n    torch.ones(1).backward()\nif __name__ == '__main__':\n    main()", None),
        ("def train(x):\n    x.backward()\nnn.Linear(1, 1).train()", None),
        ("class Own:\n    def backward(self):\n        return self\n    def run(self):\n        self.backward()", None),
    ],
    ids=["loop", "call", "guarded", "a method of that name", "class"],
)
def test_a_file_that_trains_while_it_is_imported_is_said_to(tmp_path, source, line, recwarn):
    path = write(tmp_path, f"{source}\ndef job():\n    return make()")
    load_target(str(path))
    before = path.read_text().splitlines().index(source.splitlines()[0])
    said = [str(one.message) for one in recwarn if "trains when it is imported" in str(one.message)]
    assert len(said) == (line is not None)
    assert line is None or f"(line {before + line})" in said[0]


def test_a_file_reads_no_other_command_line_than_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["snugfit", "plan", "training.py", "--budget", "5GiB"])
    parsed = "argparse.ArgumentParser().parse_args()"
    path = write(
        tmp_path,
        f"""
        import argparse, sys
        {parsed}
        def job():
            {parsed}
            return make(len(sys.argv))
        def make_step():
            {parsed}
            return lambda: sys.argv[0]
        """,
    )
    assert load_target(str(path)).batch.shape == (4, 1)
    assert callable(load_job_or_step(f"{path}:make_step")())
    assert sys.argv[1] == "plan"


def test_a_file_without_a_job_is_shown_one_that_can_be_copied(tmp_path):
    source = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        pass

    class Net(nn.Module):
        def __init__(self, image=32):
            super().__init__()
            self.block, self.head = Block(), nn.Linear(3, 10)

        def forward(self, x):
            return self.head(x.mean((2, 3)))

    def main(rate=0.5):
        model = Net(image=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        loss = F.cross_entropy(model(None), None)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 1.5)
    """
    path = tmp_path / "training.py"
    path.write_text(textwrap.dedent(source))
    with pytest.raises(PlanError, match=r"has no function job\(\)") as caught:
        load_target(str(path))
    shown = textwrap.dedent(caught.value.hint.partition("\n")[2])
    path.write_text(f"{path.read_text()}\n{shown}\n")
    found = load_target(str(path))
    optimizer = found.optimizer(found.model())
    assert type(found.model()).__name__ == "Net"
    assert (type(optimizer), optimizer.defaults["momentum"]) == (torch.optim.SGD, 0.9)
    assert found.max_grad_norm == 1.5
    assert (found.scheduler(optimizer).step_size, found.scheduler(optimizer).gamma) == (3, 0.5)
    assert found.loss(found.model(), found.batch(2)).dim() == 0


def test_a_file_of_transformers_is_shown_its_own_loss(tmp_path):
    path = tmp_path / "training.py"
    path.write_text("def main():\n    loss = model(input_ids=ids, labels=ids).loss\n")
    with pytest.raises(PlanError) as caught:
        load_target(str(path))
    assert "lambda: YourModel()," in caught.value.hint
    assert "lambda model, batch: model(**batch).loss," in caught.value.hint
    assert "attention_mask" not in caught.value.hint
    assert max(map(len, caught.value.hint.splitlines()[1:])) <= 100


def test_what_only_the_running_file_knows_is_left_to_the_reader(tmp_path):
    source = """
    import torch

    def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
        return None

    def main(groups, total):
        optimizer = torch.optim.AdamW(groups, lr=1e-4)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=total)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    """
    path = tmp_path / "training.py"
    path.write_text(textwrap.dedent(source))
    with pytest.raises(PlanError) as caught:
        load_target(str(path))
    shown = textwrap.dedent(caught.value.hint.partition("\n")[2])
    assert "# the file gives it groups of parameters" in shown
    made = "get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=...)"
    assert f"# scheduler=lambda optimizer: {made}," in shown
    path.write_text(f"{path.read_text()}\n{shown}\n")
    batch = load_target(str(path)).batch(3)
    assert {name: (tuple(value.shape), int(value.sum())) for name, value in batch.items()} == {
        "input_ids": ((3, 128), 0),
        "attention_mask": ((3, 128), 3 * 128),
        "labels": ((3, 128), 0),
    }


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            'get_scheduler("linear", optimizer=o, num_warmup_steps=0)',
            "get_scheduler('linear', optimizer=optimizer, num",
        ),
        ('get_scheduler(name="linear", optimizer=o)', "get_scheduler(name='linear', optimizer=optimizer),"),
        ("torch.optim.lr_scheduler.StepLR(o, 3)", "torch.optim.lr_scheduler.StepLR(optimizer, 3),"),
        (
            "torch.optim.lr_scheduler.StepLR(o, **options)",
            "# scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR",
        ),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau(o)", None),
    ],
)
def test_a_scheduler_keeps_its_arguments_in_their_places(tmp_path, call, shown):
    path = tmp_path / "training.py"
    path.write_text(
        f"import torch\n\ndef get_scheduler(name, optimizer, **more):\n    pass\n\ndef main(o):\n    {call}\n"
    )
    with pytest.raises(PlanError) as caught:
        load_target(str(path))
    lines = [line for line in caught.value.hint.splitlines() if "scheduler=" in line]
    assert len(lines) == (shown is not None)
    assert shown is None or shown in lines[0]


def test_only_a_config_takes_a_task(tmp_path):
    with pytest.raises(PlanError, match=r"only a config\.json"):
        load_target(str(write(tmp_path, "def job():\n    return make()")), task="causal-lm")
    with pytest.raises(PlanError, match=r"cannot read the configuration"):
        load_target(str(tmp_path / "config.json"), task="causal-lm")


def test_the_user_s_line_is_the_last_one_outside_of_installed_packages():
    def fails():
        nn.Linear(2, 2)("not a tensor")

    with pytest.raises(TypeError) as caught:
        fails()
    assert users_line(caught.value) == f"test_targets.py:{fails.__code__.co_firstlineno + 1} in fails"
    assert users_line(ValueError("never raised")) is None
