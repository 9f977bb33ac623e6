"""Writes run directories: the order of files, the ledger, checkpoints, the lock. A run is plain files that a person can open."""
