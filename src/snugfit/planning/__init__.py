"""The planning room: devices, a time model, and the search for the fastest plan that fits."""
