"""Rollouts: scheduling of samples and groups, admission, filters, evaluation, simulation. Emits events, owns no files."""
