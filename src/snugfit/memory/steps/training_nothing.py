"""Steps of a job that update nothing: without a backward, or without gradients, there is nothing to predict.

Entry point: ``refuse``. A run skips such a window, which is the engine's affair; steps of the user's own are not asked.
"""

from collections.abc import Sequence

from snugfit.errors import BatchError, PlanError


def refuse(reason: str | None, counts: Sequence[float]) -> None:
    """Refuse a traced window that made no update.

    Args:
        reason: Why not, as ``StepResult`` says it.
        counts: Of its micro-batches.

    Raises:
        BatchError: The example batch counts nothing, so that no loss is back-propagated.
        PlanError: The loss reaches no parameter.
    """
    if reason == "empty":
        is_of_batch = not any(counts)
        where = "every micro-batch that is traced" if is_of_batch else "every Loss that the loss function returns"
        raise BatchError(
            "the example batch counts nothing, so no loss of it is back-propagated and nothing can be predicted",
            got=f"count 0 for {where}",
            expected="an example of a batch that trains: with labels that are not ignored, and a count above 0",
            hint="let Job.batch make labels that count, and look at what Job.count says of them"
            if is_of_batch
            else "look at the count of the Loss, or leave it out for the job's",
        )
    if reason == "no gradients":
        raise PlanError(
            "the loss reaches no parameter of the optimizers: nothing would be trained",
            got="a backward that left no gradient",
            expected="a loss that is computed from the model's output, and an optimizer over what it reaches",
            hint="use the model that the loss function is handed, and detach nothing on the way",
        )
