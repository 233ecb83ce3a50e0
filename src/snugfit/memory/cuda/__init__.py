"""What CUDA does differently from the CPU: the rules that make a trace of fake CPU tensors one of a CUDA device."""
