"""Caches of keys and values of transformers' models, turned off while their blocks are recomputed.

Entry point: ``without_cache``. A cache would hold the keys and values of all blocks, which recomputing is to free.
Caches that a caller hands in himself are left on: see ``containing``. Models may share a configuration: it gets its
cache back when no one of them is recomputed any more, or there.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from snugfit.errors import warn
from snugfit.training.holders import Holders


class Cache:
    """The cache of models of transformers, turned off until ``uninstall``, or until none of them is there."""

    def __init__(self, config: Any) -> None:
        self.config, self.holders = config, Holders()
        self.is_off = True
        config.use_cache = False

    def uninstall(self) -> None:
        """Turn the cache on again."""
        if self.is_off:
            self.is_off, self.config.use_cache = False, True

    def __del__(self) -> None:
        self.uninstall()


_caches: WeakKeyDictionary[Any, Cache] = WeakKeyDictionary()
"What was turned off, by the module that has the configuration."


def without_cache(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Cache]:
    """Turn off the caches of a model whose blocks are recomputed, and warn of it once."""
    found, names = turned_off(model, blocks)
    if names:
        warn(
            f"config.use_cache of {', '.join(names)} is False while blocks are recomputed: a cache would hold keys and "
            "values of all blocks; it is True again after close() or remove(), set it to False yourself to have no "
            "warning",
        )
    return found


def turned_off(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[Cache], list[str]]:
    """The same without a warning; also the classes of the models that had a cache."""
    recomputed = {id(block) for block in blocks}
    found: dict[int, Cache] = {}
    names = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        is_theirs = any(kind.__module__.partition(".")[0] == "transformers" for kind in type(module).__mro__)
        if not is_theirs or not any(id(inner) in recomputed for inner in module.modules()):
            continue
        present = next((one for one in _caches.values() if one.is_off and one.config is config), None)
        if present is not None and config.use_cache is False:
            found[id(config)] = present
        elif getattr(config, "use_cache", False) is True:
            found[id(config)] = Cache(config)
            if getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False):
                names.append(type(module).__name__)  # others, such as BERT, have the setting and no cache
        if id(config) in found:
            _caches[module] = found[id(config)]
    return list(found.values()), names
