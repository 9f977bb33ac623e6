"""Processes and threads: killable pools, deadlines, event loops, thread counts, rendezvous of torch process groups."""
