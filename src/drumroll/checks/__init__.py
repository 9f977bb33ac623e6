"""Checks that a user runs before, beside or after training: machine, recipe, plan, rewards, recorded runs."""
