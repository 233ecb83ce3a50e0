"""Files that somebody else may have written: read as data, checked value by value, refused by name.

Entry points: ``text`` and ``checked``. What the values mean together is their reader's.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from snugfit import sizes
from snugfit.errors import PlanError

_LARGEST_BYTES = 64 * sizes.MIB
_LONGEST_GOT = 200

_Kind = TypeVar("_Kind")


def text(file: Path, *, expected: str, hint: str) -> str:
    """The text of a file.

    Raises:
        PlanError: It cannot be read, is no text, or is far larger than what snugfit writes.
    """
    try:
        num_bytes = file.stat().st_size
        if num_bytes > _LARGEST_BYTES:
            raise PlanError(
                f"the file {str(file)!r} is too large",
                got=sizes.text(num_bytes),
                expected=f"{expected}, at most {sizes.text(_LARGEST_BYTES)}",
                hint=hint,
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {str(file)!r}", got=str(error), expected=expected, hint=hint) from error


def checked(kind: TypeAdapter[_Kind], document: str, *, where: str, expected: str, hint: str) -> _Kind:
    """The value that a JSON document holds.

    Args:
        kind: What it must be.
        document: Text from outside.
        where: The file, and its line where there are several documents.
        expected: What the document should be, in words.
        hint: How to have one.

    Raises:
        PlanError: Not JSON (cut off, for example), or a value that is missing or wrong: the first one is named.
    """
    try:
        return kind.validate_json(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            what, got = f"{where} is not a JSON document", f"{len(document)} characters; {first['msg']}"
        else:
            name = ".".join(str(part) for part in first["loc"]) or "the document"
            others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            what, got = f"{where} is not what it should be", f"{name}: {first['msg']}, {_short(first['input'])}{others}"
        raise PlanError(what, got=got, expected=expected, hint=hint) from error


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST_GOT else f"{shown[:_LONGEST_GOT]} ..."
