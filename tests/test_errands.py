import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from snugfit.planning import errands


@pytest.fixture
def copied(monkeypatch):
    """Work is done in a copy, whatever threads other tests have left in this process."""
    if sys.platform != "linux":
        pytest.skip("processes are copied on Linux only")
    monkeypatch.setattr(errands, "_is_possible", lambda: True)


def test_what_an_errand_brings_is_what_the_call_gives_here():
    assert errands.errand(lambda: [1, "two"]).result() == [1, "two"]


def test_an_errand_runs_in_another_process_and_changes_nothing_here(copied):
    changed = []
    errand = errands.errand(lambda: (changed.append(1), os.getpid())[1])
    assert errand.result() != os.getpid()
    assert changed == []


def test_work_whose_copy_dies_is_done_here(copied):
    here = os.getpid()

    def work():
        if os.getpid() != here:
            os._exit(9)
        return "done here"

    assert errands.errand(work).result() == "done here"


def test_an_error_of_the_work_is_raised_where_its_result_is_asked_for():
    def work():
        raise ValueError("no such plan")

    errand = errands.errand(work)
    with pytest.raises(ValueError, match="no such plan"):
        errand.result()


def test_a_process_with_threads_is_not_copied():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert errands.errand(os.getpid).result() == os.getpid()
    finally:
        done.set()
        thread.join()


def test_what_was_given_up_is_given_up_once():
    errand = errands.errand(lambda: 1)
    errand.give_up()
    errand.give_up()


def test_who_stops_waiting_ends_the_copy_and_nobody_elses_file_is_closed(copied, monkeypatch):
    def interrupted(pipe):
        os.close(pipe)
        raise KeyboardInterrupt

    errand = errands.errand(lambda: time.sleep(60))
    child = errand._child
    monkeypatch.setattr(errands, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        errand.result()
    with open(os.devnull) as other:  # takes the number of the pipe's end
        errand.give_up()
        os.fstat(other.fileno())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_copy_in_which_autograd_is_dead_leaves_the_work_to_be_done_here(copied, monkeypatch):
    def dead():
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr(errands, "_check_autograd", dead)
    assert errands.errand(os.getpid).result() == os.getpid()


def test_work_that_would_end_copies_is_done_in_one_and_not_in_another_copy_of_that(copied, monkeypatch):
    monkeypatch.setattr(errands, "_ends_with_backward", lambda: not errands._is_copy[0])
    here, (there, inner) = os.getpid(), errands.apart(lambda: (os.getpid(), errands.apart(os.getpid)))
    assert here != there == inner


def test_work_is_done_here_where_a_backward_ends_no_copies(copied, monkeypatch):
    monkeypatch.setattr(errands, "_ends_with_backward", lambda: False)
    assert errands.apart(os.getpid) == os.getpid()


@pytest.fixture
def collections(monkeypatch):
    """What the cycle collector was asked for since, by process."""
    asked = []
    monkeypatch.setattr(errands, "gc", SimpleNamespace(collect=lambda: asked.append(os.getpid())))
    monkeypatch.setattr(errands, "_has_traced", [False])
    monkeypatch.setattr(errands, "_ends_with_backward", lambda: False)
    return asked


def test_what_a_trace_leaves_is_collected_before_the_next_one(collections):
    errands.apart(lambda: None)
    assert collections == []
    errands.apart(lambda: None)
    assert collections == [os.getpid()]


def test_what_a_trace_leaves_is_collected_before_a_copy_that_has_nothing_to_collect(copied, collections):
    errands.apart(lambda: None)
    asked_there = errands.errand(lambda: (errands.apart(lambda: None), list(collections))[1]).result()
    assert asked_there == collections == [os.getpid()]
    assert errands.errand(lambda: None).result() is None
    assert collections == [os.getpid()]  # what the copy has traced is not here


def test_a_copy_collects_what_it_left_itself(copied, collections):
    def traced_twice():
        errands.apart(lambda: None)
        errands.apart(lambda: None)
        return len(collections)

    assert errands.errand(traced_twice).result() == 1
    assert collections == []


def test_what_a_trace_leaves_that_failed_is_collected_as_well(collections):
    with pytest.raises(ZeroDivisionError):
        errands.apart(lambda: 1 / 0)
    errands.apart(lambda: None)
    assert collections == [os.getpid()]


def test_a_copy_of_a_build_for_cuda_is_not_copied_again(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert errands._ends_with_backward()
    monkeypatch.setattr(errands, "_is_copy", [True])
    assert not errands._ends_with_backward()
    assert not errands._is_possible()
