"""Every tolerance of the suite in one table, each with its reason; tests hold no loose numbers."""

FLOAT64 = 1e-12
"Relative; sums of float64 in another order (promise 1 of the design)."

PEAK_RATE = 0.15
"""Relative; a vendor's peak rate against 2 x SMs x clock x multiply-adds per clock. Data-center cards run plain and
tensor cores at different clocks (13 % on the H100 NVL); a sparsity figure would be 100 % off."""
