import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit import PlanError, sizes

BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"": 1, "B": 1, **BINARY, **DECIMAL}


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("512MiB", 512 * 2**20), ("1024", 1024), (" 1.5 kB ", 1500)],
)
def test_the_sizes_of_the_documentation_are_read(size, num_bytes):
    assert sizes.parse(size) == num_bytes


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_a_whole_number_of_any_unit_is_exact_in_any_case(number, unit, space):
    expected = number * UNITS[unit]
    assert sizes.parse(f"{number}{space}{unit}") == expected
    assert sizes.parse(f"{number}{space}{unit.upper()}") == expected
    assert sizes.parse(f"{number}{space}{unit.lower()}") == expected


@given(st.integers(1, 2**62))
def test_a_plain_number_is_bytes(num_bytes):
    assert sizes.parse(num_bytes) == num_bytes
    assert sizes.parse(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(("binary", "decimal"), list(zip(BINARY, DECIMAL, strict=True)))
def test_binary_and_decimal_units_are_told_apart(binary, decimal):
    assert sizes.parse(f"3{binary}") == 3 * BINARY[binary]
    assert sizes.parse(f"3{decimal}") == 3 * DECIMAL[decimal]


@given(st.integers(1, 2**50))
def test_text_read_again_is_the_size_within_half_of_its_last_digit(num_bytes):
    unit = max((unit for unit in BINARY.values() if unit <= num_bytes), default=1)
    half_of_the_last_digit = unit / 200
    cut_off_fraction = 1 if unit > 1 else 0
    assert abs(sizes.parse(sizes.text(num_bytes)) - num_bytes) <= half_of_the_last_digit + cut_off_fraction


@given(st.integers(1, 2**50))
def test_a_negative_size_is_written_with_a_sign(num_bytes):
    assert sizes.text(-num_bytes) == "-" + sizes.text(num_bytes)


def test_text_keeps_a_digit_before_the_point_and_zero_is_bytes():
    assert sizes.text(2**30) == "1.00 GiB"
    assert sizes.text(2**30 - 2**20) == "1023.00 MiB"
    assert sizes.text(0) == "0 B"
    assert sizes.gib(3 * 2**29) == "1.50"


@pytest.mark.parametrize(
    "size", ["", "GiB", "24 Gigs", "x24GiB", "-1GiB", "1e3", "24GiB extra", "1,5GiB", "nan", "inf", None, 2.5, True, []]
)
def test_what_is_not_a_size_is_refused_and_shown(size):
    with pytest.raises(PlanError) as caught:
        sizes.parse(size)
    assert repr(size) in caught.value.got
    assert "GiB" in caught.value.hint


@pytest.mark.parametrize(
    "size",
    [
        pytest.param("9" * 5000, id="5000 digits"),
        pytest.param("9" * 5000 + ".5", id="5000 digits and a half"),
        pytest.param(10**5000, id="10^5000"),
        pytest.param(-(10**5000), id="-10^5000"),
        "9" * 30 + "GiB",
        2**63,
        "8388608TiB",
    ],
)
def test_a_size_beyond_any_machine_is_refused(size):
    with pytest.raises(PlanError, match="beyond any machine"):
        sizes.parse(size)
    assert sizes.parse(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize("size", ["0", "0GiB", 0, -1, "0.1B"])
def test_a_size_below_one_byte_is_refused(size):
    with pytest.raises(PlanError, match="must be positive"):
        sizes.parse(size)


@pytest.mark.parametrize(("size", "binary", "decimal"), [("24G", "24GiB", "24GB"), ("512m", "512MiB", "512MB")])
def test_an_ambiguous_unit_is_refused_and_both_readings_are_offered(size, binary, decimal):
    with pytest.raises(PlanError) as caught:
        sizes.parse(size)
    assert binary in caught.value.hint.replace(" ", "")
    assert decimal in caught.value.hint.replace(" ", "")
