"""Proves on a job that its plan trains what the full batch would, and names what is dangerous."""
