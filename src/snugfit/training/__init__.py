"""The training room: exact windows of micro-batches, precision, activation checkpointing, the one training step."""
