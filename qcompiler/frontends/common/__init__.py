"""What the frontends share: bodies of loops, forms of IR, and what a frontend hands to the pipeline."""
