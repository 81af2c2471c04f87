"""Views: which elements they read, and the rules by which they fold."""
