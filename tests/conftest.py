"""Shared settings of the suite: hypothesis without deadlines and with the same samples on every run."""

from hypothesis import settings

settings.register_profile("snugfit", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("snugfit")
