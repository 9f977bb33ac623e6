"""What differs from the one loop: pipelines that learn from something else than their own scored samples."""
