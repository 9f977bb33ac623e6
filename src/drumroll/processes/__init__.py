"""Processes and threads: killable pools, deadlines, event loops, thread counts, and the address where torch processes meet."""
