"""From a torch model to the IR: capture, operators, import."""
