"""Finds where the first value that is not finite came from, and what helps."""
