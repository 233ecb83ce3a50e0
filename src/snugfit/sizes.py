"""Sizes in bytes: text to whole bytes and back.

Entry points: ``parse`` and ``text``. Inside the package every size is an ``int`` of bytes;
binary (GiB) and decimal (GB) units are told apart and a bare "24G" is refused.
"""

import re

from snugfit.errors import PlanError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_LARGEST = 2**63 - 1
"Bytes that fit torch's numbers; more is a slip of the keyboard."
_MOST_DIGITS = 40


def parse(size: str | int) -> int:
    """Read a size and return whole bytes.

    Binary units (``KiB MiB GiB TiB``) are powers of 1024, decimal ones (``kB MB GB TB``) powers of 1000;
    upper and lower case are the same. A plain number is bytes. A fraction of a byte is cut off.

    Args:
        size: Text such as ``"24GiB"``, ``"24 GB"``, ``"512MiB"``, ``"1024"``, or an ``int`` of bytes.

    Raises:
        PlanError: Not a size, an unknown or ambiguous unit (``"24G"``), zero, negative or beyond any machine.

    Example:
        >>> parse("24GiB"), parse("24 GB"), parse(512)
        (25769803776, 24000000000, 512)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None:
            raise PlanError(
                "cannot read a size",
                got=repr(size),
                expected='a number and a unit, such as "24GiB", "24 GB" or "512MiB"; a plain number is bytes',
                hint='write for example "24GiB"',
            )
        number, unit = match.groups()
        if len(number) > _MOST_DIGITS:
            raise _too_large(f"{number[:_MOST_DIGITS]!r} ... ({len(number)} characters)")
        if unit.lower() not in _UNITS:
            binary, decimal = (f"{unit[0].upper()}iB", f"{unit[0].upper()}B")
            suggestion = f"{number}{binary} (powers of 1024) or {number}{decimal} (powers of 1000)"
            raise PlanError(
                f"unknown unit {unit!r} in a size",
                got=repr(size),
                expected="one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB",
                hint=f"write {suggestion}" if unit[0].lower() in "kmgt" else 'write for example "24GiB"',
            )
        factor = _UNITS[unit.lower()]
        num_bytes = int(number) * factor if number.isdigit() else int(float(number) * factor)
    if abs(num_bytes) > _LARGEST:
        raise _too_large(repr(size) if isinstance(size, str) else f"a whole number of {num_bytes.bit_length()} bits")
    if num_bytes <= 0:
        raise PlanError("a size must be positive", got=repr(size), expected="more than 0 bytes", hint='write "24GiB"')
    return num_bytes


def _too_large(got: str) -> PlanError:
    return PlanError(
        "a size is beyond any machine", got=got, expected=f"at most {_LARGEST} bytes", hint='write for example "24GiB"'
    )


def text(num_bytes: int) -> str:
    """Write a size for people, in the binary unit that leaves at least one digit before the point.

    Example:
        >>> text(25769803776), text(512), text(-3 * 2**20)
        ('24.00 GiB', '512 B', '-3.00 MiB')
    """
    magnitude = abs(num_bytes)
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def gib(num_bytes: int) -> str:
    """Write a size in GiB with two decimals, for columns that share one unit."""
    return f"{num_bytes / GIB:.2f}"
