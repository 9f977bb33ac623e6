"""The files of a run directory: their format, durable writing, and reading. Everything else that touches a run builds on this."""
