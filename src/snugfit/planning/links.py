"""How fast bytes travel between cards, and between a card and its host: peak rates of the usual links, and their use.

Entry points: ``between`` and ``to_host`` choose a link for a device, ``Link.seconds`` is the time of a transfer. Left
out: latency, topology, and several cards that share one link.
"""

from dataclasses import dataclass

from snugfit import hardware

FRACTION = 0.8
"Share of the peak rate that large transfers reach, assumed."

HOST_BANDWIDTH = 100e9
"Memory bandwidth in bytes/s with which a host updates weights, assumed: about eight channels of DDR4-3200, half used."


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, with its peak rate in one direction."""

    name: str
    bandwidth: float
    "Bytes/s in one direction, of one card."
    source: str

    def seconds(self, num_bytes: float) -> float:
        """Time of a transfer in one direction."""
        return num_bytes / (self.bandwidth * FRACTION)


def _pcie(generation: int, transfers: float) -> Link:
    rate = transfers * 16 * 128 / 130 / 8  # lanes, code of 130 bits for 128, bits of a byte
    return Link(f"PCIe {generation}.0 x16", rate, f"PCI-SIG: {transfers / 1e9:.0f} GT/s a lane, 16 lanes, 128b/130b")


LINKS = {
    "nvlink-4": Link("NVLink 4", 450e9, "NVIDIA H100 SXM data sheet: 900 GB/s in both directions together"),
    "nvlink-3": Link("NVLink 3", 300e9, "NVIDIA A100 SXM data sheet: 600 GB/s in both directions together"),
    "pcie-5": _pcie(5, 32e9),
    "pcie-4": _pcie(4, 16e9),
    "pcie-3": _pcie(3, 8e9),
    "ethernet-100g": Link("100 Gbit/s Ethernet", 12.5e9, "IEEE 802.3ba: 100 Gbit/s"),
    "ethernet-10g": Link("10 Gbit/s Ethernet", 1.25e9, "IEEE 802.3ae: 10 Gbit/s"),
}
"Links by short name."


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
