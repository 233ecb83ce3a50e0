"""The CPU as a device: what its kernels allocate beside the tensors that a trace sees."""
