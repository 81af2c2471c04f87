"""From a model to one functional ATen graph: sizes, state, what the graph means beside the model."""
