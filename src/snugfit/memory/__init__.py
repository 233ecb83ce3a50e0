"""The memory room: what a step needs, predicted under fake tensors or measured by running it."""
