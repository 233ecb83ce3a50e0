"""Recordings of a real allocator: read as data, and replayed through the simulated one."""
