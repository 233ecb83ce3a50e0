"""How fast bytes travel between cards, and between a card and its host: peak rates of the usual links, and their use.

Entry points: ``between`` and ``to_host`` choose a link for a device, ``Link.seconds`` is the time of a transfer, and
``reduction`` what reducing gradients adds to an update. Left out: topology, and several cards that share one link.

NOTE [What reducing gradients costs]
1. A ring all-reduce of n bytes over k cards takes 2 (k - 1) rounds; each card sends n / k bytes in each. That is
   2 (k - 1) / k n bytes at the link's rate, and for each round the latency of a hop, beside that of the call.
2. DDP reduces buckets of 25 MiB, one after the other, each as soon as backward has made its gradients. With m buckets
   that become ready evenly over a backward of b seconds and take r seconds together, the last one is done at
   b / m + r where the link is the slower one, else at b + r / m. Beyond backward that is max(r - b (1 - 1 / m), r / m).
3. Only the backward of the same micro-step hides a reduction, since the next one needs its gradients. So reducing in
   every micro-step takes as many times what is not hidden once. That computing is slowed down meanwhile is left out.
"""

import math
from dataclasses import dataclass

from snugfit import hardware, sizes
from snugfit.plans import Plan

FRACTION = 0.8
"Share of the peak rate that large transfers reach, assumed."

CALL_S = 8.4e-6
"Latency of an all-reduce itself, of NCCL's own cost model (tuning.cc: baseLat, ring, simple protocol)."

BUCKET_BYTES = 25 * sizes.MIB
"Gradients that DDP reduces at once: its default bucket_cap_mb."

HOST_BANDWIDTH = 100e9
"Memory bandwidth in bytes/s with which a host updates weights, assumed: about eight channels of DDR4-3200, half used."


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, with its peak rate in one direction."""

    name: str
    bandwidth: float
    "Bytes/s in one direction, of one card."
    hop_s: float
    "Latency of one round of a ring, of NCCL's own cost model (tuning.cc: hwLat, ring, simple protocol)."
    source: str

    def seconds(self, num_bytes: float) -> float:
        """Time of a transfer in one direction."""
        return num_bytes / (self.bandwidth * FRACTION)


def _pcie(generation: int, transfers: float) -> Link:
    rate = transfers * 16 * 128 / 130 / 8  # lanes, code of 130 bits for 128, bits of a byte
    source = f"PCI-SIG: {transfers / 1e9:.0f} GT/s a lane, 16 lanes, 128b/130b"
    return Link(f"PCIe {generation}.0 x16", rate, 5.7e-6, source)


LINKS = {
    "nvlink-4": Link("NVLink 4", 450e9, 3.4e-6, "NVIDIA H100 SXM data sheet: 900 GB/s in both directions together"),
    "nvlink-3": Link("NVLink 3", 300e9, 3.4e-6, "NVIDIA A100 SXM data sheet: 600 GB/s in both directions together"),
    "pcie-5": _pcie(5, 32e9),
    "pcie-4": _pcie(4, 16e9),
    "pcie-3": _pcie(3, 8e9),
    "ethernet-100g": Link("100 Gbit/s Ethernet", 12.5e9, 14e-6, "IEEE 802.3ba: 100 Gbit/s"),
    "ethernet-10g": Link("10 Gbit/s Ethernet", 1.25e9, 14e-6, "IEEE 802.3ae: 10 Gbit/s"),
}
"Links by short name."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What reducing gradients takes in an update of several cards, in seconds."""

    once_s: float
    "All gradients once, with nothing beside it."
    per_window_s: float
    'What it adds to an update that reduces in the last micro-step (``sync="window"``).'
    per_micro_step_s: float
    'What it adds to an update that reduces in every micro-step (``sync="micro"``).'


def reduction(plan: Plan, gradient_bytes: int, link: Link, *, backward_s: float = 0.0) -> Reduction:
    """The time that DDP's all-reduces add to an update; see the NOTE at the top of this file.

    Args:
        plan: Its ``world_size`` cards share the batch, in as many micro-steps as it says.
        gradient_bytes: Of all gradients of one copy of the model.
        link: Between the cards, such as ``between(device)``.
        backward_s: Of one micro-step, which hides a part; 0 gives the time with nothing hidden.

    Example:
        >>> found = reduction(Plan(batch_size=8, micro_batch_size=1, world_size=2), 10**9, LINKS["ethernet-10g"])
        >>> round(found.per_window_s, 2), round(found.per_micro_step_s, 2)
        (1.0, 4.01)
    """
    cards = plan.world_size
    if cards == 1 or not gradient_bytes:
        return Reduction(once_s=0.0, per_window_s=0.0, per_micro_step_s=0.0)
    rounds, buckets = 2 * (cards - 1), math.ceil(gradient_bytes / BUCKET_BYTES)
    once = link.seconds(rounds / cards * gradient_bytes) + buckets * (CALL_S + rounds * link.hop_s)
    shown = max(once - backward_s * (1 - 1 / buckets), once / buckets)
    return Reduction(once_s=once, per_window_s=shown, per_micro_step_s=plan.accumulation_steps * shown)


def added_seconds(plan: Plan, gradient_bytes: int, device: hardware.Device, *, backward_s: float) -> float:
    """What reducing gradients adds to an update of a plan over the usual link; nothing between processes of one host.

    Args:
        plan: As chosen, with its ``sync``.
        gradient_bytes: Of all gradients of one copy of the model.
        device: Each rank's.
        backward_s: Of one micro-step.
    """
    if plan.world_size == 1 or device.kind == "cpu":
        return 0.0
    found = reduction(plan, gradient_bytes, between(device), backward_s=backward_s)
    return found.per_micro_step_s if plan.sync == "micro" else found.per_window_s


def to_host(device: hardware.Device) -> Link:
    """The link between a card and its host: PCIe of its generation."""
    capability = device.compute_capability or (8, 0)
    if capability >= (9, 0):
        return LINKS["pcie-5"]
    return LINKS["pcie-4"] if capability >= (8, 0) else LINKS["pcie-3"]


def between(device: hardware.Device) -> Link:
    """The link between cards of a machine: NVLink where the card is an SXM module, else PCIe."""
    if "sxm" not in device.name:
        return to_host(device)
    return LINKS["nvlink-4" if (device.compute_capability or (8, 0)) >= (9, 0) else "nvlink-3"]
