"""Processes and threads: killable process pools, deadlines, event loops, thread counts, and the rendezvous of torch
process groups.
"""
