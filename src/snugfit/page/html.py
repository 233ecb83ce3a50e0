"""The page: one HTML file that holds its figures, its style and plotly itself, and asks the network for nothing.

Entry points: ``document`` and ``write``. What it says is ``sections``'s. Whatever comes from names is escaped, and the
page's own policy lets no script run but the two that it was written with.
"""

import base64
import hashlib
from importlib import resources
from pathlib import Path

from snugfit.errors import UnsupportedError
from snugfit.page import sections
from snugfit.page.details import Details
from snugfit.page.drawing import plain
from snugfit.page.run_folder import Run
from snugfit.plans import write_atomically


def write(file: Path, details: Details, run: Run | None = None) -> int:
    """Write the page, and return its size in bytes; the file is complete or untouched.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    page = document(details, run)
    write_atomically(file, page)
    return len(page.encode())


def document(details: Details, run: Run | None = None) -> str:
    """The page as text.

    Args:
        details: What is known of the plan.
        run: What a run under the plan left behind.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    library, script = plotly_script(), _own("draw.js")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(library)} {_hash(script)}"
    )
    title = f"{details.target}, batch {details.plan.batch_size}, {details.memory.device}: snugfit"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{plain(title)}</title>
<style>
{_own("page.css")}</style>
</head>
<body>
{sections.body(details, run)}
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def plotly_script() -> str:
    """plotly.js as its Python package brings it along.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # the extra "report": nothing else of snugfit needs it
    except ImportError as error:
        raise UnsupportedError(
            "the page needs plotly, which is not installed here",
            got=str(error),
            expected="plotly 5.24 or newer",
            hint='pip install "snugfit[report]"',
        ) from error
    return str(get_plotlyjs())


def _own(name: str) -> str:
    return resources.files("snugfit.page").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
