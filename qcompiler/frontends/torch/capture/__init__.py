"""From a model to one functional ATen graph: sizes, state, and checks of the graph's meaning."""
