"""The format of a run directory, its reader, and durable writing."""
