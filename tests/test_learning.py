import dataclasses

import snugfit
from snugfit.planning.learning import Kind, Learnt, family_of, kind_of

FAMILY = "bf16-mixed last"


def taught(**surplus):
    return Learnt({Kind(FAMILY, int(size[1:]), True): num_bytes for size, num_bytes in surplus.items()})


def test_a_quarter_more_than_is_known_of_the_nearest_size_is_expected_of_another():
    learnt = taught(s8=400, s2=200)
    assert learnt.beyond(Kind(FAMILY, 8, True)) == 400
    assert learnt.beyond(Kind(FAMILY, 9, True)) == 500


def test_of_a_smaller_size_as_much_less_is_expected_as_it_is_smaller():
    learnt = taught(s8=400, s2=200)
    assert learnt.beyond(Kind(FAMILY, 6, True)) == 375
    assert learnt.beyond(Kind(FAMILY, 1, True)) == 125


def test_plans_that_recompute_say_nothing_of_those_that_do_not():
    learnt = taught(s8=500)
    learnt.expected[FAMILY] = 70
    assert learnt.beyond(Kind(FAMILY, 8, False)) == 70
    assert learnt.beyond(Kind("32-true last", 8, True)) == 0


def test_a_plan_that_did_not_fit_never_gets_the_same_room_again():
    learnt, kind = Learnt(), Kind(FAMILY, 4, True)
    learnt.learn(kind, beyond_bytes=10, over_bytes=25, pace=1.0)
    assert learnt.beyond(kind) == 25
    learnt.learn(kind, beyond_bytes=12, over_bytes=5, pace=1.0)
    assert learnt.beyond(kind) == 30
    learnt.learn(kind, beyond_bytes=12, over_bytes=0, pace=1.0)  # it fits now
    assert learnt.beyond(kind) == 12


def test_the_pace_of_a_kind_is_that_of_all_its_sizes():
    learnt = Learnt()
    learnt.learn(Kind(FAMILY, 4, True), beyond_bytes=0, over_bytes=0, pace=1.5)
    learnt.learn(Kind(FAMILY, 2, True), beyond_bytes=0, over_bytes=0, pace=1.2)
    assert learnt.pace_of(Kind(FAMILY, 1, True)) == 1.5 * 1.2
    assert learnt.pace_of(Kind(FAMILY, 1, False)) == 1.0


def test_what_is_learnt_aside_is_added_but_does_not_replace():
    here, aside = taught(s8=500), taught(s8=900, s4=100)
    copy = here.copy()
    here.add(aside)
    assert here.surplus == taught(s8=500, s4=100).surplus
    assert copy.surplus == taught(s8=500).surplus


def test_plans_are_of_a_kind_by_precision_synchronisation_size_and_whether_anything_is_recomputed():
    plan = snugfit.Plan(batch_size=8, micro_batch_size=4, precision="bf16-mixed")
    assert kind_of(plan, ()) == Kind(family_of(plan), 4, False)
    assert kind_of(plan, ("a segment",)).is_recomputed
    assert family_of(plan) != family_of(dataclasses.replace(plan, precision="32-true"))
