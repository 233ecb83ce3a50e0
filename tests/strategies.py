"""Hypothesis strategies: batch sizes, ways of cutting them, and labels some of which are ignored."""

from hypothesis import strategies as st

from models import VOCABULARY

batch_sizes = st.integers(1, 9)


@st.composite
def split_sizes(draw):
    """A batch size and a micro-batch size that is at most that."""
    size = draw(batch_sizes)
    return size, draw(st.integers(1, size))


@st.composite
def cuts(draw, size):
    """Any way of cutting a batch into consecutive parts, as their sizes."""
    left, parts = size, []
    while left:
        parts.append(draw(st.integers(1, left)))
        left -= parts[-1]
    return parts


@st.composite
def labels(draw, size, length=4):
    """Labels of which any may be ignored, whole samples included, but not all that a shifted loss sees."""
    rows = st.lists(st.sampled_from([-100, 0, 1, VOCABULARY - 1]), min_size=length, max_size=length)
    drawn = draw(st.lists(rows, min_size=size, max_size=size))
    drawn[draw(st.integers(0, size - 1))][draw(st.integers(1, length - 1))] = 2
    return drawn
