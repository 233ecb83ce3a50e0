"""What makes any step traceable: devices that are not there, libraries, loaders, what cannot be looked into."""
