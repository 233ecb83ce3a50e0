"""Pickles of built-in values only: what ``pickle.load`` would execute is refused before anything is loaded.

Entry point: ``load``. Two walls: a walk over the opcodes that lets through only those that build numbers, text,
lists, tuples and dictionaries, few enough and flat enough; then the standard unpickler with every global refused.
"""

import io
import pickle
import pickletools
from typing import Any, NoReturn

from snugfit.errors import PlanError

MAX_NESTING = 64
"Lists, tuples and dictionaries inside each other; a snapshot has 8."
MAX_VALUES = 10_000_000
"Values made; an event of a snapshot has about 6. The largest, small dictionaries, take 224 bytes each."
MAX_OPCODES = 50_000_000
"Opcodes in all; an event with a call stack of 50 frames, which are written once, has about 100."

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
_MARK, _STOP, _PROTO, _MEMOIZE = (_CODES[name] for name in ("MARK", "STOP", "PROTO", "MEMOIZE"))
_BINGET, _LONG_BINGET = _CODES["BINGET"], _CODES["LONG_BINGET"]
_SCALARS = {_CODES[name] for name in "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT".split()}
_PUTS = {_CODES["BINPUT"], _CODES["LONG_BINPUT"]}
_TUPLES = {_CODES["TUPLE1"]: 1, _CODES["TUPLE2"]: 2, _CODES["TUPLE3"]: 3}
_BUILDS = {_CODES[name]: name for name in "LIST DICT TUPLE APPEND APPENDS SETITEM SETITEMS".split()}
_EMPTY = {_CODES["EMPTY_LIST"]: 1, _CODES["EMPTY_DICT"]: 1, _CODES["EMPTY_TUPLE"]: -1}
_FOLLOWED = {_MARK, *_TUPLES, *_BUILDS, *_EMPTY}


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
    try:
        is_whole = _follow(data, name, _Shapes(name))
    except (IndexError, KeyError) as error:
        raise _damaged(name, "takes a value that is not there") from error
    if not is_whole:
        raise _damaged(name, "ends before its STOP")


def _follow(data: bytes, name: str, shapes: "_Shapes") -> bool:
    """Follow the opcodes up to STOP; False if there is none. What is frequent comes first, and without a call."""
    position, size, num_opcodes, num_values = 0, len(data), 0, 0
    most_opcodes, most_values = MAX_OPCODES, MAX_VALUES
    memo, stack, push = shapes.memo, shapes.stack, shapes.stack.append
    while position < size:
        code = data[position]
        position += 1
        num_opcodes += 1
        if num_opcodes > most_opcodes or num_values > most_values:
            raise _too_much(name)
        if code == _BINGET:
            push(memo[data[position]])
            position += 1
        elif code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code in _SCALARS:
            push(0)
            num_values += 1
            position += _SKIP[code]
        elif _LENGTH_OF[code]:
            push(0)
            num_values += 1
            start = position + _LENGTH_OF[code]
            position = start + int.from_bytes(data[position:start], "little")
        elif code in _FOLLOWED:
            num_values += shapes.follow(code)
        elif code == _STOP:
            return True
        elif _SKIP[code] < 0:
            raise _not_plain(data, position - 1, name)
        else:
            number = int.from_bytes(data[position : position + _SKIP[code]], "little")
            position += _SKIP[code]
            if code in _PUTS:
                if number > num_opcodes:
                    raise _damaged(name, "remembers a value under a number larger than the count of its values")
                memo[number] = stack[-1]
            elif code == _LONG_BINGET:
                push(memo[number])
    return False


class _Shapes:
    """What the unpickler's stack would hold: of each value only how deep it is, with a minus if it is a tuple.

    Exact for tuples, which cannot change once they are made; a list that is filled through a second name may be
    deeper than noted. Only tuples matter: hashing one recurses in C without a limit, and takes exponential time where
    it holds another one twice. So they are no keys.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.stack: list[int] = []
        self.memo: dict[int, int] = {}
        self._marks: list[int] = []

    def follow(self, code: int) -> int:
        """Do to the depths what an opcode does to the values; how many values it makes."""
        stack = self.stack
        if code in _EMPTY:
            stack.append(_EMPTY[code])
            return 1
        if code == _MARK:
            self._marks.append(len(stack))
            self._check(len(self._marks))
            return 0
        if code in _TUPLES:
            self._push(self._popped(len(stack) - _TUPLES[code]), sign=-1)
            return 1
        what = _BUILDS[code]
        pair = {"APPEND": 1, "SETITEM": 2}.get(what)
        parts = self._popped(len(stack) - pair if pair else self._marks.pop())
        if what in ("DICT", "SETITEM", "SETITEMS") and any(depth < 0 for depth in parts[::2]):
            raise PlanError(
                f"{self._name} has tuples for keys",
                got="a dictionary with a tuple as a key",
                expected="text or numbers for keys, as torch writes them",
                hint=_HINT,
            )
        if what in ("LIST", "DICT", "TUPLE"):
            self._push(parts, sign=-1 if what == "TUPLE" else 1)
            return 1
        parts.append(stack.pop() - 1)  # what they are put into is no deeper for itself
        if parts[-1] < 0:
            raise _damaged(self._name, "puts values into what is no list or dictionary")
        self._push(parts)
        return 0

    def _popped(self, start: int) -> list[int]:
        if start < 0:
            raise IndexError
        parts = self.stack[start:]
        del self.stack[start:]
        return parts

    def _push(self, parts: list[int], sign: int = 1) -> None:
        depth = 1 + max(map(abs, parts), default=0)
        self._check(depth)
        self.stack.append(sign * depth)

    def _check(self, depth: int) -> None:
        if depth > MAX_NESTING:
            raise PlanError(
                f"{self._name} is nested too deeply for an allocator snapshot",
                got=f"more than {MAX_NESTING} lists, tuples or dictionaries inside each other",
                expected="8, as torch writes them",
                hint=_HINT,
            )


def _too_much(name: str) -> PlanError:
    return PlanError(
        f"{name} holds too much to be read",
        got=f"more than {MAX_VALUES} values or {MAX_OPCODES} opcodes",
        expected=f"at most {MAX_VALUES} values, enough for more than a million events",
        hint="record fewer steps, or without stacks: _record_memory_history(context=None)",
    )


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
