"""Pickles of built-in values only: what ``pickle.load`` would execute is refused before anything is loaded.

Entry point: ``load``. Two walls: a walk over the opcodes that lets through only those that build numbers, text,
lists, tuples and dictionaries, within limits; then the standard unpickler with every global refused.
"""

import io
import pickle
import pickletools
from typing import Any, NoReturn

from snugfit.errors import PlanError

MAX_NESTING = 64
"Lists and dictionaries open inside each other; a snapshot has 8."

_HINT = "take the file that torch.cuda.memory._dump_snapshot(path) wrote, as it wrote it"

# What may stand in the file: the opcodes of pickle protocols 2 to 5 that make built-in values, with the length of
# their argument, or the length of the number in front of it that says how long it is.
_FIXED = {
    name: length
    for length, names in (
        (0, "NONE NEWTRUE NEWFALSE EMPTY_LIST EMPTY_DICT EMPTY_TUPLE LIST DICT TUPLE TUPLE1 TUPLE2 TUPLE3"),
        (0, "APPEND APPENDS SETITEM SETITEMS MEMOIZE STOP"),
        (1, "PROTO BININT1 BINGET BINPUT"),
        (2, "BININT2"),
        (4, "BININT LONG_BINGET LONG_BINPUT"),
        (8, "BINFLOAT FRAME"),
    )
    for name in names.split()
}
_COUNTED = {
    "SHORT_BINUNICODE": 1,
    "BINUNICODE": 4,
    "BINUNICODE8": 8,
    "SHORT_BINBYTES": 1,
    "BINBYTES": 4,
    "LONG1": 1,
    "LONG4": 4,
}
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_CODES = {name: code for code, name in _NAMES.items()}
_SKIP: list[int] = [-1] * 256
_LENGTH_OF: list[int] = [0] * 256
for _name, _number in _FIXED.items():
    _SKIP[_CODES[_name]] = _number
for _name, _number in _COUNTED.items():
    _LENGTH_OF[_CODES[_name]] = _number
_MARK, _STOP, _PROTO = _CODES["MARK"], _CODES["STOP"], _CODES["PROTO"]
_CLOSES = {_CODES[name] for name in ("LIST", "DICT", "TUPLE", "APPENDS", "SETITEMS")}
_PUTS = {_CODES["BINPUT"]: 1, _CODES["LONG_BINPUT"]: 4}


def load(data: bytes, name: str) -> Any:
    """Load a pickle of built-in values.

    Args:
        data: The pickle.
        name: What to call it in messages.

    Raises:
        PlanError: It asks for anything but numbers, text, lists, tuples and dictionaries, is nested too deeply, or
            is cut off or damaged. Nothing of it has been executed.
    """
    _walk(data, name)
    try:
        return _Reader(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, MemoryError) as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from error
    except (AttributeError, OverflowError, RecursionError) as error:  # what else a damaged stack of values leads to
        raise _damaged(name, f"{type(error).__name__}: {error}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"asks for the object {pid!r}")


def _walk(data: bytes, name: str) -> None:
    """Look at every opcode without doing what it says."""
    if data[:1] != bytes([_PROTO]) or data[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        raise _damaged(name, f"begins with {data[:2]!r}, not with a pickle protocol from 2 to 5")
    position, size, nesting, num_opcodes = 0, len(data), 0, 0
    while position < size:
        code = data[position]
        num_opcodes += 1
        length = _SKIP[code]
        if length >= 0:
            if code in _PUTS and int.from_bytes(data[position + 1 : position + 1 + length], "little") > num_opcodes:
                raise _damaged(name, "remembers a value under a number larger than the count of its values")
            if code in _CLOSES:
                nesting -= 1
            elif code == _STOP:
                return
            position += 1 + length
        elif code == _MARK:
            nesting += 1
            if nesting > MAX_NESTING:
                raise PlanError(
                    f"{name} is nested too deeply for an allocator snapshot",
                    got=f"more than {MAX_NESTING} lists or dictionaries inside each other",
                    expected="8, as torch writes them",
                    hint=_HINT,
                )
            position += 1
        elif _LENGTH_OF[code]:
            start = position + 1 + _LENGTH_OF[code]
            position = start + int.from_bytes(data[position + 1 : start], "little")
        else:
            raise _not_plain(data, position, name)
    raise _damaged(name, "ends before its STOP")


def _not_plain(data: bytes, position: int, name: str) -> PlanError:
    opcode = _NAMES.get(data[position])
    if opcode is None:
        return _damaged(name, f"byte {position} is no opcode of a pickle")
    wanted = ""
    if opcode in ("GLOBAL", "INST"):
        text = data[position + 1 : position + 200].replace(b"\n", b".", 1).split(b"\n")[0]
        wanted = f" of {text.decode('ascii', 'replace')}"
    return PlanError(
        f"{name} holds more than built-in values; nothing of it was executed",
        got=f"opcode {opcode}{wanted} at byte {position}",
        expected="numbers, text, lists, tuples and dictionaries, as torch.cuda.memory._dump_snapshot writes them",
        hint="do not load this file with pickle either: it can run code; " + _HINT,
    )


def _damaged(name: str, what: str) -> PlanError:
    expected = "a pickle from its first byte to STOP"
    return PlanError(f"{name} is no whole pickle", got=what, expected=expected, hint=_HINT)
