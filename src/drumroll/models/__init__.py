"""Models: attention used by engine and learner alike, loading, and the tiny built-in ones."""
