"""The sources of weights' values, the graph's uses of weights, and the storage of packed weights."""
