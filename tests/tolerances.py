"""Every tolerance of the suite in one table, each with its reason; tests hold no loose numbers."""

FLOAT64 = 1e-12
"Relative; sums of float64 in another order (promise 1 of the design)."

PEAK_RATE = 0.15
"""Relative; a vendor's peak rate against 2 x SMs x clock x multiply-adds per clock. Data-center cards run plain and
tensor cores at different clocks (13 % on the H100 NVL); a sparsity figure would be 100 % off."""

EXACT_VALUE = 1e-6
"Absolute; a value that is known in closed form, in float32 (the cases)."

CUT_FLOAT32 = {"rtol": 1.3e-6, "atol": 1e-5}
"torch.testing's float32 defaults; sums of float32 in another order, over one window."

FP16_SMALL_GRADIENT = 1e-3
"Relative; 1e-8 through fp16 at scale 65536 is 9.997e-9 (case C035)."
