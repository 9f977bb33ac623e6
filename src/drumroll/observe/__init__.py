"""Shows runs to people: terminal, trackers, report."""
