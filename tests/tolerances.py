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

POOLED_FLOAT32 = 1e-4
"""Relative; variances pooled from float32 means of micro-batches. At a mean of a thousand standard deviations these are
rounded by 6e-5; E[x^2] - E[x]^2 would be 10 % off."""

STOCHASTIC_MEAN = 5e-3
"Absolute; the mean over thousands of stochastically rounded weights (case C078)."

GOLDEN = 1e-6
"""Relative; twenty float32 losses of a training run. Kernels add in an order of their own: one run against another with
AVX512, AVX2 or neither, one thread or two, in parts or not, differed by at most 2.3e-7, two units in the last place."""

PROMISED = {"float64": 1e-12, "32-true": 1e-5, "bf16-mixed": 2**-5, "16-mixed": 2**-8, "bf16-true": 2**-5}
"""Relative to the parts of the sum; a window's gradient against the full batch's. 1e-12 is promise 1; the others are
some eight units of the type's last place (2**-8, 2**-11), for a matrix product rounds a sample's activations by its
shape."""

CHUNKED_FLOAT32 = 1e-6
"""Relative to the norm; a chunked against a plain cross entropy in float32. Both differ from float64 by 1 to 3e-7, the
plain one by more: its weight's gradient is summed in one go, the softmax is rounded from logits of size 10."""
