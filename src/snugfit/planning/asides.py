"""Plans that are traced beside others, in copies of this process where there is a second core.

Entry point: ``Asides``. What each of them found, traced and learnt is taken over when it is asked for: what was learnt
meanwhile makes no difference to it, and what it learns makes none to the others before.
"""

from collections.abc import Callable
from typing import TypeAlias

from snugfit.planning.errands import Errand, errand
from snugfit.planning.joint import JointSearch
from snugfit.planning.learning import Learnt
from snugfit.planning.traced_plans import TracedPlan
from snugfit.planning.traces import Traces
from snugfit.plans import Plan

Aside: TypeAlias = Errand[tuple[Plan, dict[Plan, TracedPlan], Learnt]]
"What was begun: the plan it found, all that it traced, and what that taught."


class Asides:
    """What a search has begun beside its own traces.

    Args:
        joint: What the chains of units say, and what was learnt.
        traced: Every plan that was traced; what the asides trace is added.
    """

    def __init__(self, joint: JointSearch, traced: Traces) -> None:
        self.joint, self.traced = joint, traced
        self._begun: list[Aside] = []
        self._joined: dict[Aside, Plan] = {}

    def begin(self, work: Callable[[], TracedPlan], *, may_wait: bool = False) -> Aside:
        """Begin to trace plans; the one that is returned is what they are traced for.

        Args:
            work: Traces them.
            may_wait: Whether what is done here meanwhile is needed first.
        """
        learnt = self.joint.learnt.copy()

        def run() -> tuple[Plan, dict[Plan, TracedPlan], Learnt]:
            known = set(self.traced)
            with self.joint.knowing(learnt):
                found = work()
            return found.plan, {plan: one for plan, one in self.traced.items() if plan not in known}, learnt

        self._begun.append(errand(run, may_wait=may_wait))
        return self._begun[-1]

    def join(self, begun: Aside) -> TracedPlan:
        """Wait for what was begun, and take over all that it traced and learnt."""
        if begun not in self._joined:
            plan, traced, learnt = begun.result()
            for each, one in traced.items():
                self.traced.setdefault(each, one)
            self.joint.learnt.add(learnt)
            self.traced.forget()
            self._joined[begun] = plan
        return self.traced[self._joined[begun]]

    def give_up(self) -> None:
        """End what nobody waits for any more."""
        for begun in self._begun:
            begun.give_up()
