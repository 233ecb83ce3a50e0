"""Pieces of HTML that every section is made of: headings, figures, tables, facts.

Entry points: ``section``, ``plot``, ``table``, ``facts``, ``sentences`` and ``legend``. What they take is HTML already,
unless they say otherwise.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from snugfit.page.drawing import Figure, plain


def section(title: str, *parts: str) -> str:
    """A heading and what is below it."""
    return f"<section>\n<h2>{title}</h2>\n{''.join(parts)}</section>\n"


def plot(name: str, figure: Figure, label: str, caption: str = "", kind: str = "") -> str:
    """A figure: the place for it, and its data, in which no character can end the script that they lie in.

    Args:
        name: Identity in the document.
        figure: As plotly.js takes it.
        label: What it shows, for people who do not see it; plain text.
        caption: Below it.
        kind: Class that gives its height.
    """
    data = json.dumps(figure, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    place = f'class="plot {kind}" id="{name}" data-figure="{name}-data" role="img" aria-label="{plain(label)}"'
    return (
        f'<figure><div {place}></div>\n<script type="application/json" id="{name}-data">{data}</script>\n'
        f"{below}</figure>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> str:
    """A table; the columns whose heads are among ``numbers`` are set to the right."""
    kinds = [' class="number"' if head in set(numbers) else "" for head in heads]

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{value}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    head, body = cells("th", heads), "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'


def facts(values: Mapping[str, tuple[str, str]]) -> str:
    """Named values, each with a word about it."""
    shown = (
        f"<div><dt>{name}</dt><dd>{value} <small>{word}</small></dd></div>" for name, (value, word) in values.items()
    )
    return f'<dl class="facts">{"".join(shown)}</dl>\n'


def sentences(title: str, found: Iterable[str]) -> str:
    """A list of sentences, plain text; nothing where there are none."""
    items = "".join(f"<li>{plain(sentence)}</li>\n" for sentence in found)
    return f"<h3>{title}</h3>\n<ul>\n{items}</ul>\n" if items else ""


def legend(colours: Mapping[str, str]) -> str:
    """Names and their colours, for figures that share them."""
    shown = (f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in colours.items())
    return f'<p class="legend">{"".join(shown)}</p>\n'
