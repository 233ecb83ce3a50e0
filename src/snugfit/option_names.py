"""The words of the command line for what Python calls arguments: ``--micro-batch 8`` for ``micro_batch_size=8``.

Entry points: ``spelled`` for an error and ``in_options`` for a sentence. Lines of Python code stay as they are.
"""

import re

from snugfit.errors import SnugfitError

_OPTIONS = {
    "device": "--device",
    "budget": "--budget",
    "batch_size": "--batch",
    "micro_batch_size": "--micro-batch",
    "precision": "--precision",
    "norm_policy": "--norm-policy",
    "bf16_update": "--bf16-update",
    "world_size": "--world-size",
    "shard": "--shard",
    "allow": "--allow",
}
_ARGUMENT = re.compile(
    rf"(?<![^ ])(?<!, )({'|'.join(_OPTIONS)})=(?:\(\"([\w-]+)\",\)|\"([^\"]+)\"|'([^']+)'|(\d+))(?![\w)])"
)
"With a value that is written out; not behind a comma or a bracket, as in a call."


def in_options(sentence: str) -> str:
    """A sentence with options in place of arguments.

    Example:
        >>> in_options('write for example device="24GiB", or use world_size=2')
        'write for example --device 24GiB, or use --world-size 2'
        >>> in_options('torch.zeros(3, device="cuda")')
        'torch.zeros(3, device="cuda")'
    """
    return _ARGUMENT.sub(lambda found: f"{_OPTIONS[found[1]]} {next(filter(None, found.groups()[1:]))}", sentence)


def spelled(error: SnugfitError) -> str:
    """The message of an error whose hint is for the command line."""
    if error.hint is None:
        return str(error)
    return str(error).removesuffix(error.hint) + in_options(error.hint)
