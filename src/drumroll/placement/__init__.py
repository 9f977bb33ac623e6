"""Placement: which role runs on which devices. Plain arithmetic, done before anything starts."""
