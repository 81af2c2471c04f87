"""The simulated GPU as a device: memory, streams, events, graphs, and the checks on them."""
