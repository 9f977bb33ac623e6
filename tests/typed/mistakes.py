"""Mistakes that a type checker finds in a user's project, one in each line that ends with `# wrong`."""

import drumroll


def on_step(step: str) -> None: ...


run = drumroll.train({}, on_step=on_step)  # wrong
print(run.samples[0]["rewrad"])  # wrong
total: float = run.samples[0]["reward"]  # wrong
drumroll.train({}, overwrites=True)  # wrong
print(run.metrics[0]["step"].lower())  # wrong
