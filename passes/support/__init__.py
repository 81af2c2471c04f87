"""What several passes share: reading and editing loop nests, making views, tracing scalar expressions."""
