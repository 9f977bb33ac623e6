"""Worker groups: all workers of a role behind typed calls, on the `local` runtime (this process) or on `ray`."""
