"""One self-contained HTML page about a plan or a run: what it needs, when, why, and what else was possible."""
