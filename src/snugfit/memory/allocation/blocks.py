"""What both simulated allocators share: the sizes of pools, the order of free blocks, the error of a full device.

Entry points: ``ADDRESS_BITS`` (a free block is one int, its size above its address) and ``out_of_memory``.
"""

from snugfit import sizes
from snugfit.errors import DeviceMemoryError

MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = sizes.MIB
SMALL_SEGMENT_BYTES = 2 * sizes.MIB
OWN_SEGMENT_BYTES = 10 * sizes.MIB
SEGMENT_STEP_BYTES = 2 * sizes.MIB

# A free block is one int, its size above its address: the order of these ints is that of the allocator's search,
# smallest first, the lowest address among equals.
ADDRESS_BITS = 52
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
NO_BLOCK = -1


def out_of_memory(
    requested_bytes: int, more: str, *, allocated_bytes: int, reserved_bytes: int, limit_bytes: int
) -> DeviceMemoryError:
    """The error of a request that no limit holds.

    Args:
        requested_bytes: What was asked for.
        more: What the driver was asked for in vain, in words.
        allocated_bytes: In live blocks at that moment.
        reserved_bytes: Held from the driver at that moment, after everything free was given back.
        limit_bytes: Most that the driver gives.
    """
    return DeviceMemoryError(
        f"out of memory in the simulated allocator, at a request of {sizes.text(requested_bytes)}",
        got=f"{sizes.text(allocated_bytes)} allocated, {sizes.text(reserved_bytes)} reserved, and {more} more",
        expected=f"reserved <= {sizes.text(limit_bytes)}",
        hint="use a smaller micro-batch, or recompute more",
        requested_bytes=requested_bytes,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        limit_bytes=limit_bytes,
    )
