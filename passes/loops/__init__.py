"""`linalg.generic` ops: reading, editing, fusing and tracing them."""
